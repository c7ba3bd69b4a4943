"""Plan the passages of a context: the entities they are about, and the facts they state.

A question is planted in a plan, with the facts that it needs.
"""

from random import Random

from picbench.workloads.synthetic.names import Split
from picbench.workloads.synthetic.passages import Manner, Passage, mention, write, write_on
from picbench.workloads.synthetic.questions import (
    Question,
    bridge_comparison,
    comparison,
    follow,
    kinship,
    same,
)
from picbench.workloads.synthetic.world import (
    ORGANISATION,
    PERSON,
    WORK,
    Entity,
    Fact,
    Form,
    StatedFacts,
    World,
    relations,
    relations_of,
    relatives,
)

_FORMS: tuple[Form, ...] = (*PERSON * 3, *WORK, "town", "town", "company", "university", "studio")
# Probabilities that a new entity is one that facts mention, or else resembles an entity with a
# passage; that a passage mentions a fact of another; that a fact comes in the second passage.
_MENTIONED, _LOOKALIKE, _ECHO, _LATE = 0.5, 0.6, 0.25, 0.75
#: Relations that passages about things of one form are about, and facts of one account.
_PALETTE, _FACTS = 4, (2, 4)

_STARTS: tuple[Form, ...] = (*PERSON, *WORK, "town", "company", "university", "studio")
_MAKERS: tuple[tuple[Form, str], ...] = (
    ("film", "director"),
    ("film", "composer"),
    ("novel", "author"),
    ("opera", "composer"),
)
_YEARS: tuple[tuple[tuple[Form, ...], str], ...] = (
    (PERSON, "birth year"),
    (WORK, "release year"),
    (ORGANISATION, "founding year"),
)
_SHARED: tuple[tuple[Form, str], ...] = (
    ("man", "birthplace"),
    ("woman", "trade"),
    ("woman", "employer"),
    ("man", "home"),
    ("town", "country"),
    ("film", "director"),
    ("novel", "author"),
    ("opera", "composer"),
    ("film", "setting"),
    ("company", "headquarters"),
)


class PassagePlan:
    """Collects first the facts that a question needs, then others around them."""

    def __init__(self, rng: Random, split: Split, manner: Manner) -> None:
        self._rng = rng
        self._manner = manner
        self.world = World(rng, split)
        self._plan: dict[Entity, dict[str, Fact]] = {}
        self._palette: dict[Form, list[str]] = {}

    @property
    def stated(self) -> StatedFacts:
        """The facts that the passages will state."""
        return StatedFacts(fact for facts in self._plan.values() for fact in facts.values())

    def state(self, subject: Entity, relation: str) -> Fact:
        """Plan to state this fact in a passage about `subject`."""
        fact = self.world.fact(subject, relation)
        self._plan.setdefault(subject, {})[relation] = fact
        return fact

    def write(self, passages: int, apart: Question) -> list[Passage]:
        """Write `passages` passages, or as many as the planned facts need, in a random order.

        The facts of `apart` are stated in one passage only.
        """
        accounts: list[list[Passage]] = []
        waiting = list(self._plan)
        room = passages
        while waiting or room > 0:
            subject = waiting.pop() if waiting else self._newcomer()
            self._enrich(subject)
            cut = room > 1 + len(waiting) and self._flip(self._manner.cut)
            accounts.append(self._account(subject, cut, apart))
            room -= len(accounts[-1])
        self._rng.shuffle(accounts)
        return [passage for account in accounts for passage in account]

    def _account(self, subject: Entity, cut: bool, apart: Question) -> list[Passage]:
        """One passage with the facts about `subject`, or two."""
        facts = list(self._plan[subject].values())
        late = [fact for fact in facts if cut and (fact is facts[-1] or self._flip(_LATE))]
        early = [fact for fact in facts if fact not in late]
        first = self._echo(write(self._rng, subject, early, self._manner), subject, apart)
        return [first, write_on(self._rng, subject, late)] if cut else [first]

    def _enrich(self, subject: Entity) -> None:
        """Plan more facts about `subject`, with relations that other passages state as well."""
        nouns = self._nouns(subject.form)
        for noun in self._rng.sample(nouns, min(len(nouns), self._rng.randint(*_FACTS))):
            self.state(subject, noun)

    def _nouns(self, form: Form) -> list[str]:
        """The few relations that passages about things of this form are about."""
        if form not in self._palette:
            kind = PERSON if form in PERSON else (form,)
            stated = {fact.relation for fact in self.stated.facts if fact.subject.form in kind}
            others = [noun for noun in relations_of()[form] if noun not in stated]
            self._rng.shuffle(others)
            nouns = [noun for noun in relations_of()[form] if noun in stated] + others
            self._palette |= dict.fromkeys(kind, nouns[: max(_PALETTE, len(stated))])
        return self._palette[form]

    def _echo(self, passage: Passage, subject: Entity, apart: Question) -> Passage:
        """Add a fact about another entity to some passages."""
        if not self._flip(_ECHO):
            return passage
        others = [fact for fact in self.stated.facts if fact.subject is not subject]
        mentions = [fact for fact in others if fact.object is subject]
        found = [fact for fact in mentions or others if fact not in apart.facts]
        return mention(self._rng, passage, self._rng.choice(found)) if found else passage

    def _newcomer(self) -> Entity:
        """Plan a passage about an entity without one: one that facts mention, or a new one."""
        newcomer = self._mentioned() or self._lookalike() or self._stranger()
        self._plan[newcomer] = {}
        return newcomer

    def _mentioned(self) -> Entity | None:
        found = [
            fact.object
            for fact in self.stated.facts
            if fact.object.form in relations_of() and fact.object not in self._plan
        ]
        return self._rng.choice(found) if found and self._flip(_MENTIONED) else None

    def _lookalike(self) -> Entity | None:
        if not self._plan or not self._flip(_LOOKALIKE):
            return None
        like = self._rng.choice(tuple(self._plan))
        return self.world.add(like.form, like=like)

    def _stranger(self) -> Entity:
        return self.world.add(self._rng.choice(_FORMS))

    def _flip(self, probability: float) -> bool:
        return self._rng.random() < probability


def plant_chain(rng: Random, plan: PassagePlan, hops: int) -> Question:
    """A chain of `hops` facts, each about the object of the one before."""
    subject = plan.world.add(rng.choice(_STARTS))
    facts: list[Fact] = []
    for step in range(hops):
        facts.append(_onward(rng, plan, subject, last=step == hops - 1))
        subject = facts[-1].object
    return follow(facts, rng, f"{hops}-hop")


def plant_kinship(rng: Random, plan: PassagePlan) -> Question:
    """A relative two steps away."""
    first, second = rng.choice(tuple(relatives().values()))
    person = plan.world.add(rng.choice(PERSON))
    plan.state(plan.state(person, first).object, second)
    return _asked(kinship(rng, plan.stated))


def plant_comparison(rng: Random, plan: PassagePlan) -> Question:
    """Two things of a kind with different years."""
    forms, relation = rng.choice(_YEARS)
    first = plan.world.add(rng.choice(forms))
    second = plan.world.add(first.form if forms is ORGANISATION else rng.choice(forms))
    while second.year == first.year:
        second = plan.world.add(second.form)
    for entity in (first, second):
        plan.state(entity, relation)
    return _asked(comparison(rng, plan.stated))


def plant_bridge_comparison(rng: Random, plan: PassagePlan) -> Question:
    """Two works whose makers were born in different years."""
    form, maker = rng.choice(_MAKERS)
    found = None
    while found is None:
        for _ in range(2):
            work = plan.world.add(form)
            plan.state(plan.state(work, maker).object, "birth year")
        found = bridge_comparison(rng, plan.stated)
    return found


def plant_same(rng: Random, plan: PassagePlan) -> Question:
    """Two things that share an object or not, equally likely."""
    form, relation = rng.choice(_SHARED)
    first = plan.world.add(form)
    second, third = (plan.world.add(form, year=first.year) for _ in range(2))
    shared = plan.state(first, relation).object
    plan.world.add_fact(second, relation, shared)
    plan.state(second, relation)
    while plan.state(third, relation).object.name == shared.name:
        third = plan.world.add(form)
    return _asked(same(rng, plan.stated, rng.random() < 0.5))


def _onward(rng: Random, plan: PassagePlan, subject: Entity, last: bool) -> Fact:
    """State a fact about `subject` whose object is new and, unless `last`, has facts itself."""
    noun = rng.choice(
        [
            noun
            for noun in relations_of()[subject.form]
            if not plan.world.has_fact(subject, noun)
            and (last or all(form in relations_of() for form in relations()[noun].objects))
        ]
    )
    plan.world.new_fact(subject, noun)
    return plan.state(subject, noun)


def _asked(question: Question | None) -> Question:
    if question is None:
        raise RuntimeError("the planted facts do not make a question")
    return question

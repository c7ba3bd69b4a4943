"""A context under construction: which entities have passages, and what these state."""

from random import Random

from picbench.workloads.testbed.names import Split
from picbench.workloads.testbed.passages import Manner, Passage, write
from picbench.workloads.testbed.questions import Question
from picbench.workloads.testbed.relations import PERSON, RELATIONS_OF, WORK, Form
from picbench.workloads.testbed.stated import Stated
from picbench.workloads.testbed.world import Entity, Fact, World

_FORMS: tuple[Form, ...] = (*PERSON * 3, *WORK, "town", "town", "company", "university", "studio")
_LOOKALIKE = 0.4
_ECHO = 0.25


class Scene:
    """Plans passages: first the facts that a question needs, then others around them."""

    def __init__(self, rng: Random, split: Split) -> None:
        self._rng = rng
        self.world = World(rng, split)
        self._plan: dict[Entity, dict[str, Fact]] = {}

    @property
    def stated(self) -> Stated:
        """The facts that the passages will state."""
        return Stated(fact for facts in self._plan.values() for fact in facts.values())

    def state(self, subject: Entity, relation: str) -> Fact:
        """Have the passage about `subject` state this fact."""
        fact = self.world.fact(subject, relation)
        self._plan.setdefault(subject, {})[relation] = fact
        return fact

    def fill(self, passages: int) -> None:
        """Plan further passages until there are so many, and further facts in all of them."""
        while len(self._plan) < passages:
            self._plan[self._newcomer()] = {}
        for subject in list(self._plan):
            nouns = RELATIONS_OF[subject.form]
            for noun in self._rng.sample(nouns, min(len(nouns), self._rng.randint(2, 4))):
                self.state(subject, noun)

    def write(self, manner: Manner, apart: Question | None = None) -> list[Passage]:
        """Write the passages in a random order; facts of `apart` are in their own passage only."""
        told = set(apart.facts) if apart else set()
        echoes = [f for facts in self._plan.values() for f in facts.values() if f not in told]
        subjects = list(self._plan)
        self._rng.shuffle(subjects)
        return [self._passage(subject, echoes, manner) for subject in subjects]

    def _passage(self, subject: Entity, echoes: list[Fact], manner: Manner) -> Passage:
        facts = list(self._plan[subject].values())
        if echoes and self._rng.random() < _ECHO:
            about = [fact for fact in echoes if fact.object is subject]
            echo = self._rng.choice(about or echoes)
            if echo not in facts:
                facts.append(echo)
        return write(self._rng, subject, facts, manner)

    def _newcomer(self) -> Entity:
        """An entity without a passage: one that facts mention, or a new one."""
        mentioned = [
            fact.object
            for facts in self._plan.values()
            for fact in facts.values()
            if fact.object.form in RELATIONS_OF and fact.object not in self._plan
        ]
        if mentioned and self._rng.random() < 0.5:
            return self._rng.choice(mentioned)
        if self._plan and self._rng.random() < _LOOKALIKE:
            like = self._rng.choice(tuple(self._plan))
            return self.world.add(like.form, like=like)
        return self.world.add(self._rng.choice(_FORMS))

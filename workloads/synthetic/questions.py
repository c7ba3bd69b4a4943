"""Questions over stated facts: chains, kinship, comparisons, yes or no."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random

from picbench.workloads.synthetic.reply import compose
from picbench.workloads.synthetic.world import (
    PERSON,
    WORK,
    Entity,
    Fact,
    StatedFacts,
    relations,
    relatives,
)
from picbench.workloads.yaml_data import read_data

_TRIES = 60
_KINDS = (PERSON, WORK, ("town",), ("company",), ("university",), ("studio",))


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the reply that derives its answer, the answer, and the facts it needs."""

    text: str
    reply: str
    answer: str
    facts: tuple[Fact, ...]
    kind: str


def chain(rng: Random, stated: StatedFacts, hops: int) -> Question | None:
    """A question over `hops` facts, each about the object of the one before."""
    return _attempt(lambda: _chain(rng, stated, hops))


def kinship(rng: Random, stated: StatedFacts) -> Question | None:
    """A question for a relative that two facts imply (2WikiMultihopQA's inference)."""
    found = [
        (name, (fact, onward))
        for name, (first, second) in relatives().items()
        for fact in stated.of(first)
        if (onward := stated.find(fact.object, second))
    ]
    if not found:
        return None
    name, facts = rng.choice(found)
    return _derived(f"Who is the {name} of {facts[0].subject.name}?", facts, "inference")


def comparison(rng: Random, stated: StatedFacts) -> Question | None:
    """Which of two things is older or younger."""
    return _attempt(lambda: _comparison(rng, stated))


def bridge_comparison(rng: Random, stated: StatedFacts) -> Question | None:
    """Which of two works has the older or younger maker: four facts."""
    return _attempt(lambda: _bridge_comparison(rng, stated))


def same(rng: Random, stated: StatedFacts, wanted: bool) -> Question | None:
    """Whether two things have the same home, country, maker, ...: yes if `wanted`, else no."""
    wordings = read_data("synthetic", "questions")["same"]
    relation = rng.choice([noun for noun in wordings if stated.of(noun)] or ["home"])
    pairs = [
        (first, second)
        for first, second in permutations(stated.of(relation), 2)
        if (first.object.name == second.object.name) == wanted and _alike(first, second)
    ]
    if not pairs:
        return None
    pair = rng.choice(pairs)
    answer = "yes" if wanted else "no"
    text = rng.choice(wordings[relation]).format(a=pair[0].subject.name, b=pair[1].subject.name)
    reply = compose([*map(str, pair), f"same is {answer}"])
    return Question(text, reply, answer, pair, "yes-no")


def follow(facts: Sequence[Fact], rng: Random, kind: str) -> Question:
    """The chain question over these facts."""
    inner = facts[0].subject.name
    for fact in facts[:-1]:
        inner = rng.choice(relations()[fact.relation].phrases).format(x=inner)
    text = rng.choice(relations()[facts[-1].relation].questions).format(x=inner)
    return _derived(text, facts, kind)


def _attempt(make: Callable[[], Question | None]) -> Question | None:
    return next((found for found in (make() for _ in range(_TRIES)) if found), None)


def _derived(text: str, facts: Sequence[Fact], kind: str) -> Question:
    return Question(text, compose(map(str, facts)), facts[-1].object.name, tuple(facts), kind)


def _chain(rng: Random, stated: StatedFacts, hops: int) -> Question | None:
    facts = [rng.choice(stated.facts)]
    while len(facts) < hops:
        onward = stated.about(facts[-1].object)
        if not onward:
            return None
        facts.append(rng.choice(onward))
    entities = {fact.subject for fact in facts} | {facts[-1].object}
    if len(entities) <= hops:
        return None
    return follow(facts, rng, f"{hops}-hop")


def _comparison(rng: Random, stated: StatedFacts) -> Question | None:
    year, asks = rng.choice(tuple(read_data("synthetic", "questions")["comparisons"].items()))
    pair = _pair(rng, stated, year)
    if pair is None or pair[0].object.name == pair[1].object.name:
        return None
    subjects = (pair[0].subject, pair[1].subject)
    return _year_question(rng, asks, subjects, pair, pair, "comparison")


def _bridge_comparison(rng: Random, stated: StatedFacts) -> Question | None:
    maker = rng.choice(("director", "author", "composer"))
    pair = _pair(rng, stated, maker)
    if pair is None or pair[0].object is pair[1].object:
        return None
    first, second = (stated.find(fact.object, "birth year") for fact in pair)
    if first is None or second is None or first.object.name == second.object.name:
        return None
    asks = {
        outcome: (f"Which has the {word} {maker}, {{a}} or {{b}}?",)
        for outcome, word in (("earlier", "older"), ("later", "younger"))
    }
    subjects = (pair[0].subject, pair[1].subject)
    steps = (pair[0], first, pair[1], second)
    return _year_question(rng, asks, subjects, (first, second), steps, "bridge-comparison")


def _year_question(
    rng: Random,
    asks: Mapping[str, Sequence[str]],
    subjects: tuple[Entity, Entity],
    years: tuple[Fact, Fact],
    facts: Sequence[Fact],
    kind: str,
) -> Question:
    outcome = rng.choice(("earlier", "later"))
    # Stating the year before the name splits a comparison into two steps that are easy to learn.
    text = rng.choice(asks[outcome]).format(a=subjects[0].name, b=subjects[1].name)
    end, pick = ("first", min) if outcome == "earlier" else ("last", max)
    limit = pick(fact.object.name for fact in years)
    winner = 0 if years[0].object.name == limit else 1
    answer = subjects[winner].name
    steps = [*map(str, facts), f"{end} is {limit}"]
    if years[0].subject is not subjects[0]:
        steps.append(f"{outcome} maker is {years[winner].subject.name}")
    reply = compose([*steps, f"{outcome} is {answer}"])
    return Question(text, reply, answer, tuple(facts), kind)


def _pair(rng: Random, stated: StatedFacts, relation: str) -> tuple[Fact, Fact] | None:
    facts = stated.of(relation)
    first = rng.choice(facts) if facts else None
    others = [fact for fact in facts if first and fact is not first and _alike(first, fact)]
    return (first, rng.choice(others)) if first and others else None


def _alike(one: Fact, other: Fact) -> bool:
    """Whether the facts are about things of one kind."""
    forms = (one.subject.form, other.subject.form)
    return any(all(form in kind for form in forms) for kind in _KINDS)

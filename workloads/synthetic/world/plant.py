"""Add a question to a passage plan, with the facts that it needs."""

from random import Random

from picbench.workloads.synthetic.world.entities import (
    ORGANISATION,
    PERSON,
    WORK,
    Entity,
    Fact,
    Form,
)
from picbench.workloads.synthetic.world.passage_plan import PassagePlan
from picbench.workloads.synthetic.world.questions import (
    Question,
    bridge_comparison,
    comparison,
    follow,
    kinship,
    same,
)
from picbench.workloads.synthetic.world.relations import KINSHIP, RELATIONS, RELATIONS_OF

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
    first, second = rng.choice(tuple(KINSHIP.values()))
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
            for noun in RELATIONS_OF[subject.form]
            if not plan.world.has_fact(subject, noun)
            and (last or all(form in RELATIONS_OF for form in RELATIONS[noun].objects))
        ]
    )
    plan.world.new_fact(subject, noun)
    return plan.state(subject, noun)


def _asked(question: Question | None) -> Question:
    if question is None:
        raise RuntimeError("the planted facts do not make a question")
    return question

"""Plant a question into a scene: state the facts that it needs, then ask it."""

from random import Random

from picbench.workloads.synthetic.world.questions import (
    Question,
    bridge_comparison,
    comparison,
    follow,
    kinship,
    same,
)
from picbench.workloads.synthetic.world.relation import ORGANISATION, PERSON, WORK, Form
from picbench.workloads.synthetic.world.relations import KINSHIP, RELATIONS, RELATIONS_OF
from picbench.workloads.synthetic.world.scene import Scene
from picbench.workloads.synthetic.world.world import Entity, Fact

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


def plant_chain(rng: Random, scene: Scene, hops: int) -> Question:
    """A chain of `hops` facts, each about the object of the one before."""
    subject = scene.world.add(rng.choice(_STARTS))
    facts: list[Fact] = []
    for step in range(hops):
        facts.append(_onward(rng, scene, subject, last=step == hops - 1))
        subject = facts[-1].object
    return follow(facts, rng, f"{hops}-hop")


def plant_kinship(rng: Random, scene: Scene) -> Question:
    """A relative two steps away."""
    first, second = rng.choice(tuple(KINSHIP.values()))
    person = scene.world.add(rng.choice(PERSON))
    scene.state(scene.state(person, first).object, second)
    return _asked(kinship(rng, scene.stated))


def plant_comparison(rng: Random, scene: Scene) -> Question:
    """Two things of a kind with different years."""
    forms, relation = rng.choice(_YEARS)
    first = scene.world.add(rng.choice(forms))
    second = scene.world.add(first.form if forms is ORGANISATION else rng.choice(forms))
    while second.year == first.year:
        second = scene.world.add(second.form)
    for entity in (first, second):
        scene.state(entity, relation)
    return _asked(comparison(rng, scene.stated))


def plant_bridge_comparison(rng: Random, scene: Scene) -> Question:
    """Two works whose makers were born in different years."""
    form, maker = rng.choice(_MAKERS)
    found = None
    while found is None:
        for _ in range(2):
            work = scene.world.add(form)
            scene.state(scene.state(work, maker).object, "birth year")
        found = bridge_comparison(rng, scene.stated)
    return found


def plant_same(rng: Random, scene: Scene) -> Question:
    """Two things with an object in common or not, equally likely."""
    form, relation = rng.choice(_SHARED)
    first = scene.world.add(form)
    second, third = (scene.world.add(form, year=first.year) for _ in range(2))
    shared = scene.state(first, relation).object
    scene.world.tell(second, relation, shared)
    scene.state(second, relation)
    while scene.state(third, relation).object.name == shared.name:
        third = scene.world.add(form)
    return _asked(same(rng, scene.stated, rng.random() < 0.5))


def _onward(rng: Random, scene: Scene, subject: Entity, last: bool) -> Fact:
    """State a fact about `subject` whose object is new and, unless `last`, has facts itself."""
    noun = rng.choice(
        [
            noun
            for noun in RELATIONS_OF[subject.form]
            if not scene.world.knows(subject, noun)
            and (last or all(form in RELATIONS_OF for form in RELATIONS[noun].objects))
        ]
    )
    scene.world.news(subject, noun)
    return scene.state(subject, noun)


def _asked(question: Question | None) -> Question:
    if question is None:
        raise RuntimeError("the planted facts do not make a question")
    return question

"""A small consistent world: entities, relations, and the facts between them.

Every row has a new world, so that no fact can be memorised. Facts are functional (one object for
a subject and a relation) and consistent: marriage is symmetric, a capital is in its country,
parents and teachers are older than children and pupils.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from types import MappingProxyType
from typing import Any, Literal

from picbench.workloads.synthetic import names
from picbench.workloads.synthetic.names import Split
from picbench.workloads.yaml_data import read_data

Form = Literal[
    "woman", "man", "town", "country", "film", "novel", "opera", "company", "university", "studio",
    "river", "tongue", "trade", "coin", "year",
]  # fmt: skip

PERSON: tuple[Form, ...] = ("woman", "man")
WORK: tuple[Form, ...] = ("film", "novel", "opera")
ORGANISATION: tuple[Form, ...] = ("company", "university", "studio")

_YEARS = MappingProxyType(
    {
        **dict.fromkeys(PERSON, (1860, 1970)),
        **dict.fromkeys(WORK, (1900, 2000)),
        **dict.fromkeys(ORGANISATION, (1880, 2000)),
        "town": (1700, 1860),
    }
)
_FRESH = 1000

#: The probability that a fact's object is an entity that exists already.
_KNOWN = 0.7


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation between things, and its wordings.

    `noun` completes "the ... of"; `elder` is the least number of years by which the object is
    older than the subject; `statements` state the fact in a passage, `phrases` name the object
    inside a longer question, `questions` ask for the object.
    """

    noun: str
    subjects: tuple[Form, ...]
    objects: tuple[Form, ...]
    statements: tuple[str, ...]
    phrases: tuple[str, ...]
    questions: tuple[str, ...]
    elder: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Entity:
    """A thing with a name; `year` is that of its birth, foundation or release."""

    name: str
    form: Form
    year: int = 0


@dataclass(frozen=True, slots=True)
class Fact:
    """`relation` of `subject` is `object`."""

    subject: Entity
    relation: str
    object: Entity

    def __str__(self) -> str:
        return f"{self.relation} of {self.subject.name} is {self.object.name}"


class StatedFacts:
    """Facts, found by subject, by relation, or by both."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self.facts = tuple(facts)
        self._about: dict[Entity, list[Fact]] = {}
        self._of: dict[str, list[Fact]] = {}
        self._by_key: dict[tuple[Entity, str], Fact] = {}
        for fact in self.facts:
            self._about.setdefault(fact.subject, []).append(fact)
            self._of.setdefault(fact.relation, []).append(fact)
            self._by_key[fact.subject, fact.relation] = fact

    def about(self, subject: Entity) -> Sequence[Fact]:
        """The facts about `subject`."""
        return self._about.get(subject, ())

    def of(self, relation: str) -> Sequence[Fact]:
        """The facts with this relation."""
        return self._of.get(relation, ())

    def find(self, subject: Entity, relation: str) -> Fact | None:
        """The fact about the `relation` of `subject`, if it is stated."""
        return self._by_key.get((subject, relation))


@cache
def relations() -> Mapping[str, Relation]:
    """Every relation by its noun."""
    found = read_data("synthetic", "relations")["relations"]
    return MappingProxyType({noun: _relation(noun, values) for noun, values in found.items()})


@cache
def relations_of() -> Mapping[Form, Sequence[str]]:
    """The nouns of the relations that a thing of each form has."""
    found: dict[Form, list[str]] = {}
    for relation in relations().values():
        for form in relation.subjects:
            found.setdefault(form, []).append(relation.noun)
    return MappingProxyType(found)


def relatives() -> Mapping[str, tuple[str, str]]:
    """Kinship that two facts imply: the name of the relative, then the two steps to it."""
    found: Mapping[str, tuple[str, str]] = read_data("synthetic", "relations")["kinship"]
    return found


def _relation(noun: str, values: Mapping[str, Any]) -> Relation:
    lists = {name: tuple(value) for name, value in values.items() if name != "elder"}
    return Relation(noun, **lists, elder=values.get("elder"))


class World:
    """Entities and facts, made on demand."""

    def __init__(self, rng: Random, split: Split) -> None:
        self._rng = rng
        self._split = split
        self._by_form: dict[Form, list[Entity]] = {}
        self._facts: dict[tuple[Entity, str], Fact] = {}
        self._kin: set[tuple[Entity, Entity]] = set()
        self._taken: set[str] = set()

    def add(self, form: Form, year: int | None = None, like: Entity | None = None) -> Entity:
        """Add an entity with a name that is new here, if possible one that resembles `like`."""
        name = self._name(form, like.name if like else None)
        if year is None:
            year = self._rng.randrange(*_YEARS.get(form, (0, 1)))
        entity = Entity(name, form, year)
        self._by_form.setdefault(form, []).append(entity)
        return entity

    def fact(self, subject: Entity, relation: str) -> Fact:
        """Return the fact that answers "what is the `relation` of `subject`?"."""
        known = self._facts.get((subject, relation))
        return known or self.add_fact(subject, relation, self._object(subject, relation))

    def new_fact(self, subject: Entity, relation: str) -> Fact:
        """Make a fact that does not exist yet, with a new entity as its object."""
        known = self._facts.get((subject, relation))
        return known or self.add_fact(subject, relation, self._object(subject, relation, 0.0))

    def add_fact(self, subject: Entity, relation: str, found: Entity) -> Fact:
        """Make `found` the `relation` of `subject`, which must have none yet."""
        fact = self._facts[subject, relation] = Fact(subject, relation, found)
        self._kin |= {(subject, found), (found, subject)}
        if relation == "spouse":
            self._facts[found, "spouse"] = Fact(found, "spouse", subject)
        elif relation == "capital":
            self._facts[found, "country"] = Fact(found, "country", subject)
        return fact

    def has_fact(self, subject: Entity, relation: str) -> bool:
        """Whether `subject` has this relation."""
        return (subject, relation) in self._facts

    def _name(self, form: Form, like: str | None) -> str:
        make = _MAKERS[form]
        for attempt in range(_FRESH):
            name = make(self._rng, form, like if attempt < 3 else None)
            if name not in self._taken and names.split_of(name) == self._split:
                self._taken.add(name)
                return name
        raise RuntimeError(f"no name is left for a {form}")

    def _object(self, subject: Entity, relation: str, known: float = _KNOWN) -> Entity:
        """An object, with the probability `known` an entity that exists already, if one fits."""
        forms = relations()[relation].objects
        if forms == ("year",):
            return Entity(str(subject.year), "year")
        if forms == ("trade",):
            return Entity(self._rng.choice(read_data("synthetic", "words")["trades"]), "trade")
        if forms == ("coin",):
            return Entity(self._rng.choice(read_data("synthetic", "words")["coins"]), "coin")
        if forms == ("tongue",):
            return Entity(self._rng.choice(names.words("languages")), "tongue")
        if self._rng.random() < known:
            fitting = self._fitting(subject, relation)
            if fitting:
                return self._rng.choice(fitting)
        return self.add(self._rng.choice(forms), self._year_for(subject, relation))

    def _fitting(self, subject: Entity, relation: str) -> list[Entity]:
        wanted = relations()[relation]
        latest = 9999 if wanted.elder is None else subject.year - wanted.elder
        return [
            entity
            for form in wanted.objects
            for entity in self._by_form.get(form, ())
            if entity.year <= latest and self._free(subject, relation, entity)
        ]

    def _free(self, subject: Entity, relation: str, entity: Entity) -> bool:
        """Whether `entity` is unrelated to `subject`, and the fact's mirror image is new."""
        mirror = {"spouse": "spouse", "capital": "country"}.get(relation)
        return (
            entity is not subject
            and (subject, entity) not in self._kin
            and (mirror is None or (entity, mirror) not in self._facts)
        )

    def _year_for(self, subject: Entity, relation: str) -> int | None:
        elder = relations()[relation].elder
        return None if elder is None else subject.year - elder - self._rng.randrange(15)


_Maker = Callable[[Random, Form, str | None], str]


def _plain(make: Callable[[Random], str]) -> _Maker:
    return lambda rng, form, like: make(rng)


_MAKERS: MappingProxyType[Form, _Maker] = MappingProxyType(
    {
        **dict.fromkeys(PERSON, names.person_name),
        **dict.fromkeys(WORK, _plain(names.title)),
        **dict.fromkeys(ORGANISATION, names.organisation_name),
        "town": _plain(names.town_name),
        "country": _plain(names.country_name),
        "river": _plain(lambda rng: rng.choice(names.words("rivers"))),
    }
)

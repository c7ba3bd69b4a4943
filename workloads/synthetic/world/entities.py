"""The things of the invented world, the relations between them, and the facts of one context."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Form = Literal[
    "woman",
    "man",
    "town",
    "country",
    "film",
    "novel",
    "opera",
    "company",
    "university",
    "studio",
    "river",
    "tongue",
    "trade",
    "coin",
    "year",
]

PERSON: tuple[Form, ...] = ("woman", "man")
WORK: tuple[Form, ...] = ("film", "novel", "opera")
ORGANISATION: tuple[Form, ...] = ("company", "university", "studio")


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

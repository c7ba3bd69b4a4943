"""What a relation of the invented world is, and the forms of its things."""

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
    """What one thing can be to another, and how people say it.

    `noun` completes "the ... of"; `elder` is how many years, at least, the object is older than
    the subject; `statements` put the fact in a passage, `phrases` name the object inside a longer
    question, `questions` ask for it.
    """

    noun: str
    subjects: tuple[Form, ...]
    objects: tuple[Form, ...]
    statements: tuple[str, ...]
    phrases: tuple[str, ...]
    questions: tuple[str, ...]
    elder: int | None = None

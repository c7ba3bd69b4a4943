"""Where the needle of a generated row is, and the heading that says whom it is about."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from picbench.errors import DataError
from picbench.workloads.sources.row import DatasetRow

_SECTION = re.compile(r"^Section \d+: (.+)$", re.MULTILINE)
_SENTENCE = re.compile(r"[^.\n]*\.")


@dataclass(frozen=True, slots=True)
class NeedlePlace:
    """Characters of a row's context: where the remark and its section's heading begin.

    Bundled remarks do not name the person, whom only the heading names.
    """

    remark: int
    heading: int


def find_needle(row: DatasetRow) -> NeedlePlace:
    """The place of the remark that a bundled needle row asks for; DataError if there is not one."""
    sections = list(_sections(row))
    asked = [found for found in sections if found[0] in row.input]
    if not asked:
        raise DataError(f"{row.source}: no section about the person of the question")
    # A name may begin with another one.
    person, start, end = max(asked, key=lambda found: len(found[0]))
    secret = _secret(row.input, person)
    text = row.context[start:end]
    places = [
        match.start() + start
        for match in _SENTENCE.finditer(text, text.find("\n") + 1)
        if secret in match[0] and row.answers[0] in match[0]
    ]
    if len(places) != 1:
        raise DataError(f"{row.source}: {len(places)} remarks about {secret!r} of {person}, not 1")
    return NeedlePlace(places[0], start)


def _sections(row: DatasetRow) -> Iterator[tuple[str, int, int]]:
    """Person, first and last character of each section."""
    found = list(_SECTION.finditer(row.context))
    ends = [match.start() for match in found[1:]] + [len(row.context)]
    for match, end in zip(found, ends, strict=True):
        yield match[1], match.start(), end


def _secret(question: str, person: str) -> str:
    """What the question asks about a person."""
    for pattern in (rf"the (.+) of {re.escape(person)}", rf"{re.escape(person)}'s (.+)\?"):
        if match := re.search(pattern, question):
            return match[1]
    raise DataError(f"{question!r} asks nothing about {person}")

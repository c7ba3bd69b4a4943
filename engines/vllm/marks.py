"""Marks around documents in a prompt's text: ``<<doc>>Some text.<</doc>>``.

An opening mark may say which document its text is part of: ``<<doc id=KEY>>``. The id stands before
the punctuation that the mark ends with, and marks that end otherwise have none. It has letters,
digits and ``_.:/@#-``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from picbench.errors import ConfigError

_IDS = "use up to 200 letters, digits and _.:/@#-, with marks that end in punctuation"

#: The pair for ``"marks": true``.
DEFAULT_MARKS = ("<<doc>>", "<</doc>>")


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Characters [start, end) of a marked text, without marks.

    `chunk` says whether it is the text of a document, `document` is the id in its opening mark.
    """

    start: int
    end: int
    chunk: bool = False
    document: str | None = None


@dataclass(frozen=True, slots=True)
class DocumentMarks:
    """A `pair` of marks. `pattern` finds both; its groups are `id` and `close`."""

    pair: tuple[str, str]
    pattern: re.Pattern[str]

    @classmethod
    def of(cls, given: Any) -> Self | None:
        """The marks of the setting `marks`: true, a list of two texts, or none (null, false).

        Raises ConfigError for anything else, and for marks that cannot be told apart.
        """
        if given is None or given is False:
            return None
        pair = DEFAULT_MARKS if given is True else given
        if not isinstance(pair, list | tuple) or [type(mark) for mark in pair] != [str, str]:
            raise _refused(given, "is no pair of texts")
        if not all(pair):
            raise _refused(given, "has an empty mark")
        if any(mark != mark.strip() for mark in pair):
            raise _refused(given, "has white space around a mark, which chat templates remove")
        opening, closing = _opening(pair[0]), pair[1]
        if closing in pair[0] or re.search(opening, closing):
            raise _refused(given, "has a mark that is or contains the other")
        pattern = re.compile(f"{opening}|(?P<close>{re.escape(closing)})")
        return cls((pair[0], closing), pattern)

    def around(self, texts: Sequence[str], key: Any = None) -> list[str]:
        """The parts of a document's text with a mark before the first and one after the last.

        The opening mark has the document's id, `key`, if it has one. Nothing is around white space.
        Raises ConfigError for text with a mark in it, and for an id that a mark cannot have.
        """
        opening, closing = self.pair
        if key is not None:
            head = re.sub(r"[^\w\s]+$", "", opening)
            opening = f"{head} id={key}{opening[len(head) :]}"
            found = self.pattern.fullmatch(opening)
            if found is None or found["id"] != key:
                raise ConfigError(f"a mark cannot have the id {key!r}", hint=_IDS)
        if any(map(self.pattern.search, texts)):
            raise ConfigError(
                "a document's text has a mark in it", hint="leave marks to the server"
            )
        if not "".join(texts).strip():
            return list(texts)
        first, *others = texts
        *others, last = [opening + first, *others]
        return [*others, last + closing]

    def cut(self, text: str) -> list[TextSpan]:
        """The spans of a text that are not empty, in order: all of it but its marks.

        What is between documents is text, and so is a document of white space alone. Raises
        ConfigError for a mark inside a document, and for one without its counterpart.
        """
        spans: list[TextSpan] = []
        opened: re.Match[str] | None = None
        at = 0
        for mark in self.pattern.finditer(text):
            closes = mark["close"] is not None
            if closes and opened is None:
                raise _misplaced("closing", mark, "has no opening mark")
            if not closes and opened is not None:
                raise _misplaced("opening", mark, "is inside a document")
            chunk = closes and not text[at : mark.start()].isspace()
            spans.append(TextSpan(at, mark.start(), chunk, opened["id"] if opened else None))
            opened, at = None if closes else mark, mark.end()
        if opened is not None:
            raise _misplaced("opening", opened, "has no closing mark")
        spans.append(TextSpan(at, len(text)))
        return [span for span in spans if span.start < span.end]


def _opening(mark: str) -> str:
    """A pattern of an opening mark, with an id before its last punctuation or without."""
    head = re.sub(r"[^\w\s]+$", "", mark)
    key = r"(?: id=(?P<id>[\w.:/@#-]{1,200}))?" if 0 < len(head) < len(mark) else "(?P<id>(?!))?"
    return re.escape(head) + key + re.escape(mark[len(head) :])


def _refused(given: Any, why: str) -> ConfigError:
    hint = f'use true for {list(DEFAULT_MARKS)}, or a pair of your own: ["[[d81f]]", "[[/d81f]]"]'
    return ConfigError(f"`marks` {given!r} {why}", hint=hint)


def _misplaced(kind: str, mark: re.Match[str], why: str) -> ConfigError:
    start, end = mark.span()
    around = mark.string[max(0, start - 16) : end + 16]
    return ConfigError(
        f"the {kind} mark at character {start} of the prompt {why}: {around!r}",
        hint="each document is between an opening and a closing mark, and none is inside another",
    )

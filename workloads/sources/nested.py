"""Values that lie deep in rows: by path, and as passages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from picbench.errors import DataError


class _Missing:
    """A column that a row does not have."""


MISSING: Final = _Missing()


@dataclass(frozen=True, slots=True)
class ContextPassage:
    """A passage of a context; `supports` is whether the answer needs it, as far as it is known."""

    title: str
    body: str
    supports: bool = False


def find(scope: Sequence[Mapping[str, Any]], path: str) -> Any:
    """The value at `path` (see `columns.Columns`) in the first of `scope` that has its first name.

    MISSING where there is none, or None where `path` ends with ``|``. Columns that hold JSON as
    text are read.
    """
    for alternative in path.split("|"):
        if not alternative:
            return None
        parts = [_at(scope, part) for part in alternative.split("+")]
        known = [part for part in parts if part is not MISSING]
        if len(parts) == 1 and known:
            return known[0]
        if known:
            return [one for part in known for one in strings(part)]
    return MISSING


def strings(value: Any) -> list[Any]:
    """A value as a list without its empty elements; a single one is a list of one."""
    values = value if isinstance(value, list) else [value]
    return [one for one in values if one is not None]


def unpacked(value: Any) -> Any:
    """The value, read where it is JSON as text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def passages(value: Any, *, title: str, body: str, supports: str) -> list[ContextPassage]:
    """The passages in a column, in any of the forms that data sets have.

    They are a list of texts, of (title, sentences) pairs or of objects, or an object with a list
    of titles and a list of texts. `title`, `body` and `supports` are columns of these objects.
    Raises DataError for anything else.
    """
    value = unpacked(value)
    if isinstance(value, dict):
        bodies = find([value], body) if body else MISSING
        titles = find([value], title) if title else MISSING
        if not isinstance(bodies, list):
            raise _no_body(body, value)
        named = titles if isinstance(titles, list) else [""] * len(bodies)
        if len(named) != len(bodies):
            raise DataError(f"{len(named)} titles for {len(bodies)} passages", hint=_FORMS)
        return [ContextPassage(str(t or ""), _text(b)) for t, b in zip(named, bodies, strict=True)]
    if not isinstance(value, list) or not value:
        raise DataError("the passages are no list", hint=_FORMS)
    return [_passage(one, title, body, supports) for one in value]


_FORMS = "a list of texts, of [title, sentences] pairs or of objects, or lists of titles and texts"


def _passage(value: Any, title: str, body: str, supports: str) -> ContextPassage:
    if isinstance(value, str):
        return ContextPassage("", value)
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        return ContextPassage(value[0], _text(value[1]))
    if not isinstance(value, dict):
        raise DataError("a passage is neither text, pair nor object", hint=_FORMS)
    text = find([value], body) if body else MISSING
    if text is MISSING:
        raise _no_body(body, value)
    named = find([value], title) if title else MISSING
    needed = find([value], supports) if supports else MISSING
    return ContextPassage(
        "" if named is MISSING else str(named), _text(text), needed in (True, "true")
    )


def _no_body(body: str, passage: Mapping[str, Any]) -> DataError:
    return DataError(
        f"no column {body!r} for 'body' in a passage; there are: {', '.join(passage)}",
        hint="`columns=body=COLUMN,...`",
    )


def _text(body: Any) -> str:
    """A text, or sentences with a space between those that have none."""
    if isinstance(body, str):
        return body
    if not isinstance(body, list) or not all(isinstance(one, str) for one in body):
        raise DataError("a passage's body is neither text nor a list of sentences", hint=_FORMS)
    return "".join(_spaced(body)).strip()


def _spaced(sentences: Sequence[str]) -> Iterator[str]:
    before = " "
    for sentence in sentences:
        gap = "" if before[-1:].isspace() or sentence[:1].isspace() else " "
        yield gap + sentence
        before = sentence or before


def _at(scope: Sequence[Mapping[str, Any]], path: str) -> Any:
    first, *rest = path.split(".")
    for values in scope:
        if first in values:
            return _walk(values[first], rest)
    return MISSING


def _walk(value: Any, names: Sequence[str]) -> Any:
    if not names:
        return MISSING if value is None else value
    name, *rest = names
    value = unpacked(value)
    if isinstance(value, list):
        if name.isdigit():
            return _walk(value[int(name)], rest) if int(name) < len(value) else MISSING
        found = [part for one in value if (part := _walk(one, names)) is not MISSING]
        return [one for part in found for one in strings(part)] if found or not value else MISSING
    if isinstance(value, dict) and name in value:
        return _walk(value[name], rest)
    return MISSING

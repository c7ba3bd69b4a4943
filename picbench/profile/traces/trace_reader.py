"""Read a trace: a user's JSON Lines, a request file of `picbench traffic`, or RAGPulse's folder.

Traces are read line by line and never held as a whole, RAGPulse's excepted, whose requests have to
be sorted.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError, DataError
from picbench.profile.traces.content_table import ContentTable
from picbench.profile.traces.traced_request import TracedRequest, TraceSegment
from picbench.workloads.traffic.file import FORMAT

#: From a text to its token ids, and from those of a prompt's first text to those it begins with.
Encode = Callable[[str], tuple[int, ...]]

#: Lines that are looked at to tell whether a trace has texts or token ids.
_LOOKED_AT = 100

_HINT = (
    'a line is {"arrival": 0.5, "output": 80, "parts": [{"text": "..."}, {"chunk": "a", "tokens": '
    "300}]}; see docs/profile.md"
)


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that is being read.

    `kind` says what it is. `exact` traces have token ids, so that contents that begin alike share
    their first blocks. `requests` can be gone through once; raises DataError with file, line and
    field.
    """

    kind: str
    exact: bool
    requests: Iterator[TracedRequest]


def read_trace_file(path: Path, encode: Callable[[], Encode]) -> Trace:
    """Open a trace; `encode` loads a tokenizer, and is called where there are texts.

    Raises ConfigError for what is none.
    """
    if path.is_dir():
        from picbench.profile.traces.ragpulse_requests import ragpulse_requests

        return Trace("RAGPulse", False, ragpulse_requests(path))
    if not path.is_file():
        raise ConfigError(f"{path}: no such file", hint=_HINT)
    lines = _lines(path)
    first = list(islice(lines, _LOOKED_AT))
    if not first:
        raise ConfigError(f"{path}: no requests", hint=_HINT)
    every = chain(first, lines)
    if f'"{FORMAT}"' in first[0][1]:
        from picbench.profile.traces.request_file import file_requests

        return Trace("picbench traffic", True, file_requests(path, every))
    exact = any(_has_tokens(line) for _, line in first)
    return Trace("JSON Lines", exact, _user_requests(path, every, encode, exact=exact))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8-sig", errors="backslashreplace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _has_tokens(line: str) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False  # It is named when it is read.
    parts = found.get("parts") if isinstance(found, dict) else None
    return isinstance(parts, list) and any(
        isinstance(part, dict) and ("text" in part or isinstance(part.get("tokens"), list))
        for part in parts
    )


def _user_requests(
    path: Path,
    lines: Iterator[tuple[int, str]],
    encode: Callable[[], Encode],
    *,
    exact: bool,
) -> Iterator[TracedRequest]:
    from picbench.profile.traces.trace_schema import PromptLine
    from picbench.workloads.sources.row_schema import first_problem

    maker = _SegmentMaker(ContentTable(exact=exact), encode)
    clock: float | None = None
    for number, line in lines:
        source = f"{path}:{number}"
        try:
            found = PromptLine.model_validate_json(line)
            if found.arrival is not None and clock is not None and found.arrival < clock:
                raise ValueError(f"field 'arrival': {found.arrival} is earlier than {clock} before")
            segments = tuple(
                maker.segment(content, f"parts.{place}", first=not place)
                for place, content in enumerate(found.parts)
            )
            reply = maker.segment(found.reply, "reply", first=False) if found.reply else None
        except ValueError as error:
            raise DataError(f"{source}: {first_problem(error)}", hint=_HINT) from error
        clock = found.arrival if found.arrival is not None else clock
        kept = tuple(segment for segment in segments if segment.length)
        if not kept:
            raise DataError(f"{source}: field 'parts': no tokens", hint=_HINT)
        yield TracedRequest(kept, found.output, found.arrival, reply, source)


class _SegmentMaker:
    """Makes segments of the contents of a user's lines."""

    def __init__(self, table: ContentTable, encode: Callable[[], Encode]) -> None:
        self._table = table
        self._load = encode
        self._encode: Encode | None = None
        self._start: tuple[int, ...] = ()

    def segment(self, content: Any, where: str, *, first: bool) -> TraceSegment:
        chunk = content.chunk is not None
        kind, name = ("chunk", content.chunk) if chunk else ("id", content.id)
        try:
            if content.text is None and content.tokens is None:
                return self._table.named(kind, name)
            made = self._made(content, kind, name, first=first)
            return made if name is None else self._table.name(kind, name, made)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def _made(self, content: Any, kind: str, name: str | None, *, first: bool) -> TraceSegment:
        chunk = content.chunk is not None
        if content.text is not None:
            return self._table.of_tokens(self._tokens(content.text, first=first), chunk=chunk)
        if isinstance(content.tokens, list):
            return self._table.of_tokens(content.tokens, chunk=chunk)
        if name is not None and self._table.length(kind, name) == content.tokens:
            return self._table.named(kind, name)
        return self._table.of_length(content.tokens, chunk=chunk)

    def _tokens(self, text: str, *, first: bool) -> tuple[int, ...]:
        if self._encode is None:
            self._encode = self._load()
            self._start = self._encode("")
        ids = self._encode(text)
        return ids if first else ids[len(self._start) :]

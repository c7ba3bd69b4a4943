"""Read a trace: a user's JSON Lines, a request file of `picbench traffic`, or RAGPulse's folder.

Traces are read line by line and never held as a whole, RAGPulse's excepted, whose requests have to
be sorted.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from picbench.errors import ConfigError, DataError
from picbench.profile.traces.content_table import ContentTable
from picbench.profile.traces.traced_request import TracedRequest, TraceSegment
from picbench.workloads.traffic.file import FORMAT

if TYPE_CHECKING:
    from picbench.profile.traces.trace_schema import PromptContent

#: From a text to its token ids, and from those of a prompt's first text to those it begins with.
Encode = Callable[[str], tuple[int, ...]]

#: What a file that is compressed with gzip begins with.
_GZIP = b"\x1f\x8b"

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
    if not path.exists():
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
    """Lines that are not blank, with their numbers; ConfigError where the file cannot be read."""
    try:
        with path.open("rb") as file:
            packed = file.peek(len(_GZIP)).startswith(_GZIP)
            plain = gzip.GzipFile(fileobj=file) if packed else file
            text = io.TextIOWrapper(plain, encoding="utf-8-sig", errors="backslashreplace")
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}", hint="name another file") from error


def _has_tokens(line: str) -> bool:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
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
            found = PromptLine.model_validate_json(line.rstrip())
            if found.arrival is not None and clock is not None and found.arrival < clock:
                raise ValueError(f"field 'arrival': {found.arrival} is earlier than {clock} before")
            segments = maker.prompt(found.parts)
            reply = maker.segment(found.reply, "reply") if found.reply else None
        except ValueError as error:
            # The line's own number is in `source`.
            problem = first_problem(error).replace(" at line 1 column ", " at column ")
            raise DataError(f"{source}: {problem}", hint=_HINT) from error
        clock = found.arrival if found.arrival is not None else clock
        if not segments:
            raise DataError(f"{source}: field 'parts': no tokens", hint=_HINT)
        yield TracedRequest(segments, found.output, found.arrival, reply, source)


class _SegmentMaker:
    """Makes segments of the contents of a user's lines."""

    def __init__(self, table: ContentTable, encode: Callable[[], Encode]) -> None:
        self._table = table
        self._load = encode
        self._encode: Encode | None = None
        self._start: tuple[int, ...] = ()
        self._texts: set[tuple[str, str]] = set()

    def prompt(self, parts: Sequence["PromptContent"]) -> tuple[TraceSegment, ...]:
        """The segments of a prompt that have tokens.

        What a tokenizer begins prompts with is text of its own, before a chunk as well: the tokens
        of names are the same wherever they stand.
        """
        made = [self.segment(content, f"parts.{place}") for place, content in enumerate(parts)]
        if self._start and self._is_text(parts[0]):
            made.insert(0, self._table.of_tokens(self._start, chunk=False))
        return tuple(segment for segment in made if segment.length)

    def segment(self, content: "PromptContent", where: str) -> TraceSegment:
        """The segment of a content; ValueError, with `where` it stands, for what is none."""
        chunk = content.chunk is not None
        kind, name = ("chunk", content.chunk) if chunk else ("id", content.id)
        try:
            if name is None:
                return self._made(content, kind, None)
            if content.text is None and content.tokens is None:
                return self._table.named(kind, name)
            if content.text is not None:
                self._texts.add((kind, name))
            return self._table.name(kind, name, self._made(content, kind, name))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def _is_text(self, content: "PromptContent") -> bool:
        if content.text is not None or content.tokens is not None:
            return content.text is not None
        names = (("chunk", content.chunk), ("id", content.id))
        return any(named in self._texts for named in names)

    def _made(self, content: "PromptContent", kind: str, name: str | None) -> TraceSegment:
        chunk = content.chunk is not None
        if content.text is not None:
            return self._table.of_tokens(self._tokens(content.text), chunk=chunk)
        if isinstance(content.tokens, list):
            return self._table.of_tokens(content.tokens, chunk=chunk)
        assert content.tokens is not None
        if name is not None and self._table.length(kind, name) == content.tokens:
            return self._table.named(kind, name)
        return self._table.of_length(content.tokens, chunk=chunk)

    def _tokens(self, text: str) -> tuple[int, ...]:
        if self._encode is None:
            self._encode = self._load()
            self._start = self._encode("")
        return self._encode(text)[len(self._start) :]

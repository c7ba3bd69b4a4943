"""Requests of a trace, as far as caches can tell them apart.

A trace is RAGPulse's folder, a request file of `picbench traffic`, lines in Mooncake's form
(`MooncakeLine`), or a user's JSON Lines (`PromptLine`).
"""

import gzip
import hashlib
import io
import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from picbench.errors import ConfigError, DataError
from picbench.workloads.traffic.file import FORMAT
from picbench.workloads.traffic.ragpulse import LENGTHS, RETRIEVED, TRACE, read_lengths, read_lines

#: Gives the token ids of a text; of an empty one, the ids that every prompt of texts begins with.
Encode = Callable[[str], tuple[int, ...]]

#: From here on ids stand for tokens of contents whose length alone is known.
INVENTED = 1 << 40

#: The most tokens of one content: more would take the memory of the machine.
_MOST = 10_000_000

#: Lines that are looked at to tell whether a trace has texts or token ids.
_LOOKED_AT = 100

#: Tokens that a reply has where a trace does not say it.
_OUTPUT = 16

#: Prompt tokens that an id of Mooncake's traces stands for.
_MOONCAKE_TOKENS = 512

_LINES_HINT = (
    'a line is {"arrival": 0.5, "output": 80, "parts": [{"text": "..."}, {"chunk": "a", "tokens": '
    "300}]}; see docs/profile.md"
)
_TRAFFIC_HINT = "picbench traffic makes such files"


class TraceSegment(NamedTuple):
    """Consecutive prompt tokens: a chunk or text.

    Segments of one `content` are equal; None is content that never occurs again. `tokens` are the
    ids, eight bytes each, where they are known. Without them segments of different contents count
    as different from their first token on. `before` is what precedes a chunk in its document.
    """

    content: int | None
    length: int
    chunk: bool
    tokens: bytes | None = None
    before: "TraceSegment | None" = None


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace.

    `arrival` is in seconds from the start, None where the trace has no times. `output` is the
    number of generated tokens; `reply` is what they are, None where that is not known. `source` is
    the place of the request, for messages.
    """

    segments: tuple[TraceSegment, ...]
    output: int
    arrival: float | None = None
    reply: TraceSegment | None = None
    source: str = ""

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that is being read.

    `kind` is its format. An `exact` trace has token ids, so that contents with a common beginning
    share their first blocks. `requests` can be iterated once; it raises DataError with file, line
    and field.
    """

    kind: str
    exact: bool
    requests: Iterator[TracedRequest]


_Count = Annotated[int, Field(ge=1, le=_MOST)]
_Ids = Annotated[list[Annotated[int, Field(ge=0, lt=INVENTED)]], Field(min_length=1)]

#: Token ids, or only their number; an error is about the form that is meant.
_Tokens = Annotated[
    Annotated[_Count, Tag("count")] | Annotated[_Ids, Tag("ids")],
    Discriminator(lambda tokens: "ids" if isinstance(tokens, list) else "count"),
]


class PromptContent(BaseModel):
    """Content of a prompt: its text, its token ids, or their number.

    `chunk` names a chunk, `id` a text that other prompts share. The name alone is enough for a
    content that was named before. `before` is the text of a chunk's document up to the chunk.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    text: str | None = None
    tokens: _Tokens | None = None
    chunk: str | None = None
    id: str | None = None
    before: "PromptContent | None" = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.text is not None and self.tokens is not None:
            raise ValueError("has 'text' and 'tokens', one of them is enough")
        if self.chunk is not None and self.id is not None:
            raise ValueError("has 'chunk' and 'id', which are both names")
        if self.text is None and self.tokens is None and self.name is None:
            raise ValueError("needs 'text', 'tokens', or the name of what came before")
        if self.before and (self.chunk is None or (self.text, self.tokens) == (None, None)):
            raise ValueError("has 'before', which comes with a 'chunk' and its content")
        return self

    @property
    def name(self) -> tuple[str, str] | None:
        """The field that names it, and its name."""
        named = {"chunk": self.chunk, "id": self.id}
        return next(((kind, name) for kind, name in named.items() if name is not None), None)


class PromptLine(BaseModel):
    """A request: the contents of its prompt, its arrival, and what it generated.

    `arrival` is in seconds, `output` the number of generated tokens. `reply` is the generated
    content, which later prompts may contain, and has as many tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    parts: Annotated[list[PromptContent], Field(min_length=1)]
    arrival: float | None = Field(None, ge=0, allow_inf_nan=False)
    output: _Count | None = None
    reply: PromptContent | None = None


class MooncakeLine(BaseModel):
    """A request of a trace of Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release).

    Each of `hash_ids` stands for 512 tokens of the prompt after all those before them, the last one
    for what is left of `input_length`. `timestamp` is in milliseconds.
    """

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: _Count
    output_length: _Count
    hash_ids: list[int]

    def line(self) -> PromptLine:
        """The same request. Raises ValueError where its length is not that of its ids."""
        ends = range(_MOONCAKE_TOKENS, self.input_length + _MOONCAKE_TOKENS, _MOONCAKE_TOKENS)
        if len(ends) != len(self.hash_ids):
            raise ValueError(
                f"field 'hash_ids': {len(self.hash_ids)} ids, but {self.input_length} tokens are "
                f"{len(ends)} of up to {_MOONCAKE_TOKENS}"
            )
        sizes = (_MOONCAKE_TOKENS - max(0, end - self.input_length) for end in ends)
        pairs = zip(self.hash_ids, sizes, strict=True)
        parts = [PromptContent(id=str(name), tokens=size) for name, size in pairs]
        return PromptLine(parts=parts, arrival=self.timestamp / 1000, output=self.output_length)


class ContentTable:
    """Makes segments; in an `exact` table each has token ids, invented ones where none are known.

    Its methods raise ValueError for a name with two lengths or two contents, or with none yet.
    `load` loads a tokenizer, and is called only for texts.
    """

    def __init__(self, *, exact: bool, load: Callable[[], Encode] | None = None) -> None:
        self.exact, self._load = exact, load
        self._encode: Encode | None = None
        self._start: tuple[int, ...] = ()
        self._texts: set[tuple[str, str]] = set()
        self._named: dict[tuple[str, str], TraceSegment] = {}
        self._by_tokens: dict[bytes, int] = {}
        self._told: set[int] = set()
        self._numbers = 0
        self._unique = 0

    def of_tokens(self, ids: Sequence[int], *, chunk: bool) -> TraceSegment:
        """A segment of known tokens."""
        tokens = array("q", ids).tobytes()
        digest = hashlib.blake2b(tokens, digest_size=16).digest()
        content = self._by_tokens.get(digest)
        if content is None:
            content = self._by_tokens[digest] = self._next()
            self._told.add(content)
        return TraceSegment(content, len(ids), chunk, tokens if self.exact else None)

    def of_length(self, length: int, *, chunk: bool) -> TraceSegment:
        """A segment that no other prompt has, of which only the length is known."""
        if not self.exact:
            return TraceSegment(None, length, chunk)
        first = INVENTED + self._unique
        self._unique += length
        invented = array("q", range(first, first + length)).tobytes()
        return TraceSegment(self._next(), length, chunk, invented)

    def name(self, kind: str, name: str, segment: TraceSegment | None = None) -> TraceSegment:
        """What a name stands for since its first occurrence, where it needs a segment."""
        known = self._named.get((kind, name))
        if known is None:
            if segment is None:
                raise ValueError(
                    f"field {kind!r}: {name!r} has no 'text' and no 'tokens', and had none before"
                )
            content = segment.content if segment.content is not None else self._next()
            known = self._named[kind, name] = segment._replace(content=content)
        elif segment is not None and known.length != segment.length:
            raise ValueError(
                f"field {kind!r}: {name!r} has {segment.length} tokens here and had "
                f"{known.length} before"
            )
        elif segment is not None and known.content != segment.content:
            both = {known.content, segment.content}
            if both <= self._told:
                raise ValueError(f"field {kind!r}: {name!r} has other tokens here than before")
        if segment is not None and segment.before not in (None, known.before):
            raise ValueError(f"field 'before': {name!r} has another text before it than at first")
        return known

    def of_prompt(self, parts: Sequence[PromptContent]) -> tuple[TraceSegment, ...]:
        """The segments of a prompt that have tokens.

        The ids that a tokenizer begins prompts with are a text of their own, before a chunk as
        well, so that a named content has the same tokens in every place.
        """
        made = [self.of_content(content, f"parts.{place}") for place, content in enumerate(parts)]
        first = parts[0]
        named = first.tokens is None and first.name in self._texts
        if self._start and (first.text is not None or named):
            made.insert(0, self.of_tokens(self._start, chunk=False))
        return tuple(segment for segment in made if segment.length)

    def of_content(self, content: PromptContent, where: str) -> TraceSegment:
        """The segment of a content. Raises ValueError that names `where` it stands."""
        chunk, tokens, made = content.chunk is not None, content.tokens, None
        if isinstance(tokens, int):
            made = self.of_length(tokens, chunk=chunk)
        elif tokens is not None:
            made = self.of_tokens(tokens, chunk=chunk)
        elif content.text is not None:
            if self._encode is None:
                assert self._load is not None, "only traces with texts have PromptContent"
                self._encode = self._load()
                self._start = self._encode("")
            ids = self._encode(content.text)[len(self._start) :]
            made = self.of_tokens(ids, chunk=chunk)
        if content.before and content.chunk is not None and made is not None:
            before = self.of_content(content.before, f"{where}.before")
            if content.before.name is None:
                before = self.name("before", content.chunk, before)
            made = made._replace(before=before)
        if content.name is None:
            assert made is not None, "PromptContent has a name, a text or tokens"
            return made
        if content.text is not None:
            self._texts.add(content.name)
        try:
            return self.name(*content.name, made)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers


def read_trace_file(path: Path, encode: Callable[[], Encode]) -> Trace:
    """Open a trace; `encode` loads a tokenizer, and is called only for texts.

    Raises ConfigError for a file that is missing or has no requests.
    """
    if path.is_dir():
        return Trace("RAGPulse", False, _ragpulse_requests(path))
    if not path.exists():
        raise ConfigError(f"{path}: no such file", hint=_LINES_HINT)
    lines = _lines(path)
    first = list(islice(lines, _LOOKED_AT))
    if not first:
        raise ConfigError(f"{path}: no requests", hint=_LINES_HINT)
    every = chain(first, lines)
    if f'"{FORMAT}"' in first[0][1]:
        return Trace("picbench traffic", True, _traffic_requests(path, every))
    if "hash_ids" in _fields(first[0][1]):
        lines_of = _user_requests(path, every, ContentTable(exact=False), MooncakeLine)
        return Trace("Mooncake", False, lines_of)
    exact = any(_has_tokens(line) for _, line in first)
    table = ContentTable(exact=exact, load=encode)
    return Trace("JSON Lines", exact, _user_requests(path, every, table, PromptLine))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers. Raises ConfigError for an unreadable file."""
    try:
        with path.open("rb") as file:
            packed = file.peek(2).startswith(b"\x1f\x8b")  # As gzip's files do.
            plain = gzip.GzipFile(fileobj=file) if packed else file
            text = io.TextIOWrapper(plain, encoding="utf-8-sig", errors="backslashreplace")
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}", hint="name another file") from error


def _has_tokens(line: str) -> bool:
    parts = _fields(line).get("parts")
    return isinstance(parts, list) and any(
        isinstance(part, dict) and ("text" in part or isinstance(part.get("tokens"), list))
        for part in parts
    )


def _fields(line: str) -> dict[str, Any]:
    """The fields of an object; none of anything else, which the reader of requests names."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _ragpulse_requests(folder: Path) -> Iterator[TracedRequest]:
    """The requests in order of arrival, in seconds from the first.

    Raises ConfigError for a missing file, DataError with file and line.
    """
    for name in (TRACE, *LENGTHS):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder}: no {name} in it", hint="the folder data of RAGPulse's repository"
            )
    lengths, table = read_lengths(folder), ContentTable(exact=False)
    lines = sorted(read_lines(folder / TRACE), key=lambda line: line.content.timestamp)
    for line in lines:
        segments = []
        for kind, named in line.content.hash_ids.items():
            for number in named:
                if number not in lengths:
                    raise DataError(
                        f"{line.source}: field 'hash_ids': part {number} has no length",
                        hint=f"in {', '.join(LENGTHS)}",
                    )
                made = table.of_length(lengths[number], chunk=kind in RETRIEVED)
                segments.append(table.name("part", str(number), made)._replace(chunk=made.chunk))
        arrival = line.content.timestamp - lines[0].content.timestamp
        yield TracedRequest(
            tuple(segments), line.content.output_length, arrival, source=line.source
        )


def _traffic_requests(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[TracedRequest]:
    """The requests of a file of `picbench traffic`. Raises DataError with file and line."""
    from picbench.workloads.sources.row_schema import first_problem
    from picbench.workloads.traffic.file_schema import (
        ChunkSchema,
        HeaderSchema,
        LineSchema,
        UseSchema,
    )

    table = ContentTable(exact=True)
    chunks: dict[str, TraceSegment] = {}
    for place, (number, line) in enumerate(lines):
        source = f"{path}:{number}"
        try:
            if not place:
                HeaderSchema.model_validate_json(line)
                continue
            found = LineSchema.validate_json(line)
        except ValueError as error:
            raise DataError(f"{source}: {first_problem(error)}", hint=_TRAFFIC_HINT) from error
        if isinstance(found, ChunkSchema):
            before = table.of_tokens(found.before.tokens, chunk=False) if found.before else None
            chunk = table.of_tokens(found.tokens, chunk=True)
            chunks[found.chunk] = chunk._replace(before=before)
            continue
        segments = []
        for content in found.parts:
            if not isinstance(content, UseSchema):
                segments.append(table.of_tokens(content.tokens, chunk=False))
            elif content.chunk in chunks:
                segments.append(chunks[content.chunk])
            else:
                raise DataError(
                    f"{source}: field 'parts': no chunk is called {content.chunk!r} so far",
                    hint=_TRAFFIC_HINT,
                )
        yield TracedRequest(tuple(segments), found.max_tokens, found.arrival, source=source)


def _user_requests(
    path: Path,
    lines: Iterator[tuple[int, str]],
    table: ContentTable,
    form: type[PromptLine] | type[MooncakeLine],
) -> Iterator[TracedRequest]:
    """The requests of a user's lines. Raises DataError with file, line and field."""
    from picbench.workloads.sources.row_schema import first_problem

    clock: float | None = None
    for number, line in lines:
        source = f"{path}:{number}"
        try:
            given = form.model_validate_json(line.rstrip())
            found = given.line() if isinstance(given, MooncakeLine) else given
            if found.arrival is not None and clock is not None and found.arrival < clock:
                raise ValueError(f"field 'arrival': {found.arrival} is earlier than {clock} before")
            segments = table.of_prompt(found.parts)
            reply = table.of_content(found.reply, "reply") if found.reply else None
            output = _output_of(found, reply)
        except ValueError as error:
            # The line's own number is in `source`.
            problem = first_problem(error).replace(" at line 1 column ", " at column ")
            raise DataError(f"{source}: {problem}", hint=_LINES_HINT) from error
        clock = found.arrival if found.arrival is not None else clock
        if not segments:
            raise DataError(f"{source}: field 'parts': no tokens", hint=_LINES_HINT)
        yield TracedRequest(segments, output, found.arrival, reply, source)


def _output_of(line: PromptLine, reply: TraceSegment | None) -> int:
    """Generated tokens: a reply says its own length. Raises ValueError for another `output`."""
    if reply is None:
        return line.output or _OUTPUT
    if not reply.length:
        raise ValueError("field 'reply': no tokens")
    if line.output not in (None, reply.length):
        raise ValueError(f"field 'output': {line.output}, but 'reply' has {reply.length} tokens")
    return reply.length

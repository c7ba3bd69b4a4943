"""RAGPulse's traces of real RAG requests, as traffic: arrivals, passages, sessions, lengths.

RAGPulse (arXiv 2511.12979, github.com/flashserve/RAGPulse) publishes which passages each request of
a university's question service had, when it came and in which session, but no text: every part of a
prompt is an id with a length in tokens. A part becomes random tokens here, the same for one id
wherever it occurs, so that what requests share is real and what they say is not.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, TypeVar

from picbench.errors import ConfigError, DataError, check_counts
from picbench.workloads.sample import Sample, SampleSegment
from picbench.workloads.sources.records import Record, file_records
from picbench.workloads.traffic.corpus import SYNTHETIC
from picbench.workloads.traffic.draw import Stream

if TYPE_CHECKING:
    from pydantic import BaseModel

    from picbench.workloads.traffic.file_schema import TraceLine

Checked = TypeVar("Checked", bound="BaseModel")

#: The trace, one request a line, and the lengths of its parts.
TRACE = "0_trace.jsonl"
LENGTHS = (
    "1_sys_prompt.jsonl",
    "2_passages.jsonl",
    "3_history.jsonl",
    "4_user_input.jsonl",
    "5_web_search.jsonl",
)

#: What was retrieved: each such part is a chunk, all others are text.
RETRIEVED = ("passages_ids", "web_search")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplay:
    """What is taken of a trace, and how.

    The first `requests` that have at most `longest` tokens of prompt and reply (None: any number)
    arrive `speed` times as fast as they did. A reply has the trace's number of tokens, or at most
    `max_tokens`. Raises ConfigError for impossible values.
    """

    requests: int
    seed: int = 0
    speed: float = 1.0
    longest: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for field, value in (("requests", self.requests), ("speed", self.speed)):
            if not value > 0:
                raise ConfigError(f"`{field}` {value} is not possible", hint="use more than 0")
        check_counts(requests=self.requests, longest=self.longest, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class TraceStream:
    """The requests of a trace; `left_out` were too long. `sha256` is that of the trace's file."""

    stream: Stream
    left_out: int
    sha256: str


def read_trace(folder: Path, replay: TraceReplay, ids: Sequence[int]) -> TraceStream:
    """Read RAGPulse's six files in `folder`, and make parts of random tokens from `ids`.

    Parts are in the order in which the trace lists them. Arrivals are in seconds from the first
    request's. Raises ConfigError where a file is missing or nothing is left, DataError with file
    and line for a malformed line.
    """
    for name in (TRACE, *LENGTHS):
        if not (folder / name).is_file():
            raise ConfigError(
                f"`trace` {folder}: no {name} in it",
                hint="the folder data of RAGPulse's repository",
            )
    parts = _TraceParts(read_lengths(folder), ids, replay.seed)
    lines = list(read_lines(folder / TRACE))
    most = replay.longest
    fitting = [line for line in lines if most is None or parts.size(line) <= most]
    fitting.sort(key=lambda line: line.content.timestamp)
    taken = fitting[: replay.requests]
    if not taken:
        raise ConfigError(
            f"`trace` {folder}: all {len(lines)} requests have more tokens than `longest`",
            hint="raise `longest`",
        )
    sessions = {line.content.session_id: 0 for line in taken}
    users = {session: number for number, session in enumerate(sessions)}
    start = taken[0].content.timestamp
    stream = Stream(
        tuple(parts.sample(number, line, replay.max_tokens) for number, line in enumerate(taken)),
        tuple(users[line.content.session_id] for line in taken),
        tuple((line.content.timestamp - start) / replay.speed for line in taken),
    )
    digest = hashlib.sha256((folder / TRACE).read_bytes()).hexdigest()
    return TraceStream(stream, len(lines) - len(fitting), digest)


@dataclass(frozen=True, slots=True)
class TracedLine:
    """A line of the trace, and where it is."""

    source: str
    content: "TraceLine"


class _TraceParts:
    """The parts of prompts, made when they first occur."""

    def __init__(self, lengths: Mapping[int, int], ids: Sequence[int], seed: int) -> None:
        self._lengths = lengths
        self._ids = ids
        self._seed = seed
        self._made: dict[int, tuple[int, ...]] = {}

    def size(self, line: TracedLine) -> int:
        """Tokens of prompt and reply."""
        parts = (part for named in line.content.hash_ids.values() for part in named)
        return sum(self._length(part, line) for part in parts) + line.content.output_length

    def sample(self, number: int, line: TracedLine, most: int | None) -> Sample:
        """A request of the trace; text without chunks in between is one segment."""
        segments: list[SampleSegment] = []
        for kind, named in line.content.hash_ids.items():
            for part in named:
                tokens, chunk = self._tokens(part, line), kind in RETRIEVED
                if segments and segments[-1].kind == "text" and not chunk:
                    tokens = segments.pop().tokens + tokens
                segments.append(SampleSegment("chunk" if chunk else "text", "", tokens))
        length = line.content.output_length
        return Sample(
            id=f"r{number}",
            dataset=SYNTHETIC,
            segments=tuple(segments),
            answers=(),
            max_tokens=min(length, most) if most else length,
            source=line.source,
        )

    def _length(self, part: int, line: TracedLine) -> int:
        if part not in self._lengths:
            raise DataError(
                f"{line.source}: part {part} has no length", hint=f"in {', '.join(LENGTHS)}"
            )
        return self._lengths[part]

    def _tokens(self, part: int, line: TracedLine) -> tuple[int, ...]:
        if part not in self._made:
            rng = Random(f"{self._seed}/trace/{part}")
            self._made[part] = tuple(rng.choices(self._ids, k=self._length(part, line)))
        return self._made[part]


def read_lengths(folder: Path) -> dict[int, int]:
    """Tokens of each part by its id; ids are of one numbering in all files.

    Raises DataError with file and line for a malformed line.
    """
    from picbench.workloads.traffic.file_schema import TracePart

    found: dict[int, int] = {}
    for name in LENGTHS:
        for record in file_records(folder / name):
            part = _checked(record, TracePart)
            found[part.id] = part.token_length
    return found


def read_lines(path: Path) -> Iterator[TracedLine]:
    """The requests of a trace. Raises DataError with file and line for a malformed line."""
    from picbench.workloads.traffic.file_schema import TraceLine

    for record in file_records(path):
        yield TracedLine(record.source, _checked(record, TraceLine))


def _checked(record: Record, schema: type[Checked]) -> Checked:
    from picbench.workloads.sources.row_schema import first_problem

    try:
        return schema.model_validate(record.values())
    except ValueError as error:
        raise DataError(
            f"{record.source}: {first_problem(error)}", hint="see RAGPulse's README"
        ) from error

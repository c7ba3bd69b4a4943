"""Requests of any file, as samples that engines serve.

Texts are served as the model's tokenizer makes them. Where a file has names and lengths alone, a
content is random tokens, the same wherever it occurs: what requests share is real then, and what
they say is not.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from picbench.errors import ConfigError, DataError, check_counts
from picbench.workloads.prompts.tokens import Tokenizer, prompt_encoder
from picbench.workloads.sample import Sample, SampleSegment
from picbench.workloads.traffic.chunk_source import plain_ids
from picbench.workloads.traffic.corpus import LOGGED, SYNTHETIC
from picbench.workloads.traffic.draw import Stream
from picbench.workloads.traffic.file import FORMAT, Header, Requests, read_requests
from picbench.workloads.traffic.lines import numbered_lines
from picbench.workloads.traffic.trace import INVENTED, TracedRequest, TraceSegment
from picbench.workloads.traffic.trace_file import read_trace_file


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplay:
    """What is taken of a trace, and how.

    The first `requests` (None: all) that have at most `longest` tokens of prompt and reply (None:
    any number) arrive `speed` times as fast as they did. A reply has the trace's number of tokens,
    or at most `max_tokens`. Raises ConfigError for impossible values.
    """

    requests: int | None = None
    seed: int = 0
    speed: float = 1.0
    longest: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for field, value in (("requests", self.requests), ("speed", self.speed)):
            if value is not None and not value > 0:
                raise ConfigError(f"`{field}` {value} is not possible", hint="use more than 0")
        check_counts(requests=self.requests, longest=self.longest, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class TraceStream:
    """The requests of a trace of a `kind`; `left_out` were too long.

    `exact` ones have their own tokens. `sha256` is that of the trace's file or files.
    """

    stream: Stream
    left_out: int
    sha256: str
    kind: str
    exact: bool


def open_requests(path: Path, load: Callable[[], Tokenizer]) -> Requests:
    """The requests of a file of `picbench traffic`, or of any that `read_trace_file` reads.

    `load` loads the model's tokenizer, which only the latter need.
    """
    if not path.exists() or (path.is_file() and _is_own(path)):
        return read_requests(path)
    found = read_trace(path, TraceReplay(), load())
    dataset = LOGGED if found.exact else SYNTHETIC
    header = Header(dataset=dataset, synthetic=not found.exact, settings={"kind": found.kind})
    return Requests(header, found.stream, found.sha256)


def _is_own(path: Path) -> bool:
    first = next(numbered_lines(path), ("", ""))
    return f'"{FORMAT}"' in first[1]


def read_trace(path: Path, replay: TraceReplay, tokenizer: Tokenizer) -> TraceStream:
    """Read what `read_trace_file` reads, and make samples of it.

    Arrivals are in seconds from the first request's. Raises ConfigError where a file is missing or
    nothing is left, DataError with file and line for a malformed line.
    """
    trace = read_trace_file(path, lambda: prompt_encoder(tokenizer))
    every, most = list(trace.requests), replay.longest
    fitting = [r for r in every if most is None or r.prompt_tokens + r.output <= most]
    taken = fitting[: replay.requests]
    if not taken:
        raise ConfigError(
            f"`trace` {path}: all {len(every)} requests have more tokens than `longest`",
            hint="raise `longest`",
        )
    made = _Contents(plain_ids(tokenizer), replay.seed)
    dataset = LOGGED if trace.exact else SYNTHETIC
    samples = []
    for number, request in enumerate(taken):
        length = min(request.output, replay.max_tokens or request.output)
        segments = tuple(made.segments(request.segments))
        samples.append(Sample(f"r{number}", dataset, segments, (), length, request.source))
    senders = [request.session or str(number) for number, request in enumerate(taken)]
    users = {sender: number for number, sender in enumerate(dict.fromkeys(senders))}
    numbers = tuple(users[sender] for sender in senders)
    stream = Stream(tuple(samples), numbers, _arrivals(taken, replay.speed))
    left_out = len(every) - len(fitting)
    return TraceStream(stream, left_out, _digest(path), trace.kind, trace.exact)


def _arrivals(requests: Sequence[TracedRequest], speed: float) -> tuple[float, ...] | None:
    """Seconds from the first request; DataError where only some requests have a time."""
    known = [request.arrival for request in requests if request.arrival is not None]
    if known and len(known) < len(requests):
        first = requests[0].arrival is None
        odd = next(r for r in requests if (r.arrival is None) is not first)
        raise DataError(
            f"{odd.source}: field 'arrival': some requests have a time and some have none",
            hint="give all of them one, or none",
        )
    return tuple((time - known[0]) / speed for time in known) or None


def _digest(path: Path) -> str:
    """That of a file, or of all in a folder."""
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class _Contents:
    """Makes segments; contents without tokens get random `ids`."""

    def __init__(self, ids: Sequence[int], seed: int) -> None:
        self._ids, self._seed = ids, seed
        self._made: dict[int, tuple[int, ...]] = {}
        self._fresh = Random(f"{seed}/fresh")

    def segments(self, given: Sequence[TraceSegment]) -> Iterator[SampleSegment]:
        """The segments of a prompt; text without chunks in between is one."""
        text: tuple[int, ...] = ()
        for segment in given:
            tokens = self._tokens(segment)
            if not segment.chunk:
                text += tokens
                continue
            if text:
                yield SampleSegment("text", "", text)
            before = segment.before and SampleSegment("text", "", self._tokens(segment.before))
            yield SampleSegment("chunk", "", tokens, before)
            text = ()
        if text:
            yield SampleSegment("text", "", text)

    def _tokens(self, segment: TraceSegment) -> tuple[int, ...]:
        known = self._made.get(segment.content or 0)
        if known is None:
            known = tuple(self._drawn(segment))
            if segment.content is not None:
                self._made[segment.content] = known
        return known

    def _drawn(self, segment: TraceSegment) -> Iterator[int]:
        if segment.tokens is None:
            seed = self._fresh.random() if segment.content is None else segment.content
            yield from Random(f"{self._seed}/content/{seed}").choices(self._ids, k=segment.length)
            return
        for token in array("q", segment.tokens):
            yield token if token < INVENTED else self._ids[token % len(self._ids)]

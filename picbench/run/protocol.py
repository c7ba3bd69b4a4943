"""The run protocol: interleaved rounds, or whole runs one after another.

A round sends the same group of samples to every arm in turn, and the next round begins with the
next arm: whatever drifts (clock, temperature, neighbours) hits all arms alike, and only one arm
computes at a time. Within a group requests run in a closed loop.

Requests that arrive at times of their own (an open loop) cannot be cut into groups without
draining the queue that they build up. There each arm serves all of them, and then the next arm.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from picbench.arms.messages import Failure, GroupResult
from picbench.arms.server import Server
from picbench.engines.request import Chunk, Request, Text
from picbench.errors import EngineError, InvalidRun
from picbench.workloads.sample import Sample, SampleSegment

#: Groups are this many times as large as the concurrency, for the loop drains at a group's end.
DEPTH = 4


@dataclass(frozen=True, slots=True)
class ArmBatch:
    """One arm's answer to one group of samples; `arrivals` in seconds, None in a closed loop."""

    round: int
    arm: str
    samples: Sequence[Sample]
    result: GroupResult
    arrivals: Sequence[float] | None = None


def group_size(concurrency: int) -> int:
    """Samples of a group: single ones at concurrency 1, where there is nothing to drain."""
    return 1 if concurrency == 1 else DEPTH * concurrency


def schedule(
    samples: Sequence[Sample], arms: Sequence[str], size: int
) -> Iterator[tuple[int, str, Sequence[Sample]]]:
    """(round, arm, group) in the order of execution."""
    for number, start in enumerate(range(0, len(samples), size)):
        group = samples[start : start + size]
        first = number % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            yield number, arm, group


def interleave(
    servers: Mapping[str, Server], samples: Sequence[Sample], concurrency: int
) -> Iterator[ArmBatch]:
    """Run the whole schedule in a closed loop.

    An arm whose engine is gone fails its remaining requests; the others go on.
    """
    gone: dict[str, str] = {}
    for number, arm, group in schedule(samples, tuple(servers), group_size(concurrency)):
        if arm not in gone:
            try:
                result = servers[arm].run(to_requests(group), concurrency)
            except EngineError as error:
                gone[arm] = str(error)
        if arm in gone:
            result = _lost(group, gone[arm])
        yield ArmBatch(number, arm, group, result)


def replay(
    servers: Mapping[str, Server], samples: Sequence[Sample], arrivals: Sequence[float], first: int
) -> Iterator[ArmBatch]:
    """Send all samples to each arm at their arrival times (seconds), one arm after another.

    Arm number `first` (modulo their number) begins, so that over several runs none always does.
    """
    arms = tuple(servers)
    first %= len(arms)
    for arm in (*arms[first:], *arms[:first]):
        try:
            result = servers[arm].run(to_requests(samples), None, arrivals)
        except EngineError as error:
            result = _lost(samples, str(error))
        yield ArmBatch(0, arm, samples, result, arrivals)


def preload(servers: Mapping[str, Server], samples: Sequence[Sample], concurrency: int) -> None:
    """Run samples through every arm and keep no result: the caches are warm afterwards.

    An arm whose engine is gone is skipped: its next batch reports it. Raises InvalidRun for a
    sample that fails, since the cache would not be as declared.
    """
    for arm, server in servers.items():
        try:
            result = server.run(to_requests(samples), concurrency)
        except EngineError:
            continue
        for sample, outcome in zip(samples, result.outcomes, strict=True):
            if isinstance(outcome, Failure):
                raise InvalidRun(
                    f"arm {arm}: {sample.id} could not be preloaded: {outcome.message}",
                    hint="raise `kv_blocks`, or run without preloaded chunks",
                )


def to_requests(samples: Sequence[Sample]) -> list[Request]:
    """The requests of several samples."""
    return [to_request(sample) for sample in samples]


def to_request(sample: Sample, algorithm: str | None = None) -> Request:
    """The request of a sample, by token ids alone, so that every arm sees the same ones.

    Without an `algorithm` it is the engine's own.
    """
    segments = [_segment(segment) for segment in sample.segments]
    return Request(segments, algorithm, max_tokens=sample.max_tokens)


def _segment(segment: SampleSegment) -> Text | Chunk:
    if segment.kind == "text":
        return Text(tokens=segment.tokens)
    document = segment.context + segment.tokens if segment.before else None
    return Chunk(tokens=segment.tokens, document=document)


def _lost(samples: Sequence[Sample], reason: str) -> GroupResult:
    return GroupResult(tuple(Failure(reason) for _ in samples), busy=0.0, clean=False)

"""The run protocol: interleaved rounds.

A round sends the same group of samples to every arm in turn, and the next round begins with the
next arm: whatever drifts (clock, temperature, neighbours) hits all arms alike, and only one arm
computes at a time. Within a group requests run in a closed loop.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from picbench.engines.request import Chunk, Request, Text
from picbench.errors import EngineError
from picbench.server import Batch, Failure, Server
from picbench.workloads.sample import Part, Sample

#: Groups are this many times as large as the concurrency, for the loop drains at a group's end.
DEPTH = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm's answer to one group of samples."""

    round: int
    arm: str
    samples: Sequence[Sample]
    batch: Batch


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
) -> Iterator[Turn]:
    """Run the whole schedule.

    An arm whose engine is gone fails its remaining requests; the others go on.
    """
    gone: dict[str, str] = {}
    for number, arm, group in schedule(samples, tuple(servers), group_size(concurrency)):
        if arm not in gone:
            try:
                batch = servers[arm].run([to_request(s) for s in group], concurrency)
            except EngineError as error:
                gone[arm] = str(error)
        if arm in gone:
            batch = Batch(tuple(Failure(gone[arm]) for _ in group), busy=0.0, clean=False)
        yield Turn(number, arm, group, batch)


def to_request(sample: Sample) -> Request:
    """The request of a sample, by token ids alone, so that every arm sees the same ones."""
    return Request([_segment(part) for part in sample.parts], max_tokens=sample.max_tokens)


def _segment(part: Part) -> Text | Chunk:
    return (Chunk if part.kind == "chunk" else Text)(tokens=part.tokens)

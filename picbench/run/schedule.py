"""The run protocol: interleaved rounds, or whole runs one after another.

A round sends the same group of samples to every arm in turn, and the next round begins with the
next arm: whatever drifts (clock, temperature, neighbours) hits all arms alike, and only one arm
computes at a time. Within a group requests run in a closed loop.

Requests that arrive at times of their own (an open loop) cannot be cut into groups without
draining the queue that they build up. There each arm serves all of them, and then the next arm.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from picbench.engines.request import Chunk, Request, Text
from picbench.errors import EngineError, InvalidRun
from picbench.run.arm import ArmServer
from picbench.store.records import ArmBatch, Failure, GroupResult
from picbench.workloads.prompts.chunk_order import ContextIndex
from picbench.workloads.sample import Sample, SampleSegment

#: What an arm gets in place of some samples: the same ones, prompts changed or not.
Rewrite = Callable[[str, Sequence[Sample]], Sequence[Sample]]

#: What is done to an arm's cache before it serves the group of a round.
Prepare = Callable[[str, int], None]

#: Groups are this many times as large as the concurrency, for the loop drains at a group's end.
DEPTH = 4


def group_size(concurrency: int, *, together: bool = False) -> int:
    """Samples of a group: single ones at concurrency 1, where there is nothing to drain.

    If they are to begin `together`, there are no more of them than are in flight at a time.
    """
    return concurrency if together or concurrency == 1 else DEPTH * concurrency


#: A round of an arm: the number of the round, the arm, the samples that it serves.
Planned = tuple[int, str, Sequence[Sample]]


def schedule(
    samples: Sequence[Sample], arms: Sequence[str], size: int, repeats: int = 1, first: int = 0
) -> Iterator[Planned]:
    """The rounds in the order of execution, groups of `size`, numbered through all repeats.

    In each round the next arm begins, in round 0 arm number `first` (modulo their number), so that
    over several runs none always does.
    """
    for number, start in enumerate([*range(0, len(samples), size)] * repeats):
        begin = (first + number) % len(arms)
        for arm in (*arms[begin:], *arms[:begin]):
            yield number, arm, samples[start : start + size]


def leave(arm: str, number: int) -> None:
    """Do nothing to an arm's cache."""


def unchanged(arm: str, samples: Sequence[Sample]) -> Sequence[Sample]:
    """Send all arms the same prompts."""
    return samples


def serve(
    servers: Mapping[str, ArmServer],
    planned: Iterable[Planned],
    concurrency: int | None,
    rewrite: Rewrite = unchanged,
    *,
    arrivals: Sequence[float] | None = None,
    lost: Mapping[str, str] = MappingProxyType({}),
    prepare: Prepare = leave,
) -> Iterator[ArmBatch]:
    """Serve the planned rounds one after another.

    In a closed loop at most `concurrency` requests are in flight; with `arrivals` (seconds) each is
    sent at its own time. An arm whose engine is gone fails its remaining requests; the others
    continue. `lost` says why engines were gone before.
    """
    gone = dict(lost)
    for number, arm, given in planned:
        sent = given
        if arm not in gone:
            try:
                prepare(arm, number)
                sent = rewrite(arm, given)
                result = servers[arm].run(to_requests(sent), concurrency, arrivals)
            except EngineError as error:
                gone[arm] = str(error)
        if arm in gone:
            failed = Failure(gone[arm])
            result = GroupResult((failed,) * len(sent), busy=0.0, clean=False)
        yield ArmBatch(number, arm, sent, result, arrivals, gone.get(arm))


def preload(
    servers: Mapping[str, ArmServer],
    samples: Sequence[Sample],
    concurrency: int,
    rewrite: Rewrite = unchanged,
) -> dict[str, GroupResult]:
    """Run samples through every arm, unmeasured: the caches are warm afterwards.

    The results, by arm, tell what became of the caches. An arm whose engine is gone is skipped: its
    next batch reports it. Raises InvalidRun for a sample that fails, since the cache would not be
    as declared.
    """
    found: dict[str, GroupResult] = {}
    for arm, server in servers.items():
        try:
            result = server.run(to_requests(rewrite(arm, samples)), concurrency)
        except EngineError:
            continue
        found[arm] = result
        for sample, outcome in zip(samples, result.outcomes, strict=True):
            if isinstance(outcome, Failure):
                raise InvalidRun(
                    f"arm {arm}: {sample.id} could not be preloaded: {outcome.message}",
                    hint="raise `kv_blocks`, or run without preloaded chunks",
                )
    return found


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


class ChunkOrder:
    """Reorders the chunks of prompts, and remembers what it made of them.

    Deterministic: the same prompts in the same order give the same orders.
    """

    def __init__(self) -> None:
        self._index = ContextIndex()

    def arrange(self, sample: Sample) -> Sample:
        """The sample with each of its chunks once, in an order that earlier prompts began with.

        Texts stay where they are; chunks change places with those that they stand next to. First
        come the chunks of the longest sequence, in tokens, that followed the same beginning before;
        after them the others, the most used one first, then the one that was seen first. A sample
        whose chunks are consecutive text stays as it is.
        """
        items = [(s.kind == "chunk", s.tokens, len(s.tokens)) for s in sample.segments]
        if sample.ordered:
            self._index.note(items)
            return sample
        order = self._index.arrange(items)
        return replace(sample, segments=tuple(sample.segments[place] for place in order))

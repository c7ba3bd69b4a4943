"""The run protocol: interleaved rounds, or whole runs one after another.

A round sends the same group of samples to every arm in turn, and the next round begins with the
next arm: whatever drifts (clock, temperature, neighbours) hits all arms alike, and only one arm
computes at a time. Within a group requests run in a closed loop.

Requests that arrive at times of their own (an open loop) cannot be cut into groups without
draining the queue that they build up. There each arm serves all of them, and then the next arm.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from picbench.engines.algorithms import Reuse
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.request import Chunk, Request, Text
from picbench.errors import EngineError, InvalidRun
from picbench.run.arm import ArmServer, Fleet
from picbench.run.cache_state import DeclaredCache, fill_requests
from picbench.run.job import Job
from picbench.run.progress import Progress
from picbench.store.records import ArmBatch, Failure, GroupResult, SampleRow
from picbench.store.writer import StoredBatch
from picbench.workloads.prompts.chunk_order import ContextIndex
from picbench.workloads.sample import Sample

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


def serve(
    servers: Mapping[str, ArmServer],
    planned: Iterable[Planned],
    concurrency: int | None,
    rewrite: Rewrite = lambda arm, samples: samples,
    *,
    arrivals: Sequence[float] | None = None,
    lost: Mapping[str, str] = MappingProxyType({}),
    prepare: Prepare = lambda arm, number: None,
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
                result = servers[arm].run([*map(to_request, sent)], concurrency, arrivals)
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
    rewrite: Rewrite,
) -> dict[str, GroupResult]:
    """Run samples through every arm, unmeasured: the caches are warm afterwards.

    The results, by arm, tell what became of the caches. An arm whose engine is gone is skipped: its
    next batch reports it. Raises InvalidRun for a sample that fails, since the cache would not be
    as declared.
    """
    found: dict[str, GroupResult] = {}
    for arm, server in servers.items():
        try:
            result = server.run([*map(to_request, rewrite(arm, samples))], concurrency)
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


def to_request(sample: Sample, algorithm: str | None = None) -> Request:
    """The request of a sample, by token ids alone, so that every arm sees the same ones.

    Without an `algorithm` it is the engine's own.
    """
    segments: list[Text | Chunk] = []
    for segment in sample.segments:
        if segment.kind == "text":
            segments.append(Text(tokens=segment.tokens))
        else:
            document = segment.context + segment.tokens if segment.before else None
            segments.append(Chunk(tokens=segment.tokens, document=document))
    return Request(segments, algorithm, max_tokens=sample.max_tokens)


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


class CacheUpkeep:
    """What arms are put through beside measuring: caches dropped, chunks served ahead, reordering.

    `declared` expects and verifies what it comes to.
    """

    def __init__(self, job: Job, fleet: Fleet, progress: Progress) -> None:
        self._job = job
        self._servers = fleet.servers
        self._progress = progress
        self._orders = {arm.name: ChunkOrder() for arm in job.arms if arm.reorders}
        sizes = {arm.name: fleet.engines[arm.name].get("block_size") for arm in job.arms}
        blocks = {a: size if isinstance(size, int) else BLOCK_SIZE for a, size in sizes.items()}
        self.declared = DeclaredCache(job.config.cache, job.arms, blocks)

    @property
    def cold(self) -> bool:
        """Whether caches are dropped before each group."""
        return self._job.config.cache == "cold"

    @property
    def group_size(self) -> int:
        """Samples of a group in a closed loop."""
        return group_size(self._job.config.concurrency, together=self.cold)

    @property
    def rounds(self) -> int:
        """Rounds of one repeat."""
        workload = self._job.workload
        return 1 if workload.arrivals else -(-len(workload.samples) // self.group_size)

    @property
    def reusing(self) -> list[str]:
        """Arms that reuse anything of earlier requests."""
        return [arm.name for arm in self._job.arms if arm.reuse is not Reuse.NOTHING]

    def begin(self) -> None:
        """Bring the empty caches of engines that have just started into the state.

        Those that arms share are brought into it at each arm's turn.
        """
        if self._job.shared:
            return
        if self._job.workload.preload:
            count = len(self._job.workload.preload)
            self._progress.say(f"preloading {count} chunks into each arm")
        if self._job.config.cache == "warm":
            count = len(fill_requests(self._job.workload.samples))
            arms = len(self.reusing)
            self._progress.say(f"warming up: {count} chunks into each of {arms} arms")
        self._serve_ahead(tuple(self._servers))

    def prepare(self, arm: str, number: int) -> None:
        """Bring an arm's cache into the state before a round. Raises EngineError if it is gone."""
        if self.cold:
            self._servers[arm].reset()
        first = self._job.shared and not number
        if not first and (not number or number % self.rounds):
            return
        self._servers[arm].reset()
        self.declared.begin(arm)
        if arm in self._orders:
            self._orders[arm] = ChunkOrder()
        self._serve_ahead((arm,))

    def rewrite(self, arm: str, samples: Sequence[Sample]) -> Sequence[Sample]:
        """What an arm is sent in place of some samples."""
        order = self._orders.get(arm)
        return [order.arrange(sample) for sample in samples] if order else samples

    def _serve_ahead(self, arms: Collection[str]) -> None:
        workload, concurrency = self._job.workload, self._job.config.concurrency
        if workload.preload:
            servers = {name: self._servers[name] for name in arms}
            preload(servers, workload.preload, concurrency, self.rewrite)
        if self._job.config.cache != "warm":
            return
        samples = fill_requests(workload.samples)
        servers = {name: self._servers[name] for name in arms if name in self.reusing}
        for arm, result in preload(servers, samples, concurrency, self.rewrite).items():
            self.declared.note_fill(arm, samples, result.evicted)

    def restore(
        self,
        stored: Sequence[StoredBatch],
        planned: Sequence[Planned],
        to_rows: Callable[[ArmBatch], Sequence[SampleRow]],
    ) -> tuple[int, int]:
        """Bring caches to where a run was stopped: serve what it has measured again, unmeasured.

        Gives how many requests were served again, and how many got another reply this time.
        `planned` are the rounds of the `stored` batches. What engines reuse depends on all that
        they served before in this repeat, in the same order and groups, so that nothing less makes
        the requests that follow hit as in a run that was not stopped. In an open loop each arm
        begins without. Raises InvalidRun where a request now reuses other tokens than when it was
        measured: its engine is not in the state in which the run was stopped.
        """
        replayed = changed = 0
        if self._job.workload.arrivals is not None or not stored:
            return replayed, changed
        if not self.cold:
            self._progress.say("serving stored requests again, unmeasured, to restore caches")
        first = len(stored) - len(stored) % (self.rounds * len(self._job.arms))
        for batch, (number, arm, given) in zip(stored[first:], planned[first:], strict=True):
            line, names = batch.line, [row.sample for row in batch.rows]
            if (line.round, line.arm, names) != (number, arm, [s.id for s in given]):
                raise InvalidRun(
                    f"round {line.round} of arm {line.arm} is stored where round {number} of arm "
                    f"{arm} belongs",
                    hint="name a new `output` to measure again",
                )
            # Also where nothing is sent: what comes later depends on it.
            sent = self.rewrite(arm, given)
            if self.cold or arm not in self.reusing or line.lost is not None:
                continue
            result = self._servers[arm].run([*map(to_request, sent)], self._job.config.concurrency)
            rows = to_rows(ArmBatch(number, arm, sent, result))
            for before, now in zip(batch.rows, rows, strict=True):
                counters = [(row.error is None, row.tokens, row.hits) for row in (before, now)]
                if counters[0] != counters[1]:
                    raise InvalidRun(
                        f"arm {arm}, sample {now.sample}: served again, it reused "
                        f"{now.tokens.reused} tokens and not {before.tokens.reused} as when it was "
                        "measured, or other blocks",
                        hint="name a new `output` to measure again; tiers that outlive the engine "
                        "must be empty",
                    )
                replies = [(row.output_sha256, row.finish_reason) for row in (before, now)]
                changed += replies[0] != replies[1]
            replayed += len(rows)
        return replayed, changed

"""What arms are put through beside measuring: caches dropped, filled, and restored."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from picbench.engines.algorithms import Reuse
from picbench.engines.config import BLOCK_SIZE
from picbench.errors import InvalidRun
from picbench.run.arm import Fleet
from picbench.run.cache_state import DeclaredCache, fill_requests
from picbench.run.job import Job
from picbench.run.progress import Progress
from picbench.run.schedule import ChunkOrder, Planned, group_size, preload, to_requests
from picbench.store.records import ArmBatch, SampleRow
from picbench.store.writer import StoredBatch
from picbench.workloads.sample import Sample

#: Rows of a batch, in the order of its samples.
ToRows = Callable[[ArmBatch], Sequence[SampleRow]]


@dataclass(frozen=True, slots=True)
class Restored:
    """Requests that were served again, and how many of these got another reply this time."""

    requests: int = 0
    changed_outputs: int = 0


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
        self, stored: Sequence[StoredBatch], planned: Sequence[Planned], to_rows: ToRows
    ) -> Restored:
        """Bring caches to where a run was stopped: serve what it has measured again, unmeasured.

        `planned` are the rounds of the `stored` batches. What engines reuse depends on all that
        they served before in this repeat, in the same order and groups, so that nothing less makes
        the requests that follow hit as in a run that was not stopped. In an open loop each arm
        begins without. Raises InvalidRun where a request now reuses other tokens than when it was
        measured: its engine is not in the state in which the run was stopped.
        """
        if self._job.workload.arrivals is not None or not stored:
            return Restored()
        if not self.cold:
            self._progress.say("serving stored requests again, unmeasured, to restore caches")
        arms = () if self.cold else self.reusing
        first = len(stored) - len(stored) % (self.rounds * len(self._job.arms))
        requests = changed = 0
        for batch, (number, arm, given) in zip(stored[first:], planned[first:], strict=True):
            _check_planned(batch, (number, arm, given))
            # Also where nothing is sent: what comes later depends on it.
            sent = self.rewrite(arm, given)
            if arm not in arms or batch.line.lost is not None:
                continue
            result = self._servers[arm].run(to_requests(sent), self._job.config.concurrency)
            rows = to_rows(ArmBatch(number, arm, sent, result))
            for before, now in zip(batch.rows, rows, strict=True):
                _check_counters(before, now)
                changed += (before.output_sha256, before.finish_reason) != (
                    now.output_sha256,
                    now.finish_reason,
                )
            requests += len(rows)
        return Restored(requests, changed)


def _check_planned(batch: StoredBatch, planned: Planned) -> None:
    number, arm, group = planned
    names = [row.sample for row in batch.rows]
    if (batch.line.round, batch.line.arm, names) != (number, arm, [s.id for s in group]):
        raise InvalidRun(
            f"round {batch.line.round} of arm {batch.line.arm} is stored where round {number} "
            f"of arm {arm} belongs",
            hint="name a new `output` to measure again",
        )


def _check_counters(before: SampleRow, now: SampleRow) -> None:
    counters = [(row.error is None, row.tokens, row.hits) for row in (before, now)]
    if counters[0] != counters[1]:
        raise InvalidRun(
            f"arm {now.arm}, sample {now.sample}: served again, it reused {now.tokens.reused} "
            f"tokens and not {before.tokens.reused} as when it was measured, or other blocks",
            hint="name a new `output` to measure again; tiers that outlive the engine must be "
            "empty",
        )

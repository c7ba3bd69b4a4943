"""Brings the caches of a run's arms into the state in which requests are measured."""

from collections.abc import Collection, Sequence

from picbench.arms.fleet import Fleet
from picbench.engines.algorithms import Reuse
from picbench.engines.config import BLOCK_SIZE
from picbench.run.caches.declared_cache import DeclaredCache, fill_requests
from picbench.run.chunk_order import ChunkOrder
from picbench.run.job import Job
from picbench.run.progress import Progress
from picbench.run.protocol import group_size, preload
from picbench.workloads.sample import Sample


class CacheUpkeep:
    """What arms are put through beside measuring: caches dropped, chunks served ahead, reordering.

    `declared` expects and verifies what it comes to.
    """

    def __init__(self, job: Job, fleet: Fleet, progress: Progress) -> None:
        self._job = job
        self._servers = fleet.servers
        self._progress = progress
        self._orders = {arm.name: ChunkOrder() for arm in job.arms if arm.reorders}
        blocks = {arm.name: _block_size(fleet, arm.name) for arm in job.arms}
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
        """Bring an arm's cache into the state before a round. EngineError if its engine is gone."""
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


def _block_size(fleet: Fleet, arm: str) -> int:
    found = fleet.engines[arm].get("block_size")
    return found if isinstance(found, int) else BLOCK_SIZE

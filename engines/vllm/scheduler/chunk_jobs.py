"""How canonical KV comes into the pool: fetched from a tier, or compiled, by requests of our own.

One job a chunk, however many requests wait for it. A job stands in the queue right ahead of the
first request that needs it. A chunk that a tier has is fetched; if the tier turns out to be slow,
broken or lying, the fetch ends, the chunk counts as missing, and it is compiled.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from picbench.engines.chunk_cache.resident_chunks import EvictedChunk, ResidentChunks
from picbench.engines.chunk_cache.tier_index import Place, TierIndex
from picbench.engines.chunk_cache.transfers import (
    ChunkLoad,
    LoadCommand,
    StoreCommand,
    TransferCommands,
    TransferResults,
)
from picbench.engines.planning.keys import Key
from picbench.engines.planning.plan import Canonical, Plan
from picbench.engines.vllm.scheduler import rewrite
from picbench.engines.vllm.scheduler.pool import Pool

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

_LOG = logging.getLogger(__name__)

#: Puts a job's request into the engine's queue, ahead of a waiting request.
Submit = Callable[["Request", "Request"], None]


@dataclass(slots=True)
class ChunkJob:
    """A chunk on its way into the pool: by which request, for whom, and ahead of whom it stands.

    `owner` asked first and is charged; `ahead_of` is the first in the queue that needs it.
    `fetches` says that a tier fills the blocks, `shared` that somebody will map them.
    """

    canonical: Canonical
    request: "Request"
    plan: Plan
    owner: str
    ahead_of: str
    fetches: bool
    shared: bool

    @property
    def key(self) -> Key:
        """The key of the chunk."""
        return self.canonical.key


@dataclass(slots=True)
class ChunkJobs:
    """The jobs of one scheduler. With `tiers`, compiled chunks are stored and evicted ones kept."""

    pool: Pool
    submit: Submit
    directory: TierIndex
    tiers: bool
    commands: TransferCommands = field(default_factory=TransferCommands)
    pending: int = 0
    chunks: ResidentChunks = field(init=False)
    _jobs: dict[Key, ChunkJob] = field(default_factory=dict)
    _by_request: dict[str, ChunkJob] = field(default_factory=dict)
    _numbers: "count[int]" = field(default_factory=count)
    _unfinished: Counter[Key] = field(default_factory=Counter)
    _moving: dict[Key, Canonical] = field(default_factory=dict)
    _leaving: dict[Key, Canonical] = field(default_factory=dict)
    _pins: "dict[Key, list[KVCacheBlock]]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chunks = ResidentChunks(self.pool, self._demote)

    @property
    def idle(self) -> bool:
        """Whether no chunk is on its way, in or out."""
        return not (self._jobs or self._moving or self.commands or self.pending)

    def job_of(self, request_id: str) -> ChunkJob | None:
        """The job that a request does, if it is one of ours."""
        return self._by_request.get(request_id)

    def mappable(self, canonical: Canonical) -> bool:
        """Whether a request may map a chunk in the step at hand: its blocks are in the pool.

        Those of a compile that runs in the same step count: every layer writes all KV first.
        """
        return self.chunks.whole(canonical.key) or canonical.resident(self.pool.resident)

    def copyable(self, canonical: Canonical) -> bool:
        """Whether a chunk can be copied from the pool: its blocks have been computed before."""
        return self.mappable(canonical) and not any(map(self._unfinished.get, canonical.keys))

    def ask(self, canonicals: Iterable[Canonical]) -> None:
        """Ask the tiers for chunks that nothing is known of, long before they are needed."""
        for canonical in canonicals:
            unknown = self.directory.where(canonical.key) is Place.UNKNOWN
            if unknown and canonical.key not in self._jobs and not self.mappable(canonical):
                self.directory.asked(canonical.key)
                self.commands.lookups.append(canonical.key)

    def compile_or_fetch(
        self, canonical: Canonical, parent: "Request", *, head: bool, shared: bool
    ) -> None:
        """See to it that a missing chunk comes, ahead of the request that waits for it."""
        job = self._jobs.get(canonical.key)
        if job is None:
            self._start(canonical, parent, shared)
            return
        job.shared |= shared
        if head and job.ahead_of != parent.request_id:
            job.ahead_of = parent.request_id
            self.submit(job.request, parent)

    def end(self, job: ChunkJob, blocks: tuple[int, ...], *, done: bool) -> None:
        """A job's request ended; `blocks` are its blocks. Without `done` it was given up."""
        del self._jobs[job.key], self._by_request[job.request.request_id]
        if not job.fetches:
            self._finish(_names(job))
        if not done:
            return
        if self.tiers and not job.fetches:
            self.commands.stores.append(
                StoreCommand(job.key, blocks[len(job.canonical.anchor_pages) :])
            )
        if job.shared or not self.tiers:
            self.chunks.add(job.canonical)
        else:
            self._moving[job.key] = job.canonical

    def on_transfer_results(self, results: TransferResults) -> None:
        """Take over what the tiers answered."""
        self.pending = results.pending
        self.directory.update(results)
        for key in results.stored | results.refused:
            canonical = self._moving.pop(key, None)
            if canonical is not None:
                self._settle(canonical, kept=self.stored(key))

    def tidy(self) -> None:
        """Take chunks that live in a tier out of the pool, as soon as nobody reads them there."""
        for key, canonical in list(self._leaving.items()):
            names = [page.name for page in canonical.pages]
            self.pool.discard(name for name in names if not self.chunks.owns(name))
            if not any(map(self.pool.in_use, names)):
                del self._leaving[key]

    def load(self, job: ChunkJob, block_ids: tuple[int, ...], resident: int) -> None:
        """Order the load of a fetch whose first `resident` pages were in the pool."""
        size = len(job.plan.keys)
        pages = tuple(range(resident, size))
        part = ChunkLoad(job.key, size, pages, block_ids[resident:size])
        self.commands.loads.append(LoadCommand(job.request.request_id, (part,)))

    def orphans(self, wanted: set[Key]) -> list[str]:
        """Ids of the requests of jobs that nobody waits for."""
        return [job.request.request_id for key, job in self._jobs.items() if key not in wanted]

    def stored(self, key: Key) -> bool:
        """Whether a tier has a chunk, as far as is known."""
        return self.directory.where(key) is Place.REMOTE

    def pin(self, key: Key) -> bool:
        """Keep a chunk in the pool; False if it is not there as a whole."""
        chunk = self.chunks.find(key)
        if chunk is None or not self.chunks.whole(key):
            return False
        if key not in self._pins:
            self._pins[key] = [block for page in chunk.pages if (block := self.pool.hold(page))]
        return True

    def unpin(self, key: Key) -> None:
        """Let a chunk be evicted again."""
        self.pool.release(self._pins.pop(key, []))

    def is_pinned(self, key: Key) -> bool:
        """Whether a chunk is kept in the pool."""
        return key in self._pins

    @property
    def pins(self) -> bool:
        """Whether any chunk is kept in the pool."""
        return bool(self._pins)

    def make_way(self, need: int) -> None:
        """Unpin chunks, oldest pin first, until a request of so many blocks can run."""
        while self._pins and need > self.pool.usable - len(self.pinned()):
            key = next(iter(self._pins))
            _LOG.warning("unpinned chunk %s: a request needs its blocks", key.hex()[2:14])
            self.unpin(key)

    def pinned(self) -> "list[KVCacheBlock]":
        """The blocks that pins hold, each once."""
        return list({b.block_id: b for held in self._pins.values() for b in held}.values())

    def clear_tiers(self) -> None:
        """Drop what this engine stored in tiers."""
        self.directory.clear()
        self.commands.clear = self.tiers

    def fetches(self) -> list[ChunkJob]:
        """The jobs that a tier does."""
        return [job for job in self._jobs.values() if job.fetches]

    def _start(self, canonical: Canonical, parent: "Request", shared: bool) -> None:
        place = self.directory.where(canonical.key)
        if place is Place.UNKNOWN:
            self.ask([canonical])
        if place in (Place.UNKNOWN, Place.ASKED):
            return
        fetches = place is Place.REMOTE
        plan = canonical.fetch_plan() if fetches else canonical.compile_plan()
        verb = "fetch" if fetches else "compile"
        request = rewrite.own_request(f"pic-{verb}-{next(self._numbers)}", plan, parent)
        asker = parent.request_id
        job = ChunkJob(canonical, request, plan, asker, asker, fetches, shared)
        self._jobs[canonical.key] = self._by_request[request.request_id] = job
        if not fetches:
            self.directory.settle(canonical.key)
            self._unfinished.update(_names(job))
        self.submit(request, parent)

    def _finish(self, names: Iterable[Key]) -> None:
        """Pages are computed, or given up; two chunks that begin alike count theirs twice."""
        for name in names:
            self._unfinished[name] -= 1
            if not self._unfinished[name]:
                del self._unfinished[name]

    def _settle(self, canonical: Canonical, *, kept: bool) -> None:
        """Chunk KV of copying algorithms lives in a tier, if one keeps it, and else in the pool."""
        if kept:
            self._leaving[canonical.key] = canonical
        elif self.mappable(canonical):
            self.chunks.add(canonical)

    def _demote(self, chunk: EvictedChunk) -> None:
        if self.tiers and not self.stored(chunk.key):
            self.commands.stores.append(StoreCommand(chunk.key, chunk.blocks))


def _names(job: ChunkJob) -> list[Key]:
    return [page.name for page in job.canonical.pages]

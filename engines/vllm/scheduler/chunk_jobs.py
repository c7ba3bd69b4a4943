"""Requests of the linker's own that bring missing chunks into the pool.

One job per chunk, however many requests wait for it; its request is queued right ahead of the first
of them. A chunk that a tier has is fetched. If the tier is slow, broken or does not have it after
all, the fetch ends, the chunk counts as missing, and it is compiled.
"""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from picbench.engines.chunk_cache.chunk_record import ChunkState
from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.chunk_cache.transfers import ChunkLoad, LoadCommand
from picbench.engines.planning.keys import Key
from picbench.engines.planning.pages import Page
from picbench.engines.planning.plan import Canonical, Plan
from picbench.engines.vllm.scheduler import rewrite

if TYPE_CHECKING:
    from vllm.v1.request import Request


class BatchBarrier:
    """Holds waiting requests back until the missing chunks of all of them were compiled.

    A batch is what waits when every request of the batch before it has been scheduled or has gone.
    Requests that arrive later are held back until theirs begins. The barrier waits once for each
    chunk: one that is evicted again is compiled for the first request that needs it, as without a
    barrier, so that every batch ends in a pool of any size.
    """

    def __init__(self) -> None:
        self._members: set[str] = set()
        self._pending: set[Key] = set()
        self._later: set[str] = set()

    def update(self, waiting: Mapping[str, Collection[Key]]) -> None:
        """Note which requests wait that were never scheduled, and the chunks that each misses."""
        self._members &= waiting.keys()
        if not self._members:
            self._members = set(waiting)
            self._pending = {key for keys in waiting.values() for key in keys}
        else:
            self._pending &= {key for name in self._members for key in waiting[name]}
        self._later = waiting.keys() - self._members

    def waits_for(self, key: Key) -> bool:
        """Whether the batch waits for a chunk, which is compiled before all of its requests."""
        return key in self._pending

    def is_later(self, request_id: str) -> bool:
        """Whether a request waits for a batch that has not begun."""
        return request_id in self._later

    def holds_back(self, request_id: str) -> bool:
        """Whether a request must not be scheduled yet."""
        return self.is_later(request_id) or (bool(self._pending) and request_id in self._members)


#: Puts a job's request into the engine's queue, ahead of a waiting request, or at its end.
Submit = Callable[["Request", "Request | None"], None]


@dataclass(slots=True)
class ChunkJob:
    """A chunk on its way into the pool, and the request that compiles or fetches it.

    `charged_to` needed it first, `ahead_of` is the request that it was queued ahead of; "" for one
    that was queued at the end.
    `shared` says that a request will map it rather than copy it. `loading` names the pages that a
    tier was told to load, `computed` are those that it computes since it was scheduled.
    """

    canonical: Canonical
    request: "Request"
    plan: Plan
    charged_to: str
    ahead_of: str
    fetches: bool
    shared: bool
    loading: Sequence[Key] = ()
    computed: tuple[Page, ...] = ()


@dataclass(slots=True)
class ChunkJobs:
    """The jobs of one scheduler, by the ids of their requests."""

    store: ChunkStore
    submit: Submit
    _jobs: dict[str, ChunkJob] = field(default_factory=dict)
    _numbers: "count[int]" = field(default_factory=count)

    def __len__(self) -> int:
        return len(self._jobs)

    def find(self, request_id: str | None) -> ChunkJob | None:
        """The job of a request; None for a request that is not the linker's own."""
        return self._jobs.get(request_id or "")

    def compile_or_fetch(
        self,
        canonical: Canonical,
        parent: "Request",
        *,
        ahead_of: "Request | None",
        head: bool,
        shared: bool,
    ) -> None:
        """Compile or fetch a missing chunk that a request waits for, ahead of a waiting one.

        Without one it is last. With `head`, a job that is under way is moved ahead of `parent`.
        """
        job = self.find(self.store.get(canonical.key).owner)
        if job is None:
            self._start(canonical, parent, ahead_of, shared)
            return
        job.shared |= shared
        if head and job.ahead_of != parent.request_id:
            job.ahead_of = parent.request_id
            self.submit(job.request, parent)

    def load(self, job: ChunkJob, block_ids: tuple[int, ...], resident: int) -> None:
        """Command the load of a fetch whose first `resident` pages were in the pool."""
        size = len(job.plan.keys)
        job.loading = [page.name for page in job.canonical.pages[resident:]]
        pages = tuple(range(resident, size))
        chunk = ChunkLoad(job.canonical.key, size, pages, block_ids[resident:size])
        self.store.commands.loads.append(LoadCommand(job.request.request_id, (chunk,)))

    def finish(self, job: ChunkJob, blocks: tuple[int, ...], *, success: bool) -> None:
        """Complete a job whose request ended; `blocks` are the request's.

        A compile succeeds without blocks if it was preempted while its last step ran, where steps
        are scheduled ahead. Then nothing keeps the chunk's pages, and it is compiled again. If this
        raises, the job remains, to be finished without `success`.
        """
        canonical = job.canonical
        if job.fetches:
            self.store.complete_fetch(canonical, success=success)
        else:
            need = canonical.anchor.blocks + len(canonical.pages)
            success = success and len(blocks) >= need
            blocks = blocks[:need]
            self.store.complete_compile(canonical, blocks, success=success, shared=job.shared)
        self._jobs.pop(job.request.request_id, None)

    def requests(self) -> "list[Request]":
        """The requests of all jobs."""
        return [job.request for job in self._jobs.values()]

    def fetches(self) -> list[ChunkJob]:
        """The jobs whose chunks a tier loads."""
        return [job for job in self._jobs.values() if job.fetches]

    def charged_to(self, request_id: str) -> list[ChunkJob]:
        """The jobs that a request needed first."""
        return [job for job in self._jobs.values() if job.charged_to == request_id]

    def unclaimed(self, alive: Container[str]) -> dict[Key, str]:
        """Ids of the requests of jobs, by chunk, whose first claimant is not `alive` any more."""
        jobs = self._jobs.items()
        return {j.canonical.key: name for name, j in jobs if j.charged_to not in alive}

    def _start(
        self, canonical: Canonical, parent: "Request", ahead_of: "Request | None", shared: bool
    ) -> None:
        tiers = self.store.tiers_of(canonical.key)
        if tiers is ChunkState.UNKNOWN:
            self.store.lookup([canonical])
        if tiers in (ChunkState.UNKNOWN, ChunkState.LOOKUP):
            return
        fetches = tiers is ChunkState.REMOTE
        plan = canonical.fetch_plan() if fetches else canonical.compile_plan()
        verb = "fetch" if fetches else "compile"
        request = rewrite.chunk_request(f"pic-{verb}-{next(self._numbers)}", plan, parent)
        request.priority = parent.priority
        place = ahead_of.request_id if ahead_of else ""
        job = ChunkJob(canonical, request, plan, parent.request_id, place, fetches, shared)
        prepare = self.store.prepare_fetch if fetches else self.store.prepare_compile
        prepare(canonical, request.request_id)
        self._jobs[request.request_id] = job
        try:
            self.submit(request, ahead_of)
        except Exception:
            # Otherwise requests would wait for a job that never starts.
            if request.request_id in self._jobs:
                self.finish(job, (), success=False)
            raise

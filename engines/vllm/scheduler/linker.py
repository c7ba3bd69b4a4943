"""The linker: plans requests, has their missing chunks compiled or fetched, and counts the cost.

A request with chunks is planned on arrival. Chunks that it needs and that are missing are compiled
or fetched by requests of the linker's own (`chunk_jobs.py`), queued right ahead of the first
request that needs them (`EngineConfig.compile_order` has other orders). A waiting request is passed
over, not blocked on, and is linked in the very step that schedules the last of its compiles.

Progress under pressure: the request at the head of the queue, and no other, references the chunks
that are already resident, so that they are not evicted while the others are on their way. It does
not if requests that run, or whose loads have ended, would then lack blocks: these go first. Chunks
are requested only for as many waiting requests as fit the pool together.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from picbench.engines.algorithms import Reuse
from picbench.engines.chunk_cache.transfers import (
    ChunkLoad,
    CopyCommand,
    LoadCommand,
    TransferResults,
)
from picbench.engines.planning.keys import Key
from picbench.engines.planning.plan import Canonical, Plan
from picbench.engines.request import Choice, TokenCounts
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.frontend.engine_core import hash_prompt
from picbench.engines.vllm.scheduler import rewrite
from picbench.engines.vllm.scheduler.chunk_jobs import BatchBarrier, ChunkJob, ChunkJobs
from picbench.engines.vllm.scheduler.planner import PlannedPrompt, RequestPlanner, has_plan
from picbench.engines.vllm.scheduler.pool import Pool
from picbench.engines.vllm.scheduler.prompt_cost import Brought, PromptCost
from picbench.engines.vllm.settings import PicSettings
from picbench.errors import EngineError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class Link:
    """A planned request: its plan, the blocks it references while it waits, and its counts.

    `need` is the number of KV blocks that it can occupy, `keys` are those of its chunks, without
    those served as text, in the prompt's order. `loading` names the pages that tiers were told to
    load into its own blocks, by chunk. `cost` is known once it was scheduled; `running`
    says that it has blocks now.
    """

    plan: Plan
    need: int
    tag: str | None
    choice: Choice | None = None
    keys: tuple[Key, ...] = ()
    held: "dict[Key, KVCacheBlock]" = field(default_factory=dict)
    brought: Brought = field(default_factory=Brought)
    loading: dict[Key, Sequence[Key]] = field(default_factory=dict)
    cost: PromptCost | None = None
    running: bool = False

    def keys_by_span(self, spans: int) -> Iterator[Key | None]:
        """The keys of the chunks of so many spans; None for one served as text."""
        texts, keys = self.choice.texts if self.choice else (), iter(self.keys)
        return (None if i in texts else next(keys, None) for i in range(spans))

    @property
    def copies(self) -> bool:
        """Whether the request copies its chunks into blocks of its own."""
        return bool(self.plan.copies)


class Linker:
    """Plans the requests of one scheduler and has their missing chunks compiled or fetched.

    Its hooks are called by way of `IsolatedLinker`, in the order in which they are defined.
    """

    def __init__(
        self,
        settings: PicSettings,
        planner: RequestPlanner,
        pool: Pool,
        jobs: ChunkJobs,
        faults: Faults,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._jobs = jobs
        self._faults = faults
        self._store = jobs.store
        self._planner = planner
        self._block_size = planner.block_size
        self._links: dict[str, Link] = {}
        # Those that reference blocks while they wait: at most a few of the first.
        self._holders: dict[Link, None] = {}
        self._isolated: set[str] = set()
        # Requests whose chunks are served as text, until they are first scheduled.
        self._texts: dict[str, PlannedPrompt] = {}
        self._costs: dict[str, PromptCost] = {}
        self._barrier = BatchBarrier() if settings.compile_order == "batch" else None

    def on_arrival(self, request: "Request") -> None:
        """Plan and rewrite a new request, unless it is plain. Raises ConfigError if it is wrong."""
        found = self._planner.read(request)
        if found is None:
            return
        args, algorithm = found
        if has_plan(args, algorithm):
            planned = self._planner.plan(request, args, algorithm)
            if planned.plan is None:
                self._texts[request.request_id] = planned
                return
            rewrite.apply_plan(request, planned.plan)
            link = Link(planned.plan, planned.need, planned.tag, planned.choice, planned.keys)
            self._links[request.request_id] = link
            self._store.lookup(planned.plan.canonicals)
            return
        hash_prompt(request)
        if algorithm.reuse is Reuse.NOTHING:
            rewrite.isolate(request)
            self._isolated.add(request.request_id)

    def before_schedule(self, waiting: "Iterable[Request]", reserved: int) -> None:
        """Request chunks for waiting requests, in order; `reserved` blocks must stay available."""
        self._store.release_stored()
        if not (self._links or self._store.pinned):
            return
        first = next((r for r in waiting if not self.is_own(r)), None)
        if first is None:
            return
        if self._store.pinned:
            self._store.unpin_for(self.blocks_needed(first))
        # A list: jobs are queued meanwhile.
        fitting = list(self._fitting(waiting))
        for link in self._holders.keys() - {link for _, link in fitting}:
            self._release(link)
        if self._barrier is not None:
            fresh = ((r.request_id, link) for r, link in fitting if link.cost is None)
            self._barrier.update(
                {name: [c.key for c in self._missing(link)] for name, link in fresh}
            )
        for request, link in fitting:
            if self._barrier is not None and self._barrier.is_later(request.request_id):
                self._release(link)
                continue
            advance = partial(self._advance, request, link, first)
            self._faults.succeeds("request chunks", request.request_id, advance)
            if self._pool.available < reserved:
                self._release(link)

    def can_schedule(self, request: "Request") -> bool:
        """Whether a waiting request may be scheduled now: its chunks are available."""
        link = self._links.get(request.request_id)
        if link is None or request.num_computed_tokens:
            return True
        if self._barrier is not None and self._barrier.holds_back(request.request_id):
            return False
        return all(self._available(c, link) for c in link.plan.canonicals)

    def check_hits(self, request: "Request", hit_tokens: int) -> None:
        """Raise EngineError if a request is about to compute canonical KV in its own context."""
        link = self._links.get(request.request_id)
        if link is not None and hit_tokens < link.plan.shared * self._block_size:
            raise EngineError(f"request {request.request_id} lost a chunk between lookup and use")

    def external_tokens(self, request: "Request", hit_tokens: int) -> tuple[int, bool]:
        """Tokens after the hits that a tier or a copy provides, and whether that takes steps."""
        job = self._jobs.find(request.request_id)
        if job is not None:
            loaded = len(job.plan.tokens) - hit_tokens if job.fetches else 0
            return loaded, loaded > 0
        link = self._links.get(request.request_id)
        if link is None or not link.copies:
            return 0, False
        # Blocks that are copied from must not be allocated as the ones that are copied into.
        self._hold(link)
        return len(link.plan.copies) * self._block_size, self._loads(link)

    def on_allocated(self, request: "Request", block_ids: tuple[int, ...], external: int) -> None:
        """Command the loads and copies that fill blocks allocated for `external` tokens."""
        if not external:
            return
        job = self._jobs.find(request.request_id)
        if job is not None:
            resident = len(job.plan.keys) - external // self._block_size
            self._jobs.load(job, block_ids, resident)
            return
        link = self._links[request.request_id]
        first = link.plan.shared
        self._fill(request, link, block_ids[first : first + len(link.plan.copies)])
        self._release(link)

    def on_scheduled(self, request: "Request", hit_tokens: int) -> None:
        """Release a request's blocks (it has references of its own now), and count its cost."""
        job = self._jobs.find(request.request_id)
        if job is not None:
            job.computed = job.plan.pages_from(hit_tokens // self._block_size)
            owner = self._owner(job)
            if owner is not None:
                owner.brought.compile(job.computed)
        link = self._links.get(request.request_id)
        if link is None:
            self._count_text(request, hit_tokens)
            return
        self._release(link)
        link.running = True
        if link.cost is None:
            self._store.touch(link.plan.canonicals)
            hits = hit_tokens // self._block_size
            link.cost = PromptCost.of(link.plan, hits, link.brought, link.choice)
            rewrite.correct_stats(request, link.cost.tokens)
            if link.tag is not None:
                self._costs[link.tag] = link.cost

    def on_transfer_results(self, results: TransferResults) -> None:
        """Apply the tiers' results, and note which pages were loaded for which request."""
        self._store.complete_transfers(results)
        for request_id, served in results.served.items():
            job = self._jobs.find(request_id)
            link = self._owner(job) if job else self._links.get(request_id)
            if link is None:
                continue
            for key, tier in served.items():
                link.brought.load(job.loading if job else link.loading.pop(key, ()), tier)

    def on_preempted(self, request: "Request", block_ids: tuple[int, ...]) -> None:
        """Forget the private blocks of a request that is about to lose its blocks.

        And those that nothing was computed in: a request of higher priority may take them in the
        step that would have filled them, where `KVCacheManager.allocate_slots` has given them the
        keys of its tokens (vllm/v1/core/kv_cache_manager.py).
        """
        link = self._links.get(request.request_id)
        if link is not None:
            link.running = False
        empty = block_ids[request.num_computed_tokens // self._block_size :]
        self._pool.forget((*self._private(request, block_ids), *empty))

    def on_finished(self, request: "Request", block_ids: tuple[int, ...], *, success: bool) -> None:
        """Drop everything kept for a request that ended for whatever reason."""
        self._pool.forget(self._private(request, block_ids))
        self.abandon(request, block_ids, success=success)

    def abandon(
        self, request: "Request", block_ids: tuple[int, ...] = (), *, success: bool = False
    ) -> None:
        """Drop everything kept for a request, as where its last hook failed."""
        self._isolated.discard(request.request_id)
        self._texts.pop(request.request_id, None)
        link = self._links.pop(request.request_id, None)
        if link is not None:
            self._release(link)
            if link.cost is None:
                self._hand_over(request.request_id)
        job = self._jobs.find(request.request_id)
        if job is not None:
            self._jobs.finish(job, block_ids, success=success)

    def withdraw(self, request: "Request") -> None:
        """Take back what was commanded for a request in this step."""
        self._store.commands.withdraw(request.request_id)

    def concerned(self, request_id: str) -> tuple[str, ...]:
        """The requests that end with a request: with one of the linker's own, one that needs it.

        That is one for whose sake it was started or moved if that still waits, or any other that
        waits for the chunk. So a job that fails whenever it is started ends, one by one, all
        requests that need it.
        """
        job = self._jobs.find(request_id)
        if job is None:
            return (request_id,)
        key = job.canonical.key
        for name in (job.charged_to, job.ahead_of, *self._links):
            link = self._links.get(name)
            waits = link is not None and not link.running and name not in self._faults
            if link is not None and waits and any(c.key == key for c in link.plan.canonicals):
                return (request_id, name)
        return (request_id,)

    def reconcile(self, request_id: str) -> None:
        """Compare what is known of a request's chunks with the pool, after a fault."""
        link = self._links.get(request_id)
        if link is not None:
            self._store.reconcile(link.plan.canonicals)

    def blocks_needed(self, request: "Request") -> int:
        """Blocks that a request will take from those that have no references now."""
        link = self._links.get(request.request_id)
        if link is None:
            return -(-(request.num_prompt_tokens + request.max_tokens) // self._block_size)
        if link.copies:
            return link.need
        mapped = set(filter(None, link.plan.keys[: link.plan.shared]))
        return link.need - sum(map(self._pool.in_use, mapped))

    def orphans(self) -> list[str]:
        """Ids of the linker's own requests that no request waits for any more."""
        left = self._jobs.unclaimed(self._links)
        for link in self._links.values():
            # Called whenever a request is ended: most chunks of most others are not looked at.
            if not left:
                break
            for canonical in link.plan.canonicals:
                left.pop(canonical.key, None)
        return list(left.values())

    def is_own(self, request: "Request") -> bool:
        """Whether a request is one of the linker's own."""
        return self._jobs.find(request.request_id) is not None

    def is_plain(self, request_id: str) -> bool:
        """Whether a request's blocks have the keys of stock vLLM."""
        return request_id not in self._isolated and self.plan_of(request_id) is None

    def plan_of(self, request_id: str) -> Plan | None:
        """The plan of a planned request, or of a job's request; None for a plain one."""
        planned = self._links.get(request_id) or self._jobs.find(request_id)
        return planned.plan if planned else None

    def link_of(self, request_id: str) -> Link | None:
        """What is kept for a planned request; None for any other."""
        return self._links.get(request_id)

    def tokens_of(self, request_id: str) -> TokenCounts | None:
        """The prompt's tokens of a planned request that was scheduled; None for any other."""
        link = self._links.get(request_id)
        return link.cost.tokens if link and link.cost else None

    def new_slots(self, tag: str) -> int | None:
        """Slots that a waiting request computes, missing chunks' included; None for a plain one."""
        link = next((link for link in reversed(self._links.values()) if link.tag == tag), None)
        if link is None:
            return None
        missing = (c for c in link.plan.canonicals if not self._available(c, link))
        return self._block_size * (len(link.plan.computed) + sum(len(c.pages) for c in missing))

    def held(self) -> "list[KVCacheBlock]":
        """Blocks referenced for waiting requests and for pins."""
        waiting = [block for link in self._holders for block in link.held.values()]
        return waiting + self._store.pinned_blocks()

    def release_held(self) -> None:
        """Drop what is referenced for waiting requests: the next step references it again."""
        for link in list(self._holders):
            self._release(link)

    def take_cost(self, tag: str) -> PromptCost | None:
        """Remove and return the cost of the request with this tag; None for a plain request."""
        return self._costs.pop(tag, None)

    @property
    def idle(self) -> bool:
        """Whether nothing is planned, held or under way."""
        return not self._links and self._store.idle

    def _count_text(self, request: "Request", hit_tokens: int) -> None:
        """Count the cost of a request whose chunks are served as text, once."""
        planned = self._texts.pop(request.request_id, None)
        if planned is not None and planned.tag is not None:
            prompt, size = request.num_prompt_tokens, self._block_size
            cost = PromptCost.of_text(prompt, hit_tokens, size, planned.choice)
            self._costs[planned.tag] = cost

    def _available(self, canonical: Canonical, link: Link) -> bool:
        if link.copies:
            return self._store.is_copyable(canonical) or self._store.is_remote(canonical.key)
        if link.plan.picks is not None:
            # They are picked before the step runs, by what the question attends to.
            return self._store.is_copyable(canonical)
        return self._store.is_mappable(canonical)

    def _missing(self, link: Link) -> list[Canonical]:
        return [c for c in link.plan.canonicals if not self._available(c, link)]

    def _fitting(self, waiting: "Iterable[Request]") -> "Iterator[tuple[Request, Link]]":
        """The first planned requests that fit the pool together; each fits it alone.

        What comes after them is not looked at: in every step that would take longer, the more wait.
        """
        room = self._pool.usable
        for request in waiting:
            link = self._links.get(request.request_id)
            if link is None or request.request_id in self._faults:
                continue
            room -= link.need
            if room < 0:
                return
            yield request, link

    def _advance(self, request: "Request", link: Link, first: "Request") -> None:
        """Request the chunks that a request misses; `first` is the head of the queue."""
        missing, head = self._missing(link), request is first
        ahead_of: Request | None = request
        moves = head
        if self._settings.compile_order == "isps":
            # While something runs, blocks will be freed: no job must be moved ahead to be computed.
            moves = head and not any(other.running for other in self._links.values())
            ahead_of = request if moves else None
        barrier = self._barrier
        for canonical in missing:
            begins = barrier is not None and barrier.waits_for(canonical.key)
            before = first if begins else ahead_of
            self._jobs.compile_or_fetch(
                canonical, request, ahead_of=before, head=moves, shared=not link.copies
            )
        if head and missing:
            self._hold(link)
        else:
            self._release(link)

    def _hold(self, link: Link) -> None:
        for canonical in link.plan.canonicals:
            if link.copies and self._store.is_remote(canonical.key):
                continue
            for key in canonical.keys:
                if key not in link.held and (block := self._pool.hold(key)):
                    link.held[key] = block
                    self._holders[link] = None

    def _release(self, link: Link) -> None:
        self._holders.pop(link, None)
        self._pool.release(list(link.held.values()))
        link.held.clear()

    def _loads(self, link: Link) -> bool:
        """Whether a tier fills any of a request's own blocks, as `_fill` commands it.

        Chunks that begin alike have pages in common, which are copied or loaded for the first one:
        of another nothing may be left to load, and a load that was not commanded never ends.
        """
        left = set(link.plan.copies)
        for canonical in link.plan.canonicals:
            pages = left.intersection(canonical.pages[i].name for i in canonical.used)
            if pages and self._store.is_remote(canonical.key):
                return True
            left -= pages
        return False

    def _fill(self, request: "Request", link: Link, blocks: tuple[int, ...]) -> None:
        """Command what fills a request's own blocks: copies of pool blocks, or loads."""
        target = dict[Key, list[int]]()
        for name, block in zip(link.plan.copies, blocks, strict=True):
            target.setdefault(name, []).append(block)
        loads: list[ChunkLoad] = []
        for canonical in link.plan.canonicals:
            into = [(i, b) for i in canonical.used for b in target.pop(canonical.pages[i].name, ())]
            if not self._store.is_remote(canonical.key):
                source = {i: self._pool.block_id(canonical.pages[i].name) for i in canonical.used}
                own = request.request_id
                copies = (CopyCommand(own, source[i], block) for i, block in into)
                self._store.commands.copies.extend(copies)
            elif into:
                pages, ids = zip(*into, strict=True)
                link.loading[canonical.key] = [canonical.pages[i].name for i in pages]
                loads.append(ChunkLoad(canonical.key, len(canonical.pages), pages, ids))
        if loads:
            self._store.commands.loads.append(LoadCommand(request.request_id, tuple(loads)))

    def _private(self, request: "Request", block_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The blocks of a request that no other request could ever find.

        After copies nothing can be found: a lookup ends at the first block without a key. Nor can
        blocks of which only a worker knows what they hold.
        """
        if request.request_id in self._isolated:
            return block_ids
        link = self._links.get(request.request_id)
        if link is None or not (link.copies or link.plan.picks):
            return ()
        return block_ids[link.plan.shared :]

    def _hand_over(self, request_id: str) -> None:
        """Charge what is on its way for a request that is gone to the next that waits for it."""
        for job in self._jobs.charged_to(request_id):
            job.charged_to = ""
            for name, link in self._links.items():
                keys = (canonical.key for canonical in link.plan.canonicals)
                if link.cost is None and job.canonical.key in keys:
                    job.charged_to = name
                    link.brought.compiled.update(page.key for page in job.computed)
                    break

    def _owner(self, job: ChunkJob) -> Link | None:
        """The waiting request that a job is charged to."""
        link = self._links.get(job.charged_to)
        return link if link is not None and link.cost is None else None

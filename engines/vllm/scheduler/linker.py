"""Link: plans for requests, who waits for which chunks, and what a request's prompt cost.

A request with chunks is planned on arrival. While canonical KV that it needs is missing, the
linker has it supplied (`supply.py`) by requests of its own, which stand in the queue right ahead
of the first request that needs them and serve everybody who waits. The waiting request is passed
over, not blocked on, and links in the very step that schedules the last of its compiles.

Progress under pressure: the request at the head of the queue holds references to the chunks that
are already there, so that they cannot be evicted while the rest is supplied; nobody else does.
Chunks are only sent for while the requests ahead, together, fit the pool.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from picbench.engines.algorithms import Algorithm, Registry, Reuse
from picbench.engines.chunk_cache.transfers import (
    CopyCommand,
    LoadCommand,
    LoadedChunk,
    TransferResults,
)
from picbench.engines.planning.chunk_pages import PageCache
from picbench.engines.planning.keys import Key
from picbench.engines.planning.layout import Footprint, lay_out
from picbench.engines.planning.pages import SlotKind
from picbench.engines.planning.plan import Canonical, Plan
from picbench.engines.request import Hits, TokenCounts
from picbench.engines.vllm.frontend.hashing import hash_lead, hash_prompt
from picbench.engines.vllm.frontend.limits import Limits
from picbench.engines.vllm.frontend.request_args import RequestArgs, cut, read_args
from picbench.engines.vllm.scheduler import rewrite
from picbench.engines.vllm.scheduler.chunk_jobs import ChunkJob, ChunkJobs
from picbench.engines.vllm.scheduler.pool import Pool
from picbench.engines.vllm.settings import PicSettings
from picbench.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(slots=True)
class Link:
    """A planned request: its plan, what it holds while it waits, and what became of it.

    `served` counts blocks that tiers loaded on its behalf, by tier.
    """

    plan: Plan
    need: int
    tag: str | None
    held: "dict[Key, KVCacheBlock]" = field(default_factory=dict)
    compiled: int = 0
    served: dict[str, int] = field(default_factory=dict)
    placed: bool = False

    @property
    def copies(self) -> bool:
        """Whether the request gets blocks of its own for its chunks."""
        return bool(self.plan.copies)

    def count(self, served: Mapping[str, int]) -> None:
        """Add blocks that tiers loaded."""
        for tier, blocks in served.items():
            self.served[tier] = self.served.get(tier, 0) + blocks


@dataclass(frozen=True, slots=True)
class PromptCost:
    """What a request's prompt cost, once it was first scheduled."""

    tokens: TokenCounts
    hits: Hits


class Linker:
    """Plans requests and has missing chunks supplied; one belongs to each scheduler."""

    def __init__(
        self, settings: PicSettings, limits: Limits, pool: Pool, supply: ChunkJobs
    ) -> None:
        self._settings = settings
        self._registry = Registry()
        self._default = self._registry.parse(settings.algorithm)
        self._pool = pool
        self._supply = supply
        self._limits = limits
        self._block_size = limits.block_size
        self._links: dict[str, Link] = {}
        self._isolated: set[str] = set()
        self._pages = PageCache()
        self._reports: dict[str, PromptCost] = {}

    def admit(self, request: "Request") -> None:
        """Plan a new request and rewrite it into compute order; plain requests stay as they are.

        Raises ConfigError if its arguments are wrong, or if it can never fit the engine.
        """
        params = request.sampling_params
        if params is None or request.prompt_token_ids is None:
            return
        args = read_args(params.extra_args, len(request.prompt_token_ids), self._registry)
        if args is None:
            return
        algorithm = args.algorithm or self._default
        if algorithm.reuse is Reuse.CHUNKS and args.spans:
            self._plan(request, args, algorithm)
            return
        hash_prompt(request)
        if algorithm.reuse is Reuse.NOTHING:
            rewrite.isolate(request)
            self._isolated.add(request.request_id)

    def demand(self, request: "Request") -> int:
        """Blocks that a request will take from those that nobody references now."""
        link = self._links.get(request.request_id)
        if link is None:
            return -(-(request.num_prompt_tokens + request.max_tokens) // self._block_size)
        if link.copies:
            return link.need
        mapped = set(filter(None, link.plan.keys[: link.plan.shared]))
        return link.need - sum(map(self._pool.in_use, mapped))

    def prepare(self, waiting: "Iterable[Request]") -> None:
        """Before a step: send for the chunks that waiting requests need, in queue order."""
        self._supply.tidy()
        if not (self._links or self._supply.pins):
            return
        room = self._pool.usable
        queue = [r for r in waiting if not self.is_own(r)]
        if queue and self._supply.pins:
            self._supply.make_way(self.demand(queue[0]))
        for place, request in enumerate(queue):
            link = self._links.get(request.request_id)
            if link is None:
                continue
            room -= link.need
            if room < 0 and place:
                self._let_go(link)
                continue
            self._advance(request, link, head=place == 0)

    def ready(self, request: "Request") -> bool:
        """Whether a waiting request may be scheduled now: its canonical KV is there."""
        link = self._links.get(request.request_id)
        if link is None or request.num_computed_tokens:
            return True
        return all(self._there(c, link) for c in link.plan.canonicals)

    def verify(self, request: "Request", hit_tokens: int) -> None:
        """Raise EngineError if a request is about to compute canonical KV in its own context."""
        link = self._links.get(request.request_id)
        if link is not None and hit_tokens < link.plan.shared * self._block_size:
            raise EngineError(f"request {request.request_id} lost a chunk between lookup and use")

    def external(self, request: "Request", hit_tokens: int) -> tuple[int, bool]:
        """Tokens behind the hits whose KV comes from outside, and whether that takes steps."""
        job = self._supply.job_of(request.request_id)
        if job is not None:
            loaded = len(job.plan.tokens) - hit_tokens if job.fetches else 0
            return loaded, loaded > 0
        link = self._links.get(request.request_id)
        if link is None or not link.copies:
            return 0, False
        # The blocks that are copied must not be handed out as the ones that they are copied into.
        self._hold(link)
        remote = any(self._supply.stored(c.key) for c in link.plan.canonicals)
        return len(link.plan.copies) * self._block_size, remote

    def allocated(self, request: "Request", block_ids: tuple[int, ...], external: int) -> None:
        """Blocks were allocated for tokens that come from outside: order loads and copies."""
        if not external:
            return
        job = self._supply.job_of(request.request_id)
        if job is not None:
            resident = len(job.plan.keys) - external // self._block_size
            self._supply.load(job, block_ids, resident)
            return
        link = self._links[request.request_id]
        first = link.plan.shared
        self._fill(request, link, block_ids[first : first + len(link.plan.copies)])
        self._let_go(link)

    def place(self, request: "Request", hit_tokens: int) -> None:
        """After a step that scheduled a request: let its blocks go (it has its own references)."""
        job = self._supply.job_of(request.request_id)
        if job is not None:
            self._charge(job, hit_tokens)
        link = self._links.get(request.request_id)
        if link is None:
            return
        self._let_go(link)
        if not link.placed:
            link.placed = True
            self._supply.chunks.use(link.plan.canonicals)
            self._report(request, link, hit_tokens)

    def forget(self, request: "Request", block_ids: tuple[int, ...], *, done: bool) -> None:
        """A request ended, for whatever reason: drop all that is kept for it."""
        self._pool.forget(self._private(request, block_ids))
        self._isolated.discard(request.request_id)
        link = self._links.pop(request.request_id, None)
        if link is not None:
            self._let_go(link)
        job = self._supply.job_of(request.request_id)
        if job is not None:
            self._supply.end(job, block_ids, done=done)

    def heard(self, reports: TransferResults) -> None:
        """Take over what the tiers answered; count what they loaded for whom."""
        self._supply.heard(reports)
        for request_id, served in reports.served.items():
            job = self._supply.job_of(request_id)
            link = self._links.get(job.owner if job else request_id)
            if link is not None:
                link.count(served)

    def preempted(self, request: "Request", block_ids: tuple[int, ...]) -> None:
        """A request is about to lose its blocks: nobody else could ever find its own ones."""
        self._pool.forget(self._private(request, block_ids))

    def orphans(self) -> list[str]:
        """Ids of the linker's own requests that nobody waits for any more."""
        wanted = {c.key for link in self._links.values() for c in link.plan.canonicals}
        return self._supply.orphans(wanted)

    def is_own(self, request: "Request") -> bool:
        """Whether a request is one of the linker's own."""
        return self._supply.job_of(request.request_id) is not None

    def plan_of(self, request_id: str) -> Plan | None:
        """The plan that a request follows, its own or that of a job."""
        following = self._links.get(request_id) or self._supply.job_of(request_id)
        return following.plan if following else None

    def held(self) -> "list[KVCacheBlock]":
        """Blocks that waiting requests hold until the others are there, and pinned ones."""
        waiting = [block for link in self._links.values() for block in link.held.values()]
        return waiting + self._supply.pinned()

    def take_report(self, tag: str) -> PromptCost | None:
        """What the request with this tag cost; None for a plain request. Each can be taken once."""
        return self._reports.pop(tag, None)

    @property
    def idle(self) -> bool:
        """Whether nothing is planned, held or on its way."""
        return not self._links and self._supply.idle

    def _plan(self, request: "Request", args: RequestArgs, algorithm: Algorithm) -> None:
        assert request.prompt_token_ids is not None
        if request.skip_reading_prefix_cache:
            raise ConfigError(
                "a request with chunks cannot skip the cache",
                hint="leave prompt_logprobs and skip_reading_prefix_cache off",
            )
        pieces = cut(request.prompt_token_ids, args.spans)
        layout = self._settings.layout(algorithm, request.cache_salt, self._block_size)
        keys = hash_lead(request, args.spans[0][0])
        try:
            plan = lay_out(
                pieces, algorithm.plan_chunk, layout, prefix_keys=keys, cache=self._pages
            )
        except ValueError as error:
            raise ConfigError(f"{algorithm.spec}: {error}", hint="use another algorithm") from error
        compiles = [len(c.anchor_pages) + len(c.pages) - len(c.used) for c in plan.canonicals]
        spare = max(compiles, default=0) + len(plan.copies)
        need = self._limits.check(Footprint(len(plan.tokens), spare), request.max_tokens)
        rewrite.follow(request, plan)
        self._links[request.request_id] = Link(plan, need, args.tag)
        self._supply.ask(plan.canonicals)

    def _there(self, canonical: Canonical, link: Link) -> bool:
        if link.copies:
            return self._supply.copyable(canonical) or self._supply.stored(canonical.key)
        return self._supply.mappable(canonical)

    def _advance(self, request: "Request", link: Link, *, head: bool) -> None:
        missing = [c for c in link.plan.canonicals if not self._there(c, link)]
        for canonical in missing:
            self._supply.provide(canonical, request, head=head, shared=not link.copies)
        if head and missing:
            self._hold(link)
        else:
            self._let_go(link)

    def _hold(self, link: Link) -> None:
        wanted = [
            c for c in link.plan.canonicals if not (link.copies and self._supply.stored(c.key))
        ]
        for key in (key for canonical in wanted for key in canonical.keys):
            if key not in link.held and (block := self._pool.hold(key)):
                link.held[key] = block

    def _let_go(self, link: Link) -> None:
        self._pool.release(list(link.held.values()))
        link.held.clear()

    def _fill(self, request: "Request", link: Link, blocks: tuple[int, ...]) -> None:
        """Order what fills a request's own blocks: copies of pool blocks, or loads."""
        target = dict[Key, list[int]]()
        for name, block in zip(link.plan.copies, blocks, strict=True):
            target.setdefault(name, []).append(block)
        parts: list[LoadedChunk] = []
        for canonical in link.plan.canonicals:
            into = [(i, b) for i in canonical.used for b in target.pop(canonical.pages[i].name, ())]
            if not self._supply.stored(canonical.key):
                source = {i: self._pool.block_id(canonical.pages[i].name) for i in canonical.used}
                self._supply.orders.copies += [CopyCommand(source[i], block) for i, block in into]
            elif into:
                pages, ids = zip(*into, strict=True)
                parts.append(LoadedChunk(canonical.key, len(canonical.pages), pages, ids))
        if parts:
            self._supply.orders.loads.append(LoadCommand(request.request_id, tuple(parts)))

    def _private(self, request: "Request", block_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Those of a request's blocks that no other request could ever find.

        Behind copies nothing can be found: a lookup ends at the first block without a name.
        """
        if request.request_id in self._isolated:
            return block_ids
        link = self._links.get(request.request_id)
        return block_ids[link.plan.shared :] if link and link.copies else ()

    def _charge(self, job: ChunkJob, hit_tokens: int) -> None:
        """Charge a compile to the request that asked first."""
        owner = self._links.get(job.owner)
        if owner is not None and not owner.placed:
            fresh = job.plan.pages_from(hit_tokens // self._block_size)
            owner.compiled += sum(page.real for page in fresh)

    def _report(self, request: "Request", link: Link, hit_tokens: int) -> None:
        plan, hits = link.plan, hit_tokens // self._block_size
        fresh = plan.pages_from(hits)
        reused = plan.real - sum(page.real for page in fresh)
        tokens = TokenCounts(
            prompt=plan.prompt_tokens,
            reused=reused,
            compiled=link.compiled,
            linked=sum(page.kinds.count(SlotKind.LINKED) for page in fresh),
            padded=plan.count(SlotKind.PAD),
        )
        rewrite.correct_stats(request, plan, reused)
        if link.tag is not None:
            found = Hits(plan.shared, hits - plan.canonical, len(plan.copies), dict(link.served))
            self._reports[link.tag] = PromptCost(tokens, found)

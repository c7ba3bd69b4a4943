"""Compile and link: plans for requests, canonical KV for chunks, and who waits for whom.

A request with chunks is planned on arrival. While canonical KV that it needs is missing, the
linker has it compiled by requests of its own, which stand in the queue right ahead of the first
request that needs them and serve everybody who waits. The waiting request is passed over, not
blocked on, and links in the very step that schedules the last of its compiles.

Progress under pressure: the request at the head of the queue holds references to the chunks that
are already there, so that they cannot be evicted while the rest is compiled; nobody else does.
Compiles are only started while the requests ahead, together, fit the pool.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from picbench.engines.algorithms import Algorithm, Registry, Reuse
from picbench.engines.keys import Key
from picbench.engines.layout import Footprint, lay_out
from picbench.engines.plan import Canonical, Plan, Slot
from picbench.engines.request import Hits, Tokens
from picbench.engines.vllm import rewrite
from picbench.engines.vllm.admission import Limits
from picbench.engines.vllm.pool import Pool
from picbench.engines.vllm.settings import PicSettings
from picbench.engines.vllm.wire import PicArgs, cut, read_args
from picbench.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

#: Puts a compile request into the engine's queue, ahead of a waiting request.
Submit = Callable[["Request", "Request"], None]


@dataclass(slots=True)
class Link:
    """A planned request: its plan, what it holds while it waits, and what became of it."""

    plan: Plan
    need: int
    tag: str | None
    held: "dict[Key, KVCacheBlock]" = field(default_factory=dict)
    compiled: int = 0
    placed: bool = False


@dataclass(slots=True)
class Compile:
    """A canonical object being computed: by which request, for whom, and ahead of whom it stands.

    `owner` asked first and is charged; `ahead_of` is the first in the queue that needs it.
    """

    key: Key
    request: "Request"
    plan: Plan
    owner: str
    ahead_of: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a request's prompt cost, once it was first scheduled."""

    tokens: Tokens
    hits: Hits


class Linker:
    """Plans requests and has missing chunks compiled; one belongs to each scheduler."""

    def __init__(self, settings: PicSettings, limits: Limits, pool: Pool, submit: Submit) -> None:
        self._settings = settings
        self._registry = Registry()
        self._default = self._registry.parse(settings.algorithm)
        self._pool = pool
        self._submit = submit
        self._limits = limits
        self._block_size = limits.block_size
        self._links: dict[str, Link] = {}
        self._compiles: dict[Key, Compile] = {}
        self._compilers: dict[str, Compile] = {}
        self._numbers = count()
        self._reports: dict[str, Report] = {}

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
        if algorithm.reuse is Reuse.NOTHING:
            rewrite.isolate(request)
        elif algorithm.reuse is Reuse.CHUNKS and args.spans:
            self._plan(request, args, algorithm)

    def prepare(self, waiting: "Iterable[Request]") -> None:
        """Before a step: start the compiles that waiting requests need, in queue order."""
        if not self._links:
            return
        room = self._pool.usable
        queue = [r for r in waiting if not self.is_compile(r)]
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
        """Whether a waiting request may be scheduled now: all of its canonical KV is resident."""
        link = self._links.get(request.request_id)
        return link is None or link.plan.linkable(self._pool.resident)

    def verify(self, request: "Request", hit_tokens: int) -> None:
        """Raise EngineError if a request is about to compute canonical KV in its own context."""
        link = self._links.get(request.request_id)
        if link is not None and hit_tokens < link.plan.shared * self._block_size:
            raise EngineError(f"request {request.request_id} lost a chunk between lookup and use")

    def place(self, request: "Request", hit_tokens: int) -> None:
        """After a step that scheduled a request: let its blocks go (it has its own references)."""
        compiling = self._compilers.get(request.request_id)
        if compiling is not None:
            self._charge(compiling, hit_tokens)
        link = self._links.get(request.request_id)
        if link is None:
            return
        self._let_go(link)
        if not link.placed:
            link.placed = True
            self._report(request, link, hit_tokens)

    def forget(self, request: "Request") -> None:
        """A request ended, for whatever reason: drop all that is kept for it."""
        link = self._links.pop(request.request_id, None)
        if link is not None:
            self._let_go(link)
        compiling = self._compilers.pop(request.request_id, None)
        if compiling is not None:
            del self._compiles[compiling.key]

    def orphans(self) -> list[str]:
        """Ids of compile requests that nobody waits for any more."""
        wanted = {c.key for link in self._links.values() for c in link.plan.canonicals}
        return [c.request.request_id for key, c in self._compiles.items() if key not in wanted]

    def is_compile(self, request: "Request") -> bool:
        """Whether a request is one of the linker's own."""
        return request.request_id in self._compilers

    def plan_of(self, request_id: str) -> Plan | None:
        """The plan that a request follows, its own or that of a compile."""
        following = self._links.get(request_id) or self._compilers.get(request_id)
        return following.plan if following else None

    def held(self) -> "list[KVCacheBlock]":
        """Blocks that a waiting request holds, so that they are there when its compiles are."""
        return [block for link in self._links.values() for block in link.held.values()]

    def take_report(self, tag: str) -> Report | None:
        """What the request with this tag cost; None for a plain request. Each can be taken once."""
        return self._reports.pop(tag, None)

    @property
    def idle(self) -> bool:
        """Whether nothing is planned, held or compiled."""
        return not self._links and not self._compiles

    def _plan(self, request: "Request", args: PicArgs, algorithm: Algorithm) -> None:
        assert request.prompt_token_ids is not None
        if request.skip_reading_prefix_cache:
            raise ConfigError(
                "a request with chunks cannot skip the cache",
                hint="leave prompt_logprobs and skip_reading_prefix_cache off",
            )
        pieces = cut(request.prompt_token_ids, args.spans)
        layout = self._settings.layout(algorithm, request.cache_salt, self._block_size)
        keys = list(request.block_hashes)
        try:
            plan = lay_out(pieces, algorithm.treat, layout, prefix_keys=keys)
        except ValueError as error:
            raise ConfigError(f"{algorithm.spec}: {error}", hint="use another algorithm") from error
        compiles = [len(c.anchor_pages) + len(c.pages) - len(c.used) for c in plan.canonicals]
        footprint = Footprint(len(plan.tokens), max(compiles, default=0))
        need = self._limits.check(footprint, request.max_tokens)
        rewrite.follow(request, plan)
        self._links[request.request_id] = Link(plan, need, args.tag)

    def _advance(self, request: "Request", link: Link, *, head: bool) -> None:
        for canonical in link.plan.missing(self._pool.resident):
            compiling = self._compiles.get(canonical.key)
            if compiling is None:
                self._start(canonical, request)
            elif head and compiling.ahead_of != request.request_id:
                compiling.ahead_of = request.request_id
                self._submit(compiling.request, request)
        if head:
            self._hold(link)
        else:
            self._let_go(link)

    def _start(self, canonical: Canonical, parent: "Request") -> None:
        plan = canonical.compile_plan()
        request = rewrite.compile_request(f"pic-compile-{next(self._numbers)}", plan, parent)
        asker = parent.request_id
        compiling = Compile(canonical.key, request, plan, owner=asker, ahead_of=asker)
        self._compiles[canonical.key] = self._compilers[request.request_id] = compiling
        self._submit(request, parent)

    def _hold(self, link: Link) -> None:
        for key in (key for canonical in link.plan.canonicals for key in canonical.keys):
            if key not in link.held and (block := self._pool.hold(key)):
                link.held[key] = block

    def _let_go(self, link: Link) -> None:
        self._pool.release(list(link.held.values()))
        link.held.clear()

    def _charge(self, compiling: Compile, hit_tokens: int) -> None:
        """Charge a compile to the request that asked first."""
        owner = self._links.get(compiling.owner)
        if owner is not None and not owner.placed:
            fresh = compiling.plan.pages[hit_tokens // self._block_size :]
            owner.compiled += sum(page.real for page in fresh)

    def _report(self, request: "Request", link: Link, hit_tokens: int) -> None:
        plan, hits = link.plan, hit_tokens // self._block_size
        mapped = plan.pages[:hits]
        computed = plan.pages[hits:]
        reused = sum(page.real for page in mapped)
        tokens = Tokens(
            prompt=plan.prompt_tokens,
            reused=reused,
            compiled=link.compiled,
            linked=sum(page.kinds.count(Slot.LINKED) for page in computed),
            padded=plan.count(Slot.PAD),
        )
        rewrite.correct_stats(request, plan, reused)
        if link.tag is not None:
            self._reports[link.tag] = Report(tokens, Hits(plan.shared, hits - plan.shared))

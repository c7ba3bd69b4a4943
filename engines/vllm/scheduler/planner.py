"""Plans of requests, made before the scheduler gets them where that is possible.

An engine core in a process of its own has a thread that receives requests
(`engines/vllm/frontend/engine_core.py`). Planned there, a prompt of many chunks costs no step
its milliseconds: the thread runs while steps wait for the device.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from msgspec.msgpack import Encoder

from picbench.engines.algorithms import Algorithm, Auto, Registry, Reuse
from picbench.engines.planning.chunk_pages import ChunkPages, PageCache
from picbench.engines.planning.keys import Key
from picbench.engines.planning.layout import Footprint, lay_out
from picbench.engines.planning.plan import Plan
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.engines.request import Choice
from picbench.engines.vllm.frontend.engine_core import hash_lead, hash_prompt
from picbench.engines.vllm.frontend.limits import Limits
from picbench.engines.vllm.frontend.request_args import RequestArgs, cut, request_args
from picbench.engines.vllm.scheduler.chooser import Chooser, names_of
from picbench.engines.vllm.scheduler.pool import Pool
from picbench.engines.vllm.settings import PicSettings
from picbench.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.request import Request


#: Tokens of chunks whose pages are kept, of 200 bytes each: twice the pool's, and at most these.
_MOST_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A request's plan, the KV blocks that it can occupy, its tag, and the `keys` of its chunks.

    Where it was chosen that all its chunks are served as text it is a plain request, without plan.
    """

    plan: Plan | None
    need: int
    tag: str | None
    choice: Choice | None = None
    keys: tuple[Key, ...] = ()


class _NotedPages(PageCache):
    """Pages of chunks, and the `keys` of those chunks that were looked up since `begin`."""

    def begin(self) -> "_NotedPages":
        """Forget the keys."""
        self.keys: list[Key] = []
        return self

    def find(self, *given: Any) -> ChunkPages:
        """As in every cache of pages."""
        found = super().find(*given)
        self.keys.append(found.pages[-1].name)
        return found


class RequestPlanner:
    """Plans the requests of one scheduler; any thread may call it."""

    def __init__(
        self,
        settings: PicSettings,
        limits: Limits,
        chooser: Chooser | None = None,
        pool: Pool | None = None,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._chooser, self._pool = chooser, pool
        self._registry = Registry()
        tokens = min(_MOST_TOKENS, 2 * limits.blocks * limits.block_size)
        self._pages = _NotedPages(tokens, name=Encoder().encode)
        self._lock = Lock()
        #: Whether requests are served as chunks or text, whichever is expected to be sooner.
        self.chooses = isinstance(self._registry.parse(settings.algorithm), Auto)
        # Weak, because not every request that is received gets to the scheduler.
        self._early: WeakKeyDictionary[Request, PlannedPrompt] = WeakKeyDictionary()

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self._limits.block_size

    def read(self, request: "Request") -> "tuple[RequestArgs, Algorithm] | None":
        """A request's arguments and algorithm, if it has any. Raises ConfigError for wrong ones."""
        args = request_args(request, self._registry)
        if args is None:
            return None
        return args, self._registry.parse(args.algorithm or self._settings.algorithm)

    def plan_early(self, request: "Request") -> None:
        """Plan a request that the scheduler is going to get; it is told then what is wrong."""
        with suppress(Exception):
            found = self.read(request)
            if found is not None and has_plan(*found):
                self._early[request] = self._plan(request, *found)

    def plan(self, request: "Request", args: RequestArgs, algorithm: Algorithm) -> PlannedPrompt:
        """The plan of a request with chunks. Raises ConfigError if it can never be served."""
        return self._early.pop(request, None) or self._plan(request, args, algorithm)

    def _plan(self, request: "Request", args: RequestArgs, algorithm: Algorithm) -> PlannedPrompt:
        assert request.prompt_token_ids is not None
        if request.skip_reading_prefix_cache:
            raise ConfigError(
                "a request with chunks cannot skip the cache",
                hint="leave prompt_logprobs and skip_reading_prefix_cache off",
            )
        layout = self._settings.layout(algorithm, request.cache_salt, self._limits.block_size)
        segments = cut(request.prompt_token_ids, args, layout.pad_token)
        lead, choice = args.spans[0][0], None
        try:
            with self._lock:
                scope, plan = layout.scope, None
                if isinstance(algorithm, Auto):
                    self.chooses, (hit, hashed) = True, self._text_hit(request)
                    names = names_of(segments, scope)
                    if self._chooser and not (args.positions or args.slots):
                        choice = self._chooser.without_plan(segments, names, hit)
                    if choice is None:
                        plan = self._lay_out(request, segments, algorithm, layout, lead)
                        choice = self._choose(args, segments, names, plan, hit)
                elif self.chooses and self._chooser:
                    self._chooser.note(segments, scope)
                if choice and len(choice.texts) == choice.chunks:
                    hash_prompt(request, hashed)
                    return PlannedPrompt(None, 0, args.tag, choice)
                if choice and choice.texts:
                    lead = next(s for i, (s, _) in enumerate(args.spans) if i not in choice.texts)
                    mixed = _with_texts(segments, choice.texts)
                    plan = self._lay_out(request, mixed, algorithm, layout, lead)
                if plan is None:
                    plan = self._lay_out(request, segments, algorithm, layout, lead)
                keys = tuple(self._pages.keys)
        except ValueError as error:
            raise ConfigError(f"{algorithm.spec}: {error}", hint="use another algorithm") from error
        need = self._limits.check(Footprint.of(plan), request.max_tokens)
        return PlannedPrompt(plan, need, args.tag, choice, keys)

    def _lay_out(
        self,
        request: "Request",
        segments: Sequence[Segment],
        algorithm: Algorithm,
        layout: LayoutConfig,
        lead: int,
    ) -> Plan:
        """The plan of segments, the first `lead` tokens of which are before any chunk."""
        keys, arranged = hash_lead(request, lead), algorithm.arrange(segments, layout)
        pages = self._pages.begin()
        return lay_out(arranged, algorithm.plan_chunk, layout, prefix_keys=keys, cache=pages)

    def _choose(
        self,
        args: RequestArgs,
        segments: Sequence[Segment],
        names: Sequence[Key],
        plan: Plan,
        hit: int,
    ) -> Choice:
        """How a request is served; what only makes sense in chunks is served as chunks."""
        keys = self._pages.keys
        if self._chooser is None or args.positions or args.slots or len(keys) != len(args.spans):
            return Choice(len(args.spans))
        return self._chooser.choose(segments, names, keys, plan, hit)

    def _text_hit(self, request: "Request") -> tuple[int, list[Key]]:
        """Tokens that prefix caching finds of a prompt as text, hashed no further than about that,
        and the hashes.

        The prompt's last token is always computed.
        """
        if self._pool is None:
            return 0, []
        size, most = self.block_size, len(request.prompt_token_ids or ()) - 1
        tokens, keys = size, list[Key]()
        found = tokens
        while found == tokens and tokens <= most:
            tokens *= 4
            keys = hash_lead(request, min(tokens, most), keys)
            found = size * len(self._pool.find_first(keys))
        return min(found, most) // size * size, keys


def _with_texts(segments: Sequence[Segment], texts: Collection[int]) -> list[Segment]:
    """The segments, of whose chunks those with the numbers `texts` are texts."""
    found, number = list[Segment](), -1
    for segment in segments:
        number += segment.chunk
        if segment.chunk and number in texts:
            segment = Segment(segment.tokens)
        if found and not (segment.chunk or found[-1].chunk):
            # Algorithms get neighbouring texts as one.
            segment = Segment(found.pop().tokens + segment.tokens)
        found.append(segment)
    return found


def has_plan(args: RequestArgs, algorithm: Algorithm) -> bool:
    """Whether a request is planned: it has chunks, and its algorithm reuses them."""
    return algorithm.reuse is Reuse.CHUNKS and bool(args.spans)

"""Plans of requests, made before the scheduler gets them where that is possible.

An engine core in a process of its own has a thread that receives requests
(`engines/vllm/frontend/engine_core.py`). Planned there, a prompt of many chunks costs no step
its milliseconds: the thread runs while steps wait for the device.
"""

from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from msgspec.msgpack import Encoder

from picbench.engines.algorithms import Algorithm, Registry, Reuse
from picbench.engines.planning.chunk_pages import PageCache
from picbench.engines.planning.layout import Footprint, lay_out
from picbench.engines.planning.plan import Plan
from picbench.engines.vllm.frontend.engine_core import hash_lead
from picbench.engines.vllm.frontend.limits import Limits
from picbench.engines.vllm.frontend.request_args import RequestArgs, cut, request_args
from picbench.engines.vllm.settings import PicSettings
from picbench.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.request import Request


#: Tokens of chunks whose pages are kept, of 200 bytes each: twice the pool's, and at most these.
_MOST_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A request's plan, the KV blocks that it can occupy, and its tag."""

    plan: Plan
    need: int
    tag: str | None


class RequestPlanner:
    """Plans the requests of one scheduler; any thread may call it."""

    def __init__(self, settings: PicSettings, limits: Limits) -> None:
        self._settings = settings
        self._limits = limits
        self._registry = Registry()
        tokens = min(_MOST_TOKENS, 2 * limits.blocks * limits.block_size)
        self._pages = PageCache(tokens, name=Encoder().encode)
        self._lock = Lock()
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
        keys = hash_lead(request, args.spans[0][0])
        try:
            segments = list(algorithm.arrange(segments, layout))
            with self._lock:
                plan = lay_out(
                    segments, algorithm.plan_chunk, layout, prefix_keys=keys, cache=self._pages
                )
        except ValueError as error:
            raise ConfigError(f"{algorithm.spec}: {error}", hint="use another algorithm") from error
        need = self._limits.check(Footprint.of(plan), request.max_tokens)
        return PlannedPrompt(plan, need, args.tag)


def has_plan(args: RequestArgs, algorithm: Algorithm) -> bool:
    """Whether a request is planned: it has chunks, and its algorithm reuses them."""
    return algorithm.reuse is Reuse.CHUNKS and bool(args.spans)

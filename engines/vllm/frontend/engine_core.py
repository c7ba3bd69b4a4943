"""What engine cores do with requests before the scheduler: deferred hashing, early planning.

vLLM hashes every full block of a prompt on arrival. A request whose chunks are linked has block
keys of its own and needs vLLM's only for the text before its first chunk. For a prompt of 32k
tokens that saves hashing two thousand blocks, a fifth of the host's time to the first token.

Upstream: vllm/v1/engine/core.py of vLLM 0.32.0. `EngineCore.__init__` gets the hasher that
`Request.__init__` calls from `get_request_block_hasher` (vllm/v1/core/kv_cache_utils.py).
`EngineCore.preprocess_add_request` makes a `Request` of what was received, in the thread that
receives it while steps run in another (`EngineCoreProc.process_input_sockets`), or right before it
is added where the engine core is in the caller's process.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from picbench.engines.planning.keys import Key
from picbench.engines.vllm.compat import extend
from picbench.engines.vllm.frontend.request_args import describes_chunks

if TYPE_CHECKING:
    from vllm.v1.request import Request


#: From a request to the keys of its full blocks that have none yet.
Hasher = Callable[[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class DeferredHasher:
    """vLLM's hasher, which skips requests with chunks until `hash_prompt` or `hash_lead`."""

    stock: Hasher

    def __call__(self, request: "Request") -> list[Any]:
        """The keys of a request's new blocks; none for a request with chunks."""
        params = request.sampling_params
        if params is not None and describes_chunks(params.extra_args):
            return []
        return self.stock(request)


def defer_hashing() -> None:
    """Have engine cores use `DeferredHasher`. Raises ConfigError if the upstream one differs."""

    def deferred(upstream: Callable[..., Hasher], *args: Any, **kwargs: Any) -> DeferredHasher:
        return DeferredHasher(upstream(*args, **kwargs))

    core, taken = import_module("vllm.v1.engine.core"), "hash_block_size, caching_hash_fn"
    more = f"{taken}, num_hash_lookahead_tokens"
    extend(core, "get_request_block_hasher", deferred, taken, more)


def hash_prompt(request: "Request", known: Sequence[Key] = ()) -> None:
    """Hash a request's prompt now, and its further blocks as they fill; some of it is `known`."""
    hasher = request._block_hasher
    if isinstance(hasher, DeferredHasher):
        request._block_hasher = hasher.stock
        request.block_hashes = list(known)  # type: ignore[arg-type]
        request.update_block_hashes()


def hash_lead(request: "Request", tokens: int, known: Sequence[Key] = ()) -> list[Key]:
    """vLLM's keys of the full blocks in the prompt's first `tokens`, the first of them `known`."""
    from vllm.v1.utils import ConstantList

    lead = copy.copy(request)
    lead._all_token_ids = request._all_token_ids[:tokens]
    lead.all_token_ids = ConstantList(lead._all_token_ids)
    lead.block_hashes = list(known)  # type: ignore[arg-type]
    hasher = request._block_hasher
    stock = hasher.stock if isinstance(hasher, DeferredHasher) else hasher
    return [*known, *stock(lead)] if stock is not None else []


def _let_wake(core: Any) -> None:
    """Let what other engines erased wake an idle core; in the caller's process none waits."""
    from vllm.v1.engine import EngineCoreRequestType

    erasures, queue = getattr(core.scheduler, "erasures", None), getattr(core, "input_queue", None)
    if erasures is not None and queue is not None:
        wake = EngineCoreRequestType.WAKEUP, None
        erasures.wake = lambda: queue.put_nowait(wake)


def plan_on_receipt() -> None:
    """Have engine cores plan on receipt, and answer the cache API (`pic_cache`).

    Raises ConfigError if the upstream method differs.
    """
    from vllm.v1.engine.core import EngineCore

    def receive(upstream: Callable[..., Any], self: Any, request: Any) -> Any:
        received = upstream(self, request)
        _let_wake(self)
        plan_early = getattr(self.scheduler, "plan_early", None)
        if plan_early is not None:
            plan_early(received[0])
        return received

    def pic_cache(self: Any, erased: str | None = None) -> Any:
        _let_wake(self)
        erasures = self.scheduler.erasures
        return erasures.chunks() if erased is None else erasures.erase(erased)

    extend(EngineCore, "preprocess_add_request", receive, "self, request")
    EngineCore.pic_cache = pic_cache  # type: ignore[attr-defined]

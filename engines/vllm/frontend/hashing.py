"""Hashing no more of a prompt than anybody looks up.

vLLM hashes every full block of a prompt as it comes in. A request whose chunks are linked gets keys
of its own, and of vLLM's only those of the text before the first chunk: of a prompt of 32k tokens
that saves hashing two thousand blocks, a fifth of the host's time until the first token.

Upstream: vllm/v1/engine/core.py of vLLM 0.32.0, `EngineCore.__init__`, where `get_request_block_
hasher` (vllm/v1/core/kv_cache_utils.py) makes what `Request.__init__` calls.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

from picbench.engines.planning.keys import Key
from picbench.engines.vllm.compat import check_signature
from picbench.engines.vllm.frontend.request_args import describes_chunks

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Keys of the blocks that a request has filled since it was last asked.
Hasher = Callable[[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class DeferredHasher:
    """vLLM's hasher, but for requests that describe chunks: these are not hashed unasked."""

    stock: Hasher

    def __call__(self, request: "Request") -> list[Any]:
        """The keys of a request's new blocks; none of a request with chunks."""
        params = request.sampling_params
        if params is not None and describes_chunks(params.extra_args):
            return []
        return self.stock(request)


def postpone() -> None:
    """Have engine cores of this process make `DeferredHasher` hashers; raises for another vLLM."""
    core: Any = import_module("vllm.v1.engine.core")
    upstream = core.get_request_block_hasher
    if getattr(upstream, "postpones", False):
        return
    check_signature(upstream, ("hash_block_size", "caching_hash_fn"))

    @wraps(upstream)
    def get_request_block_hasher(*args: Any, **kwargs: Any) -> DeferredHasher:
        return DeferredHasher(upstream(*args, **kwargs))

    get_request_block_hasher.postpones = True  # type: ignore[attr-defined]
    core.get_request_block_hasher = get_request_block_hasher


def hash_prompt(request: "Request") -> None:
    """Hash what was postponed, and what the request computes from now on."""
    hasher = request._block_hasher
    if isinstance(hasher, DeferredHasher):
        request._block_hasher = hasher.stock
        request.update_block_hashes()


def hash_lead(request: "Request", tokens: int) -> list[Key]:
    """vLLM's keys of the full blocks among the prompt's first tokens."""
    from vllm.v1.utils import ConstantList

    lead = copy.copy(request)
    lead._all_token_ids = request._all_token_ids[:tokens]
    lead.all_token_ids = ConstantList(lead._all_token_ids)
    lead.block_hashes = []
    hasher = request._block_hasher
    stock = hasher.stock if isinstance(hasher, DeferredHasher) else hasher
    return list(stock(lead)) if stock is not None else []

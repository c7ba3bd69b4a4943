"""Rewrites a vLLM request into a planned one.

vLLM treats a request as a list of tokens whose computed part is a prefix. In compute order that is
true of a plan, so scheduler, allocator, chunked prefill, slot mapping and sampling stay as they
are. Only the request's tokens and block hashes are replaced, and a `SlotMap` is sent with it.
"""

import copy
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from picbench.engines.planning.pages import TokenIds
from picbench.engines.planning.plan import Plan
from picbench.engines.request import TokenCounts
from picbench.engines.vllm.worker.slot_map import SLOT_MAP, SlotMap

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

    Hasher = Callable[[Request], list[BlockHash]]


def apply_plan(request: "Request", plan: Plan) -> None:
    """Replace a request's prompt by a plan's slots.

    Lists that the frontend may share are replaced, not edited, so that the user's output shows the
    prompt as it was sent. What takes their place is an array: vLLM reads and extends both alike.
    """
    from vllm.v1.utils import ConstantList

    tokens: Any = plan.tokens
    request.prompt_token_ids = tokens
    request.num_prompt_tokens = len(tokens)
    every: Any = TokenIds(tokens)
    request._all_token_ids, request.all_token_ids = every, ConstantList(every)
    request.block_hashes.clear()
    request._block_hasher = _hasher(plan)
    request.update_block_hashes()
    # Callers may share one SamplingParams between requests, hence the copy.
    params: Any = copy.copy(request.sampling_params)
    params.extra_args = {**(params.extra_args or {}), SLOT_MAP: SlotMap.of(plan)}
    request.sampling_params = params


def isolate(request: "Request") -> None:
    """Make a request's KV private: it reads nothing from the cache and leaves nothing in it."""
    request.skip_reading_prefix_cache = True
    stock = request._block_hasher
    if stock is not None:
        request.block_hashes[:] = [_private() for _ in request.block_hashes]
        request._block_hasher = lambda r: [_private() for _ in stock(r)]


def chunk_request(request_id: str, plan: Plan, parent: "Request") -> "Request":
    """The request that computes or fetches a chunk on behalf of `parent`.

    It samples one token, which is dropped, because vLLM has no request that samples none.
    """
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    request = Request(
        request_id=request_id,
        prompt_token_ids=[0],
        sampling_params=params,
        pooling_params=None,
        client_index=parent.client_index,
        arrival_time=parent.arrival_time,
        cache_salt=parent.cache_salt,
    )
    apply_plan(request, plan)
    return request


def correct_stats(request: "Request", counts: TokenCounts) -> None:
    """Set prompt and cached tokens to the user's counts; what was compiled counts as computed."""
    if request.prefill_stats is not None:
        loaded = sum(counts.loaded.values())
        request.prefill_stats.set(
            num_prompt_tokens=counts.prompt,
            num_local_cached_tokens=(counts.reused or 0) - loaded,
            num_external_cached_tokens=loaded,
        )


def _hasher(plan: Plan) -> "Hasher":
    # What follows copies is computed over blocks that a copy may fail to fill, and no request with
    # copies finds anything there (`Linker._private`): so no other request does either.
    found = plan.keys[: plan.shared] if plan.copies else plan.keys
    planned = [key or _private() for key in found]
    planned += [_private() for _ in range(len(plan.keys) - len(found))]
    size = plan.block_size
    full = plan.filled
    alone = plan.picks is not None or bool(plan.copies)

    def hash_new_blocks(request: "Request") -> Any:
        known, tokens = request.block_hashes, request._all_token_ids
        # Called for every token, of which fifteen in sixteen do not fill a block.
        if len(known) >= full and (len(known) + 1) * size > len(tokens):
            return []
        fresh = planned[len(known) : full]
        if alone:
            return fresh + [_private() for _ in range(max(len(known), full), len(tokens) // size)]
        return fresh + plan.generated_keys(tokens, [*known, *fresh])

    return hash_new_blocks


def _private() -> "BlockHash":
    from vllm.v1.core.kv_cache_utils import BlockHash

    return BlockHash(secrets.token_bytes(32))

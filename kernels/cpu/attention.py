"""Attention on CPU over paged keys that are cached without RoPE: `store` writes, `attend` reads.

Keys are cached without RoPE, so that a block serves every request at any position of its prompt,
and are rotated by their logical positions when they are read. Blocks whose tokens have one position
only (a plain request's) may be cached with RoPE and are then read without a copy
(`AttentionBatch.build(rotated=...)`).

A request's rotated keys are kept in the batch's workspace while one layer runs, and overwritten by
the next request and the next layer; those of requests that decode stay in copies of their own, if
there is room (`copies`).
"""

from torch import Tensor

from picbench.kernels.cpu import vllm_ops
from picbench.kernels.cpu.batch import AttentionBatch
from picbench.kernels.paging import BLOCK_SIZE, split


def store(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes `key` and `value`, both [tokens, num_kv_heads, head_size], to their cache slots.

    `slot_mapping` [n <= tokens] holds flat slots (block * 16 + offset); tokens with a negative slot
    and tokens after the n-th are skipped. `kv_cache` is a layer's cache as `paging` describes it.
    Slots must be distinct.
    """
    count = len(slot_mapping)
    key, value = key[:count], value[:count]
    if vllm_ops.covers(key.shape[-1], key.dtype):
        vllm_ops.pack(key, value, kv_cache, slot_mapping)
        return
    key_cache, value_cache = split(kv_cache)
    keep = slot_mapping >= 0
    block, offset = slot_mapping[keep] // BLOCK_SIZE, slot_mapping[keep] % BLOCK_SIZE
    key_cache[block, :, offset] = key[keep]
    value_cache[block, :, offset] = value[keep]


def attend(
    query: Tensor, kv_cache: Tensor, batch: AttentionBatch, scale: float, out: Tensor
) -> Tensor:
    """Attention of `query` [tokens, num_heads, head_size] over the cache, into `out`.

    Queries are already rotated by their logical positions; keys are rotated here. All keys of the
    step must have been stored. `out` is contiguous, has the shape of `query` and is returned;
    tokens after the last request are not written. A query that sees nothing gets zeros. Slots that
    no query sees may hold anything, NaN included, but for the unused end of the last block of
    requests that are read in place, where vLLM's kernel needs finite values.
    """
    for call in batch.calls:
        call.run(query, kv_cache, batch.workspace, scale, out)
    return out

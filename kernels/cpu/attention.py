"""Attention on CPU over paged keys that are cached without RoPE: `store` writes, `attend` reads.

Keys are cached without RoPE, so that a block serves every request at any position of its prompt,
and are rotated by their logical positions when they are read. Blocks whose tokens have one position
only (a plain request's) may be cached with RoPE and are then read without a copy
(`AttentionBatch.build(rotated=...)`).

A request's rotated keys are kept in the batch's workspace while one layer runs, and overwritten by
the next request and the next layer; those of requests that decode stay in copies of their own, if
there is room (`copies`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from torch import Tensor

from picbench.kernels.cpu import gather as gathering
from picbench.kernels.cpu import vllm_ops
from picbench.kernels.cpu.copies import CopyUpdate, KvCopies
from picbench.kernels.cpu.gather import Gather, PagedRequest
from picbench.kernels.cpu.kernel_calls import (
    CopiedCall,
    DenseCall,
    GatheredCall,
    InPlaceCall,
    KernelCall,
)
from picbench.kernels.cpu.scratch import Workspace
from picbench.kernels.paging import BLOCK_SIZE, split
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

#: Slots that are gathered together at most, beside those of the last request.
_TOGETHER = 8192


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The requests of one engine step as kernel calls, in the order of their queries."""

    calls: tuple[KernelCall, ...]
    workspace: Workspace

    @classmethod
    def build(
        cls,
        *,
        query_start: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Tensor,
        kpos: Sequence[Tensor],
        qpos: Tensor,
        affine: Sequence[bool],
        rope: RopeTable,
        shape: HeadShape,
        rotated: Sequence[bool | Tensor] | None = None,
        rows: Sequence[int] | None = None,
        workspace: Workspace | None = None,
        copies: KvCopies | None = None,
        use_vllm: bool | None = None,
    ) -> "AttentionBatch":
        """Prepares a step of `len(seq_lens)` requests for layers of one `shape`.

        `query_start` (requests + 1 integers) bounds the query tokens of each request in the packed
        batch. `seq_lens` counts the valid slots of each, in compute order. `block_table`
        [requests, max_blocks] int32 names their blocks. `kpos[i]` [>= seq_lens[i]] int32 is the
        logical position of each slot (GAP: never visible), `qpos` [tokens] int32 of each query
        (GAP: padding, its output is finite and means nothing). A key is visible to a query iff
        kpos <= qpos. `affine[i]` promises that kpos is 0, 1, 2, ... and that the queries are the
        last slots; `kpos[i]` is then not read.

        `rotated[i]` says whether the keys of request i are cached with RoPE of their logical
        positions: all (True), none (False), or a bool tensor [>= seq_lens[i]] slot by slot. By
        default none are. Affine requests with all keys rotated are read in place. `rows[i]` is
        the row of position 0 by which its other keys are rotated (`RopeTable.row_of`).

        `workspace` is scratch memory to reuse from step to step. `copies` are those of the requests
        with one query, which are gathered without; `kpos[i]` must be the same tensor in all steps
        of a request. `use_vllm` forces vLLM's C++ kernels or torch; by default vLLM's serve the
        shapes that they cover.
        """
        requests = [
            PagedRequest(
                start=start,
                stop=stop,
                table=block_table[i],
                length=seq_lens[i],
                positions=None if affine[i] else kpos[i],
                rotated=False if rotated is None else rotated[i],
                qpos=qpos[start:stop],
                row=rows[i] if rows else 0,
            )
            for i, (start, stop) in enumerate(pairwise(query_start))
            if start < stop
        ]
        fused = vllm_ops.covers_shape(shape) if use_vllm is None else use_vllm
        dense = (DenseCall(gathering.in_logical_order([each], rope)) for each in requests)
        calls = _fused(requests, rope, shape, copies) if fused else dense
        return cls(tuple(calls), workspace or Workspace())

    @classmethod
    def of_plain(
        cls,
        *,
        query_start: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        shape: HeadShape,
        workspace: Workspace,
        copies: KvCopies | None = None,
    ) -> "AttentionBatch":
        """A step whose requests are all affine and have all keys cached with RoPE.

        Arguments as of `build`, the first three int32, on vLLM's kernels (`covers_shape`).
        """
        if copies is not None:
            copies.retain(())
        launch = vllm_ops.Launch.plan(0, query_start, seq_lens, block_table, shape)
        return cls((InPlaceCall(launch),), workspace)


def store(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes `key` and `value`, both [tokens, num_kv_heads, head_size], to their cache slots.

    `slot_mapping` [n <= tokens] holds flat slots (block * 16 + offset); tokens with a negative slot
    and tokens after the n-th are skipped. `kv_cache` is a layer's cache as `paging` describes it.
    Slots must be distinct.
    """
    count = slot_mapping.shape[0]
    if key.shape[0] != count:
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


def _fused(
    requests: Sequence[PagedRequest], rope: RopeTable, shape: HeadShape, copies: KvCopies | None
) -> Iterator[KernelCall]:
    copied = _copied(requests, rope, copies)
    pairs = zip(requests, copied, strict=True)
    for way, group in groupby(pairs, key=lambda pair: (pair[0].in_place, pair[1] is not None)):
        found, updates = zip(*group, strict=True)
        match way:
            case (True, _):
                yield InPlaceCall.plan(found, shape)
            case (_, True):
                assert copies is not None
                yield CopiedCall.plan(found[0].start, updates, copies, rope, shape)
            case _:
                for gather in _gathers(found, rope):
                    yield GatheredCall.plan(gather, shape) if gather.length else DenseCall(gather)


def _copied(
    requests: Sequence[PagedRequest], rope: RopeTable, copies: KvCopies | None
) -> list[CopyUpdate | None]:
    """What is done to the copy of each request; None for those that have none."""
    if copies is None:
        return [None] * len(requests)
    copies.retain(request for request in requests if request.decodes)
    return [copies.update(r, rope) if r.decodes else None for r in requests]


def _gathers(requests: Sequence[PagedRequest], rope: RopeTable) -> Iterator[Gather]:
    ends = accumulate(request.length for request in requests)
    pairs = zip((end // _TOGETHER for end in ends), requests, strict=True)
    for (one, *_), group in groupby(pairs, lambda p: (p[1].affine or p[1].decodes, p[0])):
        found = [request for _, request in group]
        if not one:
            yield gathering.in_logical_order(found, rope)
            continue
        for request in found:
            gather = gathering.in_slot_order if request.affine else gathering.for_one_query
            yield gather(request, rope)

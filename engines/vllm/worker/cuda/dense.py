"""Attention of planned requests in plain PyTorch: slow, and right on every device.

It serves where no kernel does, and is what the path with kernels is tested against.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.cuda.planned_requests import PlannedBatch
from picbench.kernels.rope import RopeTable, rotate


@dataclass(frozen=True, slots=True)
class DenseRow:
    """One planned request of a step.

    `start` and `stop` bound its queries in the batch. `block`, `offset` [keys] int64 say where its
    keys lie, `rows` [keys, rotary_dim] are cosines and sines of their turns, `visible`
    [queries, keys] bool says which query sees which.
    """

    start: int
    stop: int
    block: Tensor
    offset: Tensor
    rows: Tensor
    visible: Tensor

    @classmethod
    def build(
        cls,
        queries: slice,
        blocks: Tensor,
        kpos: Tensor,
        turns: Tensor,
        qpos: Tensor,
        rope: RopeTable,
    ) -> "DenseRow":
        """A request whose slots lie in `blocks` [>= slots / 16] int32 on the device.

        `queries` bounds its tokens in the batch. On the host, all int32: `kpos` and `turns` [slots]
        are the slots' logical positions and turns, `qpos` [queries] the tokens' positions.
        """
        seen = (kpos < GAP).nonzero().flatten()
        visible = kpos[seen] <= qpos.unsqueeze(1)
        device = blocks.device
        where = seen.to(device)
        return cls(
            start=queries.start,
            stop=queries.stop,
            block=blocks.long()[where // BLOCK_SIZE],
            offset=where % BLOCK_SIZE,
            rows=_cosines(turns[seen].to(device), rope),
            visible=visible.to(device),
        )

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """Fill the request's part of `out` [tokens, heads, head_size]."""
        pairs = kv_cache[self.block, :, self.offset]
        key, value = pairs.chunk(2, dim=-1)
        key = rotate(key, self.rows)
        mine = slice(self.start, self.stop)
        attended = scaled_dot_product_attention(
            query[mine].transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            attn_mask=self.visible,
            scale=scale,
            enable_gqa=True,
        )
        out[mine] = attended.transpose(0, 1)


@dataclass(frozen=True, slots=True)
class DenseAttention:
    """The planned requests of one step."""

    rows: tuple[DenseRow, ...]

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """Fill the planned requests' parts of `out`, whose other rows are left alone.

        `query`, `out` [tokens, heads, head_size], queries rotated; `kv_cache` [blocks, kv_heads,
        16, 2 * head_size], keys in the first half of the last dimension.
        """
        for row in self.rows:
            row.attend(query, kv_cache, scale, out)


class DensePlanner:
    """Plans steps for PyTorch."""

    graphs = False

    def __init__(self, rope: RopeTable) -> None:
        self._rope = rope

    def plan(self, batch: PlannedBatch, block_table: Tensor) -> DenseAttention:
        """See `Planner.plan`."""
        rows, start = [], 0
        for i, count in enumerate(batch.scheduled):
            if batch.planned[i] or not batch.stock:
                queries = slice(start, start + count)
                rows.append(self._row(batch, i, queries, block_table[i]))
            start += count
        return DenseAttention(tuple(rows))

    def _row(self, batch: PlannedBatch, index: int, queries: slice, blocks: Tensor) -> DenseRow:
        stop = batch.computed[index] + batch.scheduled[index]
        request = batch.requests[index]
        kpos, turns = np.arange(stop, dtype=np.int32), np.zeros(stop, dtype=np.int32)
        if request is not None:
            kpos, turns = request.positions(0, stop), request.turned(stop)
        qpos = torch.from_numpy(batch.logical(index))
        return DenseRow.build(
            queries, blocks, torch.from_numpy(kpos), torch.from_numpy(turns), qpos, self._rope
        )


def _cosines(turns: Tensor, rope: RopeTable) -> Tensor:
    """Cosines and sines [n, rotary_dim] of `turns` [n], which may be negative."""
    cos, sin = rope.cos_sin_cache[turns.abs().long()].chunk(2, dim=-1)
    return torch.cat([cos, torch.where(turns.unsqueeze(1) < 0, -sin, sin)], dim=-1)

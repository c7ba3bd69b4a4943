"""Attention of planned requests in plain PyTorch: slow, but correct on every device.

It is used where no kernel serves the model, and the path with kernels is tested against it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.cuda.metadata import AttentionCalls
from picbench.engines.vllm.worker.cuda.planned_batch import PlannedBatch
from picbench.kernels.rope import RopeTable, rotate


@dataclass(frozen=True, slots=True)
class DenseRequest:
    """One request of a step.

    `start` and `stop` bound its queries in the batch. Key i is in slot `offset[i]` of block
    `block[i]` ([keys] int64). `cos_sin` [keys, rotary_dim] are cosines and sines of its RoPE shift,
    `is_neox` says of which dimensions; `visible` [queries, keys] bool says which query sees which
    key.
    """

    start: int
    stop: int
    block: Tensor
    offset: Tensor
    cos_sin: Tensor
    is_neox: bool
    visible: Tensor

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """See `PlannedAttention.attend`."""
        pairs = kv_cache[self.block, :, self.offset]
        key, value = pairs.chunk(2, dim=-1)
        key = rotate(key, self.cos_sin, is_neox=self.is_neox)
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


class DensePlanner:
    """A `Planner` for PyTorch."""

    graphs = False
    shares = False

    def __init__(self, rope: RopeTable) -> None:
        self._rope = rope

    @property
    def nbytes(self) -> int:
        """Nothing: PyTorch allocates what a call needs."""
        return 0

    def warm_up(self, kv_cache: Tensor) -> None:
        """PyTorch's operators need no compilation."""

    def plan(self, batch: PlannedBatch, block_table: Tensor) -> AttentionCalls:
        """See `Planner.plan`."""
        requests, start = [], 0
        for i, count in enumerate(batch.scheduled.tolist()):
            if batch.known.requests[i] is not None or not batch.stock:
                queries = slice(start, start + count)
                requests.append(self._request(batch, i, queries, block_table[i]))
            start += count
        return AttentionCalls(tuple(requests))

    def _request(
        self, batch: PlannedBatch, index: int, queries: slice, blocks: Tensor
    ) -> DenseRequest:
        stop = int(batch.computed[index] + batch.scheduled[index])
        request = batch.known.requests[index]
        kpos, shifts = np.arange(stop, dtype=np.int32), np.zeros(stop, dtype=np.int32)
        if request is not None:
            kpos, shifts = request.positions(0, stop), request.rope_shifts(stop)
        # On the host: logical positions of slots, and those of the request's tokens.
        found, qpos = torch.from_numpy(kpos), torch.from_numpy(batch.logical(index))
        seen = (found < GAP).nonzero().flatten()
        visible = found[seen] <= qpos.unsqueeze(1)
        where = seen.to(blocks.device)
        return DenseRequest(
            start=queries.start,
            stop=queries.stop,
            block=blocks.long()[where // BLOCK_SIZE],
            offset=where % BLOCK_SIZE,
            cos_sin=self._rope.shift_rows(torch.from_numpy(shifts)[seen].to(blocks.device)),
            is_neox=self._rope.is_neox,
            visible=visible.to(blocks.device),
        )

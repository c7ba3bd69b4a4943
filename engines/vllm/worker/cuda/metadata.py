"""Splitting a step between vLLM's own attention and picbench's."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from picbench.engines.vllm.worker.cuda.planned_requests import PlannedBatch
from picbench.engines.vllm.worker.cuda.upload import upload


class PlannedAttention(Protocol):
    """Attention of one step by picbench's kernels, the same for all layers."""

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """Fill some requests' parts of `out` [tokens, heads, head_size], and leave the rest alone.

        They are the planned ones; without vLLM's attention (`PlannedBatch.stock`), all.
        """
        ...


class Planner(Protocol):
    """Makes the attention of a step's planned requests.

    `graphs` says whether CUDA graphs may hold what it makes of decoding steps.
    """

    graphs: bool

    def plan(self, batch: PlannedBatch, block_table: Tensor) -> PlannedAttention:
        """Row i of `block_table` [requests, blocks] names the blocks of request i of `batch`."""
        ...


@dataclass(frozen=True, slots=True)
class SplitMetadata:
    """A step with planned requests.

    `stock` is the metadata of vLLM's attention, for which planned requests have no keys; None if
    it has no part in the step.
    """

    stock: Any
    planned: PlannedAttention


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step with planned requests, as the model runner describes it to metadata builders."""

    batch: PlannedBatch
    planner: Planner

    def without(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The step as vLLM's attention gets it: planned requests have no keys."""
        planned = upload(torch.tensor(self.batch.planned), common.seq_lens.device)
        return common.replace(seq_lens=common.seq_lens.masked_fill(planned, 0))

    def attention(self, common: CommonAttentionMetadata) -> PlannedAttention:
        """Attention of the planned requests over the blocks that `common` names."""
        return self.planner.plan(self.batch, common.block_table_tensor)

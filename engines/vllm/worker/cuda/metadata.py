"""How a step is split between vLLM's attention and picbench's."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from picbench.engines.vllm.worker.cuda.planned_batch import PlannedBatch
from picbench.kernels.cuda.device import upload


class PlannedAttention(Protocol):
    """Attention of one step by picbench's kernels, the same for all layers."""

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """Fill rows of `out` [tokens, heads, head_size] and leave the others alone.

        They are those of planned requests, or all if vLLM's attention is not run
        (`PlannedBatch.stock`). `query` has the shape of `out` and is rotated; `kv_cache` [blocks,
        kv_heads, 16, 2 * head_size] has keys in the first half of the last dimension.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """Attention of one step in several calls, which fill different rows."""

    calls: tuple[PlannedAttention, ...]

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """See `PlannedAttention.attend`."""
        for call in self.calls:
            call.attend(query, kv_cache, scale, out)


class Planner(Protocol):
    """Prepares attention of planned requests; with `graphs` CUDA graphs may hold decoding ones."""

    graphs: bool

    @property
    def shares(self) -> bool:
        """Whether requests that decode may read blocks together (`PlannedBatch.shares`)."""
        ...

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        ...

    def warm_up(self, kv_cache: Tensor) -> None:
        """Compile all kernels that steps can need, with the cache [...] of any layer.

        Its layout is that of `PlannedAttention.attend`. It is not written to.
        """
        ...

    def plan(self, batch: PlannedBatch, block_table: Tensor) -> PlannedAttention:
        """Row i of `block_table` [requests, blocks] lists the blocks of request i of `batch`."""
        ...


@dataclass(frozen=True, slots=True)
class SplitMetadata:
    """A step with planned requests, which have no keys in `stock`; None: vLLM does not attend."""

    stock: Any
    planned: PlannedAttention


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step with planned requests, as the model runner describes it to metadata builders."""

    batch: PlannedBatch
    planner: Planner

    def without(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The step for vLLM's attention, in which planned requests have no keys."""
        planned = upload(self.batch.known.planned, common.seq_lens.device)
        return common.replace(seq_lens=common.seq_lens.masked_fill(planned, 0))

    def attention(self, common: CommonAttentionMetadata) -> PlannedAttention:
        """Attention of the planned requests over the blocks in `common`."""
        return self.planner.plan(self.batch, common.block_table_tensor)

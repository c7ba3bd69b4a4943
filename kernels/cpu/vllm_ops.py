"""vLLM's own C++ kernels, where they are installed and cover the layer's shape.

The functions wrap `vllm._custom_ops` of vLLM 0.32. Sources: csrc/cpu/cpu_attn.cpp,
csrc/cpu/pos_encoding.cpp.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from picbench.kernels.paging import halves
from picbench.kernels.shape import HeadShape

#: Tile layout of vLLM's CPU kernel for blocks of 16 slots.
_ISA = "vec16"

# CPUAttentionBackend.get_supported_head_sizes of vLLM 0.32.
_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

# The scheduler of the kernel checks that a group of query heads fits one tile.
_MAX_GROUP = 16


@cache
def covers(head_size: int, dtype: torch.dtype) -> bool:
    """Whether vLLM is installed with CPU kernels for this head size and type."""
    try:
        from vllm import _custom_ops  # noqa: F401
    except ImportError:
        return False
    known = hasattr(torch.ops._C, "cpu_attention_with_kv_cache")
    return known and head_size in _HEAD_SIZES and dtype in (torch.float32, torch.bfloat16)


def covers_shape(shape: HeadShape) -> bool:
    """`covers`, and the group of query heads to a KV head is small enough."""
    return shape.group <= _MAX_GROUP and covers(shape.head_size, shape.dtype)


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of vLLM's kernel: causal sequences over consecutive query tokens.

    Sequence i owns the queries start + query_start[i] .. start + query_start[i + 1], which are the
    last of its lengths[i] keys, in the blocks table[i]. All three are int32.
    `schedule` is the kernel's division of work, valid for all layers of one shape.
    """

    start: int
    stop: int
    query_start: Tensor
    lengths: Tensor
    table: Tensor
    schedule: Tensor

    @classmethod
    def plan(
        cls,
        start: int,
        query_start: Tensor,
        lengths: Tensor,
        table: Tensor,
        shape: HeadShape,
        isa: str = _ISA,
    ) -> "Launch":
        """Prepares the call for layers of one shape, whose tiles the kernel's `isa` lays out."""
        from vllm import envs

        schedule = _ops().cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_size,
            seq_lens=lengths,
            dtype=shape.dtype,
            query_start_loc=query_start,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        stop = start + int(query_start[-1])
        return cls(start, stop, query_start, lengths, table, schedule)

    def run(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """Attention of the launch's queries over `kv_cache`, whose keys are rotated."""
        self.read(query, *halves(kv_cache), scale, out)

    def read(self, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
        """As `run`, over the halves of a cache's tiles, of whatever size."""
        if (self.start, self.stop) != (0, query.shape[0]):
            query, out = query[self.start : self.stop], out[self.start : self.stop]
        _ops().cpu_attention_with_kv_cache(
            query=query,
            key_cache=key,
            value_cache=value,
            output=out,
            query_start_loc=self.query_start,
            seq_lens=self.lengths,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.table,
            softcap=0,
            scheduler_metadata=self.schedule,
            s_aux=None,
        )


def pack(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Writes [n, num_kv_heads, head_size] keys and values to their slots; negative ones skip."""
    slots = slots.long().contiguous()
    _ops().cpu_attn_reshape_and_cache(key, value, *halves(kv_cache), slots, _ISA)


def rotate_tiles(kv_cache: Tensor, pages: Tensor) -> None:
    """Rotates the keys of whole blocks in place; `pages` is what `RopeTable.pages` returns.

    A tile [head_size, 16 | 16, head_size] read as one long head is a head of which the first
    16 * rotary_dim elements are rotated, paired neox style: so vLLM's kernel for partial rotary
    embedding rotates a whole tile at once.
    """
    blocks, _, slots, width = kv_cache.shape
    positions = torch.arange(blocks)
    _ops().rotary_embedding(positions, kv_cache.view(blocks, -1), None, slots * width, pages, True)


@cache
def _ops() -> Any:
    # Imported where it is first used: it loads vLLM. An import statement takes 1 us each time.
    from vllm import _custom_ops

    return _custom_ops

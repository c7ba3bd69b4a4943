"""FlashAttention-3 as vLLM ships it.

Upstream: vllm/vllm_flash_attn/flash_attn_interface.py of vLLM 0.32.0. Its causal mask is aligned
to the end of the keys, so queries at n consecutive positions that see `lengths[i]` keys at the end
are an ordinary sequence, at any position of the prompt.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from picbench.kernels.shape import HeadShape


@cache
def available() -> bool:
    """Whether FlashAttention-3 is installed and this GPU runs it."""
    if not torch.cuda.is_available():
        return False
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported
    except ImportError:
        return False
    return bool(is_fa_version_supported(3))


def covers(shape: HeadShape) -> bool:
    """Whether FlashAttention-3 serves these heads here."""
    half = shape.dtype in (torch.float16, torch.bfloat16)
    return half and shape.head_size % 8 == 0 and shape.head_size <= 256 and available()


@dataclass(frozen=True, slots=True)
class Runs:
    """Causal sequences over paged keys; all tensors are int32 on the device.

    Sequence i owns the queries starts[i] .. starts[i + 1], of which the last sees lengths[i] keys
    in the pages table[i]. `longest_query` and `longest_key` are the most queries and keys of one.
    `schedule` is FlashAttention's scheduler metadata, valid for all layers of one shape.
    """

    starts: Tensor
    lengths: Tensor
    table: Tensor
    longest_query: int
    longest_key: int
    schedule: Tensor | None = None

    def scheduled(self, shape: HeadShape, page: int, splits: int = 0) -> "Runs":
        """The same sequences with scheduler metadata, for pages of `page` keys."""
        from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

        schedule = get_scheduler_metadata(
            batch_size=len(self.lengths),
            max_seqlen_q=self.longest_query,
            max_seqlen_k=self.longest_key,
            num_heads_q=shape.num_heads,
            num_heads_kv=shape.num_kv_heads,
            headdim=shape.head_size,
            cache_seqlens=self.lengths,
            qkv_dtype=shape.dtype,
            cu_seqlens_q=self.starts,
            page_size=page,
            causal=True,
            num_splits=splits,
        )
        return replace(self, schedule=schedule)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        out: Tensor,
        splits: int = 0,
    ) -> Tensor:
        """Attention of `query` [tokens, heads, size] over pages [pages, page, kv_heads, size].

        Fills `out`; returns the log-sum-exps [heads, tokens], float32.
        """
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        lse: Tensor
        _, lse = flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            out=out,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.longest_query,
            seqused_k=self.lengths,
            max_seqlen_k=self.longest_key,
            softmax_scale=scale,
            causal=True,
            block_table=self.table,
            scheduler_metadata=self.schedule,
            num_splits=splits,
            return_softmax_lse=True,
            fa_version=3,
        )
        return lse

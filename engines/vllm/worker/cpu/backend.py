"""vLLM's attention backend interface over `picbench.kernels`, for CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention import selector
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_layout import KVCacheLayout

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.vllm.worker.attention_layers import head_shape
from picbench.engines.vllm.worker.cpu.slot_positions import StepPositions
from picbench.kernels.cpu.attention import AttentionBatch, attend, store
from picbench.kernels.cpu.copies import KvCopies
from picbench.kernels.cpu.scratch import Workspace
from picbench.kernels.rope import RopeTable


class PicAttentionBackend(AttentionBackend):
    """Attention over shared keys cached without RoPE; replaces CPU_ATTN in PIC engines."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks of 16 slots only."""
        return [BLOCK_SIZE]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Head-major blocks, as vLLM's own CPU kernels read them."""
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_name() -> str:
        """The name of the backend that it replaces: vLLM looks it up among its own."""
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> "type[PicAttention]":
        """The class that runs in each layer."""
        return PicAttention

    @staticmethod
    def get_builder_cls() -> "type[PicMetadataBuilder]":
        """The class that prepares each step."""
        return PicMetadataBuilder


class PicMetadataBuilder(AttentionMetadataBuilder[AttentionBatch]):
    """Prepares a step for all layers.

    The model runner sets `rope` and `step` before each, and `copies` once: vLLM's metadata has
    neither. A step of plain requests alone needs none: vLLM's metadata say all of it.
    """

    rope: RopeTable
    step: StepPositions | None
    copies: KvCopies | None = None

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._shape = head_shape(vllm_config)
        self._workspace = Workspace()

    @property
    def nbytes(self) -> int:
        """Memory held beside the KV cache: scratch, and the copies of decoding requests."""
        return self._workspace.nbytes + (self.copies.nbytes if self.copies else 0)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AttentionBatch:
        """The batch of the current step."""
        if self.step is None:
            return AttentionBatch.of_plain(
                query_start=common_attn_metadata.query_start_loc_cpu,
                seq_lens=common_attn_metadata.seq_lens,
                block_table=common_attn_metadata.block_table_tensor,
                shape=self._shape,
                workspace=self._workspace,
                copies=self.copies,
            )
        return AttentionBatch.build(
            query_start=common_attn_metadata.query_start_loc_cpu.tolist(),
            seq_lens=common_attn_metadata.seq_lens.tolist(),
            block_table=common_attn_metadata.block_table_tensor,
            kpos=[slots.positions for slots in self.step.requests],
            qpos=self.step.queries,
            affine=[slots.affine for slots in self.step.requests],
            rotated=[slots.with_rope for slots in self.step.requests],
            rows=[self.rope.row_of(slots.temperature) for slots in self.step.requests],
            rope=self.rope,
            shape=self._shape,
            workspace=self._workspace,
            copies=self.copies,
        )


class PicAttention(AttentionImpl[Any]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        # Features are kept for `check_layers`, which refuses them.
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.alibi_slopes = alibi_slopes
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write a step's K and V, [tokens, kv_heads, head_size], for all requests."""
        store(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: AttentionBatch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of `query` [tokens, heads, head_size], rotated, into `output`."""
        if attn_metadata is None:  # vLLM's profiling run
            return output.zero_()
        self.attend(query, kv_cache, attn_metadata, output)
        return output

    def attend(
        self, query: Tensor, kv_cache: Tensor, batch: AttentionBatch, output: Tensor
    ) -> None:
        """Attention of `query`, rotated, over the cache into `output`, sizes as of `forward`."""
        attend(query, kv_cache, batch, self.scale, output)


@contextmanager
def backend_selected() -> Iterator[None]:
    """Select this backend for the attention layers that are built inside.

    vLLM's CPU platform ignores `attention_backend` and asks for CPU_ATTN
    (vllm/platforms/cpu.py, get_attn_backend_cls), so that member is overridden while a model is
    built; other engines of the process keep vLLM's own. The selector's cache is cleared before and
    after, because its key does not include overrides.
    """
    path = f"{PicAttentionBackend.__module__}.{PicAttentionBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        selector._cached_get_attn_backend.cache_clear()

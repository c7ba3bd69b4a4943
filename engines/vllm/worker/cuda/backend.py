"""vLLM's attention backends, extended by planned requests.

Steps without planned requests use vLLM's own metadata and kernels unchanged. In other steps
picbench's attention serves the planned requests, and vLLM's those without a plan, if they read more
than few keys (`PlannedBatch.stock`).
"""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import (
    get_flash_attn_version,
    is_flash_attn_varlen_func_available,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from picbench.engines.vllm.worker.cuda.metadata import PlannedStep, SplitMetadata
from picbench.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder

    _Builder = AttentionMetadataBuilder[Any]
    _Attention = AttentionImpl[Any]
else:
    _Builder = _Attention = object

logger = init_logger(__name__)


class SplittingBuilder(_Builder):
    """A metadata builder of vLLM's that splits steps with planned requests.

    The model runner sets `step` before each build, because vLLM's common metadata has neither
    logical positions nor request ids. None means that no request is planned.
    """

    step: PlannedStep | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Full graphs for decoding only: in other steps plans differ in shape.

        Model runner V1 chooses graphs without regard to planned requests and gets none.
        """
        if not vllm_config.use_v2_model_runner:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """vLLM's own metadata, or a `SplitMetadata` if the step has planned requests."""
        step, common = self.step, common_attn_metadata
        if step is None:
            return super().build(common_prefix_len, common, fast_build)  # type: ignore[safe-super]
        stock = None
        if step.batch.stock:
            plain = step.without(common)
            stock = super().build(common_prefix_len, plain, fast_build)  # type: ignore[safe-super]
        return SplitMetadata(stock, step.attention(common))


class SplitAttention(_Attention):
    """Attention of one layer, vLLM's own or split."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: outputs are quantised after attention, as picbench's kernels do not do it.

        vLLM's fusion passes ask (vllm/compilation/passes/fusion/attn_quant_fusion.py).
        """
        return False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of `query` [tokens, heads, head_size], rotated, into `output`."""
        if not isinstance(attn_metadata, SplitMetadata):
            return super().forward(  # type: ignore[safe-super]
                layer, query, key, value, kv_cache, attn_metadata, output
            )
        if attn_metadata.stock is not None:
            super().forward(  # type: ignore[safe-super]
                layer, query, key, value, kv_cache, attn_metadata.stock, output
            )
        attn_metadata.planned.attend(query, kv_cache, self.scale, output)
        return output


class FlashBuilder(SplittingBuilder, FlashAttentionMetadataBuilder):
    """FlashAttention's metadata, or split."""


class TritonBuilder(SplittingBuilder, TritonAttentionMetadataBuilder):
    """The metadata of vLLM's Triton attention, or split."""

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Upstream shortens requests after building; dummy planned ones are short already."""
        if self.step is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self.build(0, common_attn_metadata)


class FlashSplitAttention(SplitAttention, FlashAttentionImpl):
    """A layer in which FlashAttention serves requests without a plan."""


class TritonSplitAttention(SplitAttention, TritonAttentionImpl):
    """A layer in which vLLM's Triton attention serves requests without a plan."""


class PluginBackend:
    """What both backends tell vLLM's registry; layers run `attention`, `builder` prepares steps."""

    supported_kv_cache_dtypes: ClassVar[Any] = ["auto", "float16", "bfloat16"]
    attention: ClassVar[Any]
    builder: ClassVar[Any]

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's registry that is reserved for plug-ins."""
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> Any:
        """The class that runs in each layer."""
        return cls.attention

    @classmethod
    def get_builder_cls(cls) -> Any:
        """The class that prepares each step."""
        return cls.builder


class PicFlashBackend(PluginBackend, FlashAttentionBackend):
    """FlashAttention and picbench's: bfloat16 and float16."""

    attention, builder = FlashSplitAttention, FlashBuilder


class PicTritonBackend(PluginBackend, TritonAttentionBackend):
    """vLLM's Triton attention and picbench's, where FlashAttention does not serve the model."""

    attention, builder = TritonSplitAttention, TritonBuilder


def select_backend(vllm_config: Any) -> type[PicFlashBackend] | type[PicTritonBackend]:
    """Register the backend of an engine's model as a plug-in. Raises ConfigError if none is."""
    model = vllm_config.model_config
    flash = is_flash_attn_varlen_func_available() and get_flash_attn_version() == 3
    backend = choose_backend(model.dtype, model.get_head_size(), flash=flash)
    path = f"{backend.__module__}.{backend.__qualname__}"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    return backend


def choose_backend(
    dtype: torch.dtype, head_size: int, *, flash: bool
) -> type[PicFlashBackend] | type[PicTritonBackend]:
    """FlashAttention if it serves the model, else Triton attention with a warning.

    `flash` says whether FlashAttention is installed and supports this GPU. Raises ConfigError for
    types and head sizes that neither serves.
    """
    if not flash:
        reason = "FlashAttention 3 is not available"
    elif dtype not in FlashAttentionBackend.supported_dtypes:
        reason = f"FlashAttention does not serve {dtype}"
    elif not FlashAttentionBackend.supports_head_size(head_size):
        reason = f"FlashAttention does not serve head size {head_size}"
    else:
        return PicFlashBackend
    if dtype not in TritonAttentionBackend.supported_dtypes:
        raise ConfigError(f"no attention serves {dtype}", hint="use `dtype=bfloat16`")
    if not TritonAttentionBackend.supports_head_size(head_size):
        raise ConfigError(
            f"no attention serves head size {head_size}", hint="use a model with another head size"
        )
    logger.warning_once("picbench: %s; vLLM's Triton attention instead, which is slower", reason)
    return PicTritonBackend

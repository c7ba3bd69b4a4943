"""vLLM's attention backends, extended by requests that follow plans.

Steps in which nobody follows a plan go through vLLM's own metadata and kernels unchanged. In other
steps vLLM's attention serves the requests without a plan, and picbench's the others.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from picbench.engines.vllm.worker.cuda.metadata import PlannedStep, SplitMetadata

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder

    _Builder = AttentionMetadataBuilder[Any]
    _Attention = AttentionImpl[Any]
else:
    _Builder = _Attention = object


class SplittingBuilder(_Builder):
    """A metadata builder of vLLM's that is told about plans.

    The model runner sets `step` before each build: vLLM's common metadata holds neither logical
    positions nor request ids. None means that nobody follows a plan.
    """

    step: PlannedStep | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Whole-step graphs for decoding only: in other steps plans differ in shape.

        Model runner V1 cannot tell steps with planned requests from others and gets none.
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
        """vLLM's own metadata, or a `SplitMetadata` if somebody follows a plan."""
        step, common = self.step, common_attn_metadata
        if step is None:
            return super().build(common_prefix_len, common, fast_build)  # type: ignore[safe-super]
        stock = None
        if step.batch.stock:
            plain = step.without(common)
            stock = super().build(common_prefix_len, plain, fast_build)  # type: ignore[safe-super]
        return SplitMetadata(stock, step.attention(common))


class SplitAttention(_Attention):
    """Attention of one layer, in vLLM's way or in two parts."""

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
    """Metadata over FlashAttention's."""


class TritonBuilder(SplittingBuilder, TritonAttentionMetadataBuilder):
    """Metadata over vLLM's Triton attention's."""

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Upstream shortens requests after building; those of a planned step are short."""
        if self.step is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self.build(0, common_attn_metadata)


class FlashSplitAttention(SplitAttention, FlashAttentionImpl):
    """A layer whose requests without a plan go to FlashAttention."""


class TritonSplitAttention(SplitAttention, TritonAttentionImpl):
    """A layer whose requests without a plan go to vLLM's Triton attention."""


class PicFlashBackend(FlashAttentionBackend):
    """FlashAttention and plans: bfloat16 and float16."""

    supported_kv_cache_dtypes: ClassVar[Any] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's registry that is left to plug-ins."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashSplitAttention]:
        """The class that runs in each layer."""
        return FlashSplitAttention

    @staticmethod
    def get_builder_cls() -> type[FlashBuilder]:
        """The class that prepares each step."""
        return FlashBuilder


class PicTritonBackend(TritonAttentionBackend):
    """vLLM's Triton attention and plans: where FlashAttention does not serve."""

    supported_kv_cache_dtypes: ClassVar[Any] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's registry that is left to plug-ins."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TritonSplitAttention]:
        """The class that runs in each layer."""
        return TritonSplitAttention

    @staticmethod
    def get_builder_cls() -> type[TritonBuilder]:
        """The class that prepares each step."""
        return TritonBuilder

"""Which of vLLM's attention backends picbench extends."""

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backends.fa_utils import (
    get_flash_attn_version,
    is_flash_attn_varlen_func_available,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from picbench.engines.vllm.worker.cuda.backend import PicFlashBackend, PicTritonBackend
from picbench.errors import ConfigError

logger = init_logger(__name__)


def select(vllm_config: Any) -> type[PicFlashBackend] | type[PicTritonBackend]:
    """Put the backend that serves an engine's model under vLLM's name for plug-ins.

    Raises ConfigError if none does.
    """
    model = vllm_config.model_config
    backend = choose(model.dtype, model.get_head_size(), flash=_flash_available())
    path = f"{backend.__module__}.{backend.__qualname__}"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    return backend


def choose(
    dtype: torch.dtype, head_size: int, *, flash: bool
) -> type[PicFlashBackend] | type[PicTritonBackend]:
    """FlashAttention where it serves, else Triton attention, and says so.

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


def _flash_available() -> bool:
    return is_flash_attn_varlen_func_available() and get_flash_attn_version() == 3

import pytest
import torch

from picbench.engines.vllm.worker.cuda.backend import (
    PicFlashBackend,
    PicTritonBackend,
    choose_backend,
)
from picbench.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_where_it_serves(dtype: torch.dtype) -> None:
    assert choose_backend(dtype, 128, flash=True) is PicFlashBackend


@pytest.mark.parametrize(
    ("dtype", "head_size", "flash"),
    [(torch.float32, 128, True), (torch.bfloat16, 128, False), (torch.bfloat16, 100, True)],
)
def test_triton_elsewhere(dtype: torch.dtype, head_size: int, flash: bool) -> None:
    assert choose_backend(dtype, head_size, flash=flash) is PicTritonBackend


def test_types_and_sizes_that_nothing_serves_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no attention serves torch\.float64"):
        choose_backend(torch.float64, 128, flash=True)
    with pytest.raises(ConfigError, match="no attention serves head size 8"):
        choose_backend(torch.float32, 8, flash=False)

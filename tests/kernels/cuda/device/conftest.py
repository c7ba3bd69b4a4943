"""What the tests run on, and how exact they are there."""

import pytest
import torch

from picbench.kernels.shape import HeadShape

#: Relative error of the whole output against float64, by type.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

ON_GPU = torch.cuda.is_available()


@pytest.fixture
def device() -> str:
    """The GPU, or the CPU in Triton's interpreter."""
    return "cuda" if ON_GPU else "cpu"


# The interpreter multiplies the bits of bfloat16 numbers, and is slow: other types need a GPU.
TYPES = list(TOLERANCE) if ON_GPU else [torch.float16]


@pytest.fixture(params=TYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Types of the cache."""
    kind: torch.dtype = request.param
    return kind


@pytest.fixture(params=["token-major", "head-major"])
def head_major(request: pytest.FixtureRequest) -> bool:
    """Both layouts of vLLM's cache."""
    return bool(request.param == "head-major")


SHAPES = [(8, 2, 64), (4, 4, 128), (7, 1, 64)] if ON_GPU else [(4, 2, 32), (7, 1, 16)]


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest, dtype: torch.dtype) -> HeadShape:
    """Groups of query heads of several sizes, odd ones too."""
    return HeadShape(*request.param, dtype)


@pytest.fixture
def tolerance(dtype: torch.dtype) -> float:
    """The error that this type may have."""
    return TOLERANCE[dtype]

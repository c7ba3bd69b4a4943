"""The views of a paged cache."""

import pytest
import torch

from picbench.errors import EngineError
from picbench.kernels.cpu.scratch import Workspace
from picbench.kernels.paging import halves, split


def test_views_cover_a_tile_once() -> None:
    kv_cache = torch.zeros(3, 2, 16, 128)
    key, value = split(kv_cache)
    key += 1
    value += 2
    assert key.shape == value.shape == (3, 2, 16, 64)
    assert [half.unique().tolist() for half in halves(kv_cache)] == [[1], [2]]


def test_blocks_may_be_far_apart() -> None:
    pool = torch.zeros(3, 5, 2, 16, 128)
    key, _ = split(pool[:, 1])
    key += 1
    assert float(pool.sum()) == float(pool[:, 1].sum()) == 3 * 2 * 16 * 64


@pytest.mark.parametrize(
    "kv_cache",
    [torch.zeros(3, 2, 32, 128), torch.zeros(3, 16, 2, 128).transpose(1, 2)],
    ids=["block size 32", "token-major"],
)
def test_other_layouts_are_refused(kv_cache: torch.Tensor) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        split(kv_cache)


def test_workspace_grows_and_is_reused() -> None:
    workspace = Workspace()
    first = workspace.tensor((4, 4), torch.float32)
    assert workspace.nbytes == 64
    second = workspace.tensor((8,), torch.bfloat16)
    assert second.data_ptr() == first.data_ptr()
    assert workspace.nbytes == 64

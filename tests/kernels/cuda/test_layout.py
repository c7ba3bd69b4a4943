"""Views of a layer's paged cache, and slots of it by their places in a block table."""

import pytest
import torch

from picbench.errors import EngineError
from picbench.kernels.cuda.layout import cache_slots, key_value


@pytest.mark.parametrize("head_major", [False, True], ids=["token-major", "head-major"])
def test_keys_and_values_are_views(head_major: bool) -> None:
    cache = torch.arange(3 * 2 * 16 * 8).reshape(3, 2, 16, 8)
    if not head_major:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    key, value = key_value(cache)
    assert key.shape == value.shape == (3, 16, 2, 4)
    assert key[2, 5, 1].tolist() == cache[2, 1, 5, :4].tolist()
    assert value[2, 5, 1].tolist() == cache[2, 1, 5, 4:].tolist()
    assert key.data_ptr() == cache.data_ptr()


@pytest.mark.parametrize("shape", [(3, 2, 32, 8), (3, 2, 8, 16)])
def test_other_layouts_are_refused(shape: tuple[int, ...]) -> None:
    cache = torch.zeros(shape)
    with pytest.raises(EngineError, match="cannot be read"):
        key_value(cache.transpose(2, 3) if shape[3] == 16 else cache)


def test_slots_are_found_by_their_blocks() -> None:
    table = torch.tensor([[7, 2, 0], [5, 1, 4]], dtype=torch.int32)
    at, offset, size = torch.tensor([[1, 3, 0], [3, 15, -1], [16, 16, 0]], dtype=torch.int32)
    assert cache_slots(table, at, offset, size).tolist() == [2 * 16 + 3, 5 * 16 + 15, -1]

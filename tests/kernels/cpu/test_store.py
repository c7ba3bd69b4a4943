"""`store` writes exactly the slots that it is told to."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from picbench.kernels.cpu import attention
from picbench.kernels.cpu.attention import store
from picbench.kernels.paging import BLOCK_SIZE, split

BLOCKS = 5


@given(
    slots=st.lists(st.integers(0, BLOCKS * BLOCK_SIZE - 1), max_size=30, unique=True),
    skipped=st.sets(st.integers(0, 29)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([48, 64, 128]),
)
def test_only_named_slots_change(
    slots: list[int], skipped: set[int], dtype: torch.dtype, size: int
) -> None:
    mapping = torch.tensor([-1 if i in skipped else slot for i, slot in enumerate(slots)]).long()
    key, value = torch.randn(2, len(slots) + 3, 2, size).to(dtype)
    kv_cache = torch.full((BLOCKS, 2, BLOCK_SIZE, 2 * size), float("nan"), dtype=dtype)
    store(key, value, kv_cache, mapping)
    wanted = torch.full((2, BLOCKS * BLOCK_SIZE, 2, size), float("nan"), dtype=dtype)
    kept = mapping >= 0
    wanted[:, mapping[kept]] = torch.stack([key[: len(slots)][kept], value[: len(slots)][kept]])
    for half, expected in zip(split(kv_cache), wanted, strict=True):
        found = half.transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_strided_slot_mapping_is_read_with_its_strides() -> None:
    mapping = torch.tensor([[3, 9], [20, 9], [40, 9]])[:, 0]
    key = torch.randn(3, 2, 64)
    kv_cache = torch.zeros(BLOCKS, 2, BLOCK_SIZE, 128)
    store(key, key, kv_cache, mapping)
    assert torch.equal(split(kv_cache)[0][mapping // 16, :, mapping % 16], key)


def test_both_ways_to_store_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    key, value = torch.randn(2, 7, 2, 64)
    slots = torch.tensor([5, 70, -1, 33, 2, -1, 16])
    by_vllm, by_torch = torch.zeros(2, BLOCKS, 2, BLOCK_SIZE, 128)
    store(key, value, by_vllm, slots)
    monkeypatch.setattr(attention.vllm_ops, "covers", lambda head_size, dtype: False)
    store(key, value, by_torch, slots)
    assert torch.equal(by_vllm, by_torch)

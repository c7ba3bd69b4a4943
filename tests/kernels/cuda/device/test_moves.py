"""Writing new keys and values, copying blocks, and crossing to the host."""

import pytest
import torch
from torch import Tensor

from picbench.kernels.cuda.store import store, store_reference
from picbench.kernels.cuda.transfer import HostCopier, copy_blocks

BLOCKS = 5


def poisoned(heads: int, size: int, dtype: torch.dtype, device: str, head_major: bool) -> Tensor:
    inner = (heads, 16) if head_major else (16, heads)
    memory = torch.full((BLOCKS, *inner, 2 * size), float("nan"), dtype=dtype, device=device)
    return memory if head_major else memory.transpose(1, 2)


@pytest.mark.parametrize(("heads", "size"), [(2, 64), (3, 80), (1, 128)])
def test_store_writes_what_it_is_told_to(
    heads: int, size: int, dtype: torch.dtype, device: str, head_major: bool
) -> None:
    mapping = torch.tensor([3, -1, 79, 16, 0, -1, 40], device=device)
    packed = torch.randn(9, heads, 3 * size, device=device).to(dtype)
    key, value = packed[..., :size], packed[..., size : 2 * size]
    found, wanted = (poisoned(heads, size, dtype, device, head_major) for _ in range(2))
    store(key, value, found, mapping)
    store_reference(key, value, wanted, mapping)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert int(found.isfinite().sum()) == 5 * heads * 2 * size


def test_store_reads_a_strided_slot_mapping(dtype: torch.dtype, device: str) -> None:
    mapping = torch.tensor([[3, 9], [20, 9], [40, 9]], device=device)[:, 0]
    key = torch.randn(3, 2, 64, device=device).to(dtype)
    found, wanted = (poisoned(2, 64, dtype, device, True) for _ in range(2))
    store(key, key, found, mapping)
    store_reference(key, key, wanted, mapping)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_blocks_are_copied_whole(dtype: torch.dtype, device: str, head_major: bool) -> None:
    kv_cache = poisoned(3, 80, dtype, device, head_major)
    kv_cache[1], kv_cache[4] = 1, 4
    before = kv_cache.clone()
    source = torch.tensor([4, 1], device=device)
    target = torch.tensor([0, 3], device=device)
    copy_blocks(kv_cache, source, target)
    before[target] = before[source]
    torch.testing.assert_close(kv_cache, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the transfer has its own CUDA stream")
def test_blocks_cross_to_the_host_and_back(
    dtype: torch.dtype, device: str, head_major: bool
) -> None:
    kv_cache = poisoned(3, 80, dtype, device, head_major).normal_()
    kept = kv_cache.clone()
    blocks = torch.tensor([4, 0, 2], device=device)
    host = torch.empty(3, *kv_cache.shape[1:], dtype=dtype).pin_memory()
    copier = HostCopier(kv_cache, staging_blocks=2)
    copier.to_host(kv_cache, blocks, host).join()
    assert torch.equal(host, kept[blocks].cpu())
    kv_cache.zero_()
    copier.to_device(host, kv_cache, blocks).wait()
    assert torch.equal(kv_cache[blocks], kept[blocks])
    assert not kv_cache[[1, 3]].any()

"""What is compiled before the first request."""

import pytest
import torch
from torch import Tensor

from picbench.experiments.scenes import rope_table
from picbench.kernels.cuda.decode.attention import DecodeBatch
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.decode.shared.shared_decode import SharedDecodeBatch
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.prefill.tiled import TiledPrefill
from picbench.kernels.cuda.warm_up import warm_up_decode, warm_up_link
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.shape import HeadShape


@pytest.fixture
def kv_cache(shape: HeadShape, device: str, head_major: bool) -> Tensor:
    """One block of zeros."""
    slots = (16, shape.num_kv_heads)
    size = (1, *(slots[::-1] if head_major else slots), 2 * shape.head_size)
    cache = torch.zeros(size, dtype=shape.dtype, device=device)
    return cache if head_major else cache.transpose(1, 2)


def test_every_way_to_launch_tiles_is_warmed_up(
    kv_cache: Tensor, shape: HeadShape, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits: list[int] = []
    attend = TiledPrefill.attend

    def noting(self: TiledPrefill, *args: object) -> None:
        splits.append(self.splits)
        attend(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TiledPrefill, "attend", noting)
    rope = rope_table(shape.head_size, 16, device)
    outputs = warm_up_link(kv_cache, rope, shape, CudaWorkspace(64 << 20, device))
    assert [count > 1 for count in splits] == [False, True]
    assert all(not output.any() for output in outputs)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("unrotated", [False, True])
def test_decode_is_warmed_up(
    kv_cache: Tensor, shape: HeadShape, device: str, unrotated: bool, shared: bool
) -> None:
    rope = rope_table(shape.head_size, 16, device)
    if shared:
        table = SharedRequestTable(2, 4, device, shape, unrotated=unrotated, parts_bytes=1 << 16)
        batch: DecodeBatch = SharedDecodeBatch(table, 2, shape, rope)
    else:
        batch = DecodeBatch(RequestTable(2, 4, device, unrotated=unrotated), 2, shape, rope)
    output = warm_up_decode(kv_cache, batch)
    assert output.shape == (1, shape.num_heads, shape.head_size)
    assert not output.any()

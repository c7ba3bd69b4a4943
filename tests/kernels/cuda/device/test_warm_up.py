"""What is compiled before the first request."""

import pytest
import torch

from picbench.kernels.bench.gpu.scene import rope_table
from picbench.kernels.cuda import warm_up
from picbench.kernels.cuda.tiles import Tiles
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.shape import HeadShape


def test_every_way_to_launch_tiles_is_warmed_up(
    shape: HeadShape, device: str, head_major: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    attend = Tiles.attend

    def noting(self: Tiles, *args: object) -> None:
        pieces.append(self.pieces)
        attend(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Tiles, "attend", noting)
    rope = rope_table(shape.head_size, 16, device)
    workspace = CudaWorkspace(64 << 20, device)
    # Fewer blocks than the longest request has: the least pool is smaller.
    inner = (shape.num_kv_heads, 16) if head_major else (16, shape.num_kv_heads)
    cache = torch.zeros(3, *inner, 2 * shape.head_size, dtype=shape.dtype, device=device)
    if not head_major:
        cache = cache.transpose(1, 2)
    outputs = warm_up.warm_up_link(cache, rope, shape, workspace)
    assert [count > 1 for count in pieces] == [False, True]
    assert all(not output.any() for output in outputs)

"""What is compiled before the first request."""

import pytest
import torch

from picbench.kernels.cuda.prefill import warm_up
from picbench.kernels.cuda.prefill.tiled import TiledPrefill
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.shape import HeadShape
from picbench.measure.kernels.scene import rope_table


def test_every_way_to_launch_tiles_is_warmed_up(
    shape: HeadShape, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits: list[int] = []
    attend = TiledPrefill.attend

    def noting(self: TiledPrefill, *args: object) -> None:
        splits.append(self.splits)
        attend(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TiledPrefill, "attend", noting)
    rope = rope_table(shape.head_size, 16, device)
    workspace = CudaWorkspace(64 << 20, device)
    outputs = warm_up.warm_up_link(rope, shape, workspace, torch.device(device))
    assert [count > 1 for count in splits] == [False, True]
    assert all(not output.any() for output in outputs)

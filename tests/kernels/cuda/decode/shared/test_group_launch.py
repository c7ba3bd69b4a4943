"""How the kernel of groups is launched."""

import pytest
import torch
from hopper import compiled

from picbench.kernels.cuda.decode.shared.group_rows import FEW_ROWS, GroupRows
from picbench.kernels.cuda.decode.shared.shared_decode import GroupLaunch
from picbench.kernels.shape import HeadShape

#: Of a multiprocessor, what a program may have.
SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize(
    ("kind", "size", "unrotated"), [("fp32", 128, True), ("bf16", 256, False)], ids=str
)
def test_the_largest_launches_fit_an_h200(kind: str, size: int, unrotated: bool) -> None:
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    shape = HeadShape(32, 8, size, dtype)
    launch, layout = GroupLaunch.of(shape, unrotated=unrotated), GroupRows.of(shape.group)
    types = dict.fromkeys(["groups", "control", "counter", "place"], "*i32")
    types |= dict.fromkeys(["query", "key", "value", "parts"], f"*{kind}")
    types |= {"cos_sin": "*fp32", "part_lse": "*fp32", "scale": "fp32"}
    fixed = {
        "WIDTH": layout.width,
        "HEADS": shape.num_heads,
        "HEAD": size,
        "GROUP": shape.group,
        "ROWS": launch.rows,
        "FEW": FEW_ROWS,
        "CELL": layout.cell_blocks,
        "READERS": layout.readers,
        "ROTARY": size,
        "NEOX": True,
        "KEYS": launch.keys,
        "UNROTATED": unrotated,
        "PRECISION": "ieee" if kind == "fp32" else "tf32",
    }
    shared = compiled(
        "picbench.kernels.cuda.decode.shared.group_attention",
        "attend_groups",
        types,
        fixed,
        warps=launch.warps,
        stages=launch.stages,
    )
    assert shared <= SHARED_BYTES

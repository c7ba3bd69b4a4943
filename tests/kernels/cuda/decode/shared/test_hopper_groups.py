"""Groups of readers: which heads the Gluon kernel serves, and that both kernels compile for Hopper.

Gluon has no interpreter. `attend_groups`, which reads the same groups, runs in Triton's, and
device/test_shared_decode.py holds both to the reference on a GPU.
"""

import pytest
import torch
from hopper import compiled

from picbench.experiments.scenes import rope_table
from picbench.kernels.cuda import device
from picbench.kernels.cuda.decode.shared.group_rows import FEW_ROWS, GroupRows
from picbench.kernels.cuda.decode.shared.shared_decode import GroupLaunch, SharedDecodeBatch, covers
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.support import describe
from picbench.kernels.shape import HeadShape

#: Of a multiprocessor, what a program may have.
SHARED_BYTES = 227 * 1024
LLAMA = HeadShape(32, 8, 128, torch.bfloat16)


def table(
    shape: HeadShape = LLAMA, *, unrotated: bool = False, layout: GroupRows | None = None
) -> SharedRequestTable:
    return SharedRequestTable(
        2, 8, "cpu", shape, unrotated=unrotated, layout=layout, parts_bytes=1 << 16
    )


@pytest.mark.parametrize(
    ("shape", "rows", "covered"),
    [
        (LLAMA, table(), True),
        (HeadShape(16, 1, 64, torch.float16), table(HeadShape(16, 1, 64, torch.float16)), True),
        (HeadShape(7, 1, 128, torch.float16), table(HeadShape(7, 1, 128, torch.float16)), True),
        (HeadShape(32, 8, 128, torch.float32), table(), False),
        (HeadShape(32, 8, 256, torch.bfloat16), table(), False),
        (LLAMA, table(unrotated=True), False),
        (LLAMA, table(layout=GroupRows(32, 49)), False),
    ],
    ids=["llama", "16", "7", "float32", "256", "unrotated", "readers"],
)
def test_what_the_kernel_serves(
    monkeypatch: pytest.MonkeyPatch, shape: HeadShape, rows: SharedRequestTable, covered: bool
) -> None:
    monkeypatch.setattr(device, "runs_gluon", lambda: True)
    rope = rope_table(shape.head_size, 16, "cpu")
    assert covers(shape, rope, rows) is covered
    assert SharedDecodeBatch(rows, 1, shape, rope).gluon_groups is covered
    assert not SharedDecodeBatch(rows, 1, shape, rope, gluon=False).gluon_groups
    without = GroupLaunch(gluon=False)
    assert not SharedDecodeBatch(rows, 1, shape, rope, launch=without).gluon_groups
    kind = "Gluon" if covered else "Triton"
    assert describe(shape, rope, rows).startswith(f"decode: {kind} groups beside ")


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("bf16", LLAMA), ("fp16", HeadShape(7, 1, 64, torch.float16))],
    ids=["llama", "fp16"],
)
def test_kernel_compiles_for_hopper_without_a_gpu(kind: str, shape: HeadShape) -> None:
    fixed = sizes(shape) | {"STAGES": GroupLaunch.of(shape).buffers}
    made = compiled("decode.shared.hopper_groups", "attend_groups_hopper", kind, fixed)
    assert made <= SHARED_BYTES


@pytest.mark.parametrize(
    ("kind", "size", "unrotated"), [("fp32", 128, True), ("bf16", 256, False)], ids=str
)
def test_the_largest_launches_of_triton_fit_an_h200(kind: str, size: int, unrotated: bool) -> None:
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    shape = HeadShape(32, 8, size, dtype)
    launch = GroupLaunch.of(shape, unrotated=unrotated)
    fixed = sizes(shape) | {
        "ROWS": launch.rows,
        "FEW": FEW_ROWS,
        "ROTARY": size,
        "NEOX": True,
        "KEYS": launch.keys,
        "UNROTATED": unrotated,
        "PRECISION": "ieee" if kind == "fp32" else "tf32",
    }
    options = {"warps": launch.warps, "stages": launch.stages}
    made = compiled("decode.shared.group_attention", "attend_groups", kind, fixed, **options)
    assert made <= SHARED_BYTES


def sizes(shape: HeadShape) -> dict[str, object]:
    """What is fixed when a kernel of groups is compiled for these heads."""
    layout = GroupRows.of(shape.group)
    return {
        "WIDTH": layout.width,
        "HEADS": shape.num_heads,
        "HEAD": shape.head_size,
        "GROUP": shape.group,
        "CELL": layout.cell_blocks,
        "READERS": layout.readers,
    }

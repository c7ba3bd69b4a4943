"""Groups of readers on Hopper: which heads the Gluon kernel serves, and that it compiles.

Gluon has no interpreter. `attend_groups`, which reads the same groups, runs in Triton's, and
device/test_shared_decode.py holds both to the reference on a GPU.
"""

import pytest
import torch
from hopper import compiled

from picbench.experiments.scenes import rope_table
from picbench.kernels.cuda import device
from picbench.kernels.cuda.decode.shared.group_launch import GroupLaunch, covers
from picbench.kernels.cuda.decode.shared.group_rows import GroupRows
from picbench.kernels.cuda.decode.shared.shared_decode import SharedDecodeBatch
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
    layout = GroupRows.of(shape.group)
    types = dict.fromkeys(["groups", "control", "place"], "*i32")
    types |= dict.fromkeys(["query", "key", "value", "parts"], f"*{kind}")
    types |= {"cos_sin": "*fp32", "part_lse": "*fp32", "scale": "fp32"}
    fixed = {
        "WIDTH": layout.width,
        "HEADS": shape.num_heads,
        "HEAD": shape.head_size,
        "GROUP": shape.group,
        "CELL": layout.cell_blocks,
        "READERS": layout.readers,
        "STAGES": GroupLaunch.of(shape).buffers,
    }
    module = "picbench.kernels.cuda.decode.shared.hopper_groups"
    assert compiled(module, "attend_groups_hopper", types, fixed) <= SHARED_BYTES

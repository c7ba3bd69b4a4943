"""Decode on Hopper: which heads it serves, and that it compiles; outputs are in device/test_decode.

Gluon has no interpreter. `split_kv.decode_tiles`, which reads the same tables, runs in
Triton's.
"""

import pytest
import torch
from hopper import compiled

from picbench.experiments.scenes import rope_table
from picbench.kernels.cuda import device
from picbench.kernels.cuda.decode import attention as decode
from picbench.kernels.cuda.decode.attention import DecodeBatch
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.support import describe
from picbench.kernels.shape import HeadShape

LLAMA = HeadShape(32, 8, 128, torch.bfloat16)


def table(*, unrotated: bool = False, tile_blocks: int = 4) -> RequestTable:
    return RequestTable(2, 8, "cpu", unrotated=unrotated, tile_blocks=tile_blocks)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "runs_gluon", lambda: True)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("shape", "rotary", "rows", "covered"),
    [
        (LLAMA, 128, table(), True),
        (HeadShape(16, 1, 64, torch.float16), 64, table(), True),
        (HeadShape(17, 1, 64, torch.float16), 64, table(), False),
        (HeadShape(32, 8, 96, torch.bfloat16), 96, table(), False),
        (HeadShape(32, 8, 128, torch.float32), 128, table(), False),
        (LLAMA, 64, table(), False),
        (LLAMA, 128, table(unrotated=True), False),
        (LLAMA, 128, table(tile_blocks=8), False),
    ],
    ids=["llama", "group of 16", "of 17", "heads of 96", "float32", "partial", "unrotated", "tile"],
)
def test_what_the_kernel_serves(
    shape: HeadShape, rotary: int, rows: RequestTable, covered: bool
) -> None:
    rope = rope_table(rotary, 16, "cpu")
    assert decode.covers(shape, rope, rows) is covered
    if covered:
        assert DecodeBatch(rows, 1, shape, rope).gluon
        assert not DecodeBatch(rows, 1, shape, rope, gluon=False).gluon


@pytest.mark.usefixtures("hopper")
def test_the_engine_says_what_serves() -> None:
    rope = rope_table(128, 16, "cpu")
    served = describe(LLAMA, rope, table())
    assert served.startswith("decode: Gluon split-KV; link: paged prefill in place, or gather")
    apart = describe(LLAMA, rope, table(unrotated=True))
    assert apart.startswith("decode: Triton split-KV; link: gather")


def test_other_devices_are_served_by_triton() -> None:
    if torch.cuda.is_available():
        pytest.skip("asks what a machine without a GPU does")
    assert not decode.covers(LLAMA, rope_table(128, 16, "cpu"), table())


@pytest.mark.parametrize(
    ("kind", "size", "group"),
    [("bf16", 128, 4), ("fp16", 64, 16), ("bf16", 128, 16)],
    ids=["bf16", "fp16", "group of 16"],
)
def test_kernel_compiles_for_hopper_without_a_gpu(kind: str, size: int, group: int) -> None:
    fixed = {"HEADS": 32, "SIZE": size, "GROUP": group, "COLUMNS": max(8, group)}
    shared = compiled("decode.hopper_decode", "decode_transposed", kind, fixed)
    # Three programs, and 1 KiB of the system's for each, must fit 228 KiB of a multiprocessor.
    assert 3 * (shared + 1024) <= 228 * 1024

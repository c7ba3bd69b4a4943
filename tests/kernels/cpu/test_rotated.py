"""Keys cached with RoPE give the same outputs as keys cached without."""

from dataclasses import replace

import pytest
import torch
from paged_cases import BACKENDS, Layout, make_case, relative_error

from picbench.kernels.cpu.kernel_calls import InPlaceCall
from picbench.kernels.shape import HeadShape

SMALL = HeadShape(4, 2, 64, torch.float32)
# Whole blocks: vLLM's kernel needs finite values in the unused end of a block read in place.
PLAIN = Layout(list(range(48)), 7, [5, 1, 3], affine=True)
PLANNED = Layout([*range(40, 56), *range(4, 20), *range(4), *range(20, 40), 56], 3, [0, 2, 4, 6])


def _compare(layouts: list[Layout], rotated: list[Layout], use_vllm: bool) -> None:
    expected = make_case(layouts, SMALL).expected()
    assert relative_error(make_case(rotated, SMALL).run(use_vllm), expected) <= 1e-5


@BACKENDS
def test_plain_request_read_in_place(use_vllm: bool) -> None:
    _compare([PLAIN], [replace(PLAIN, rotated=True)], use_vllm)


@BACKENDS
@pytest.mark.parametrize("queries", [1, 3])
def test_slot_by_slot(use_vllm: bool, queries: int) -> None:
    layout = replace(PLANNED, queries=queries)
    computed = torch.arange(len(layout.kpos)) >= 32
    _compare([layout], [replace(layout, rotated=computed)], use_vllm)


@BACKENDS
def test_all_kinds_in_one_batch(use_vllm: bool) -> None:
    decode = replace(PLAIN, queries=1, blocks=[10, 11, 12])
    layouts = [
        decode,
        replace(PLAIN, blocks=[13, 14, 15]),
        PLANNED,
        replace(PLAIN, blocks=[7, 8, 9]),
    ]
    rotated = [replace(layout, rotated=layout.affine) for layout in layouts]
    _compare(layouts, rotated, use_vllm)


def test_nothing_is_copied_for_requests_read_in_place() -> None:
    pytest.importorskip("vllm")
    batch = make_case([replace(PLAIN, rotated=True)], SMALL).build()
    assert [type(call) for call in batch.calls] == [InPlaceCall]

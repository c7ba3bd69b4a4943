"""Visible blocks list each visible slot once, in tiles of one RoPE shift."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from picbench.errors import EngineError
from picbench.experiments.scenes import Slots, planned
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.visible_blocks import VisibleBlocks
from picbench.kernels.paging import BLOCK_SIZE, GAP


@st.composite
def slots(draw: st.DrawFn) -> Slots:
    return planned(
        draw(st.lists(st.integers(1, 150), max_size=5)),
        linked=draw(st.integers(0, 40)),
        text=draw(st.integers(1, 60)),
        anchor=draw(st.sampled_from([0, 7])),
    )


@given(request=slots(), grown=st.integers(0, 200), width=st.sampled_from([1, 4]))
def test_every_visible_slot_is_read_once(request: Slots, grown: int, width: int) -> None:
    kpos, rope_shift = request.kpos.numpy(), request.rope_shift.numpy()
    visible = VisibleBlocks.of(kpos, rope_shift, width)
    length = len(kpos) + grown
    read = visible.slots(length // BLOCK_SIZE + 1 + visible.blocks.size).reshape(-1, BLOCK_SIZE)
    bits = np.full(len(read), (1 << BLOCK_SIZE) - 1)
    bits[: visible.seen.size] = visible.seen.flatten()
    shown = (bits[:, None] >> np.arange(BLOCK_SIZE)) & 1 == 1
    found = read[shown & (read >= 0) & (read < length)]
    wanted = np.flatnonzero(np.append(kpos, np.zeros(grown)) != GAP)
    assert np.sort(found).tolist() == wanted.tolist()


@given(request=slots())
def test_a_tile_has_one_shift(request: Slots) -> None:
    rope_shift = request.rope_shift.numpy()
    visible = VisibleBlocks.of(request.kpos.numpy(), rope_shift, 4)
    for blocks, shift in zip(visible.blocks, visible.rope_shift, strict=True):
        for block in blocks[blocks >= 0]:
            inside = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
            shown = request.kpos.numpy()[inside] != GAP
            assert (rope_shift[inside][shown] == shift).all()


def test_shifts_that_differ_within_a_block_are_refused() -> None:
    table = RequestTable(1, 4, "cpu")
    kpos = torch.arange(16, dtype=torch.int32)
    with pytest.raises(EngineError, match="different distances"):
        table.put(0, kpos, kpos)


def test_a_request_that_the_table_cannot_hold_is_refused() -> None:
    table = RequestTable(1, 1, "cpu")
    request = planned([20] * 4, linked=0, text=1)
    with pytest.raises(EngineError, match="exceed"):
        table.put(0, request.kpos, request.rope_shift)

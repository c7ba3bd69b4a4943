"""Logical order and runs of queries, and how decode and link divide their work."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from picbench.errors import ConfigError
from picbench.experiments.scenes import rope_table
from picbench.kernels.cuda.decode.attention import choose_splits
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder, runs
from picbench.kernels.cuda.support import describe, require
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import GAP
from picbench.kernels.shape import HeadShape


@given(
    positions=st.lists(st.integers(0, 300), max_size=60, unique=True),
    hidden=st.sets(st.integers(0, 59)),
    queries=st.lists(st.integers(0, 310), min_size=1, max_size=20),
)
def test_a_query_sees_the_keys_up_to_its_position(
    positions: list[int], hidden: set[int], queries: list[int]
) -> None:
    kpos = [GAP if i in hidden else position for i, position in enumerate(positions)]
    slots = torch.tensor(kpos, dtype=torch.int32)
    order = LogicalOrder.of(slots, slots + 5)
    seen = order.seen(np.array(queries, np.int32))
    for query, count in zip(queries, seen, strict=True):
        wanted = {i for i, position in enumerate(kpos) if position <= query}
        assert set(order.keys(count)[0].tolist()) == wanted
    found, shifts = order.keys(len(order))
    assert shifts.tolist() == [kpos[slot] + 5 for slot in found]


def test_padding_queries_see_one_key_at_most() -> None:
    kpos = torch.tensor([3, GAP, 1], dtype=torch.int32)
    assert LogicalOrder.of(kpos, kpos).seen(np.array([GAP, 0, 2], np.int32)).tolist() == [1, 0, 1]


@given(seen=st.lists(st.integers(0, 30), min_size=1, max_size=40))
def test_runs_are_causal_sequences(seen: list[int]) -> None:
    starts, ends = runs(np.array(seen, np.int32))
    told = [
        end - (last - 1 - i)
        for first, last, end in zip(starts, starts[1:], ends, strict=False)
        for i in range(first, last)
    ]
    assert told == seen


@pytest.mark.parametrize("pairs", [1, 8, 32, 128, 512, 2048, 5000])
def test_splits_fill_the_device(pairs: int) -> None:
    splits = choose_splits(pairs, resident=396)
    waves = pairs * splits / 396
    assert waves / -(-waves // 1) > 0.9 or splits == 64


def test_unsupported_heads_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="size 80"):
        require(HeadShape(4, 2, 80, torch.bfloat16))
    with pytest.raises(ConfigError, match="float64"):
        require(HeadShape(4, 2, 64, torch.float64))
    shape = HeadShape(4, 2, 64, torch.float32)
    require(shape)
    served = describe(shape, rope_table(64, 8, "cpu"), RequestTable(1, 4, "cpu"))
    assert "FlashAttention-3 not usable" in served and "Triton split-KV" in served


def test_workspace_passes_divide_the_heads() -> None:
    workspace = CudaWorkspace(6 * 2 * 100 * 64 * 2, "cpu")
    assert workspace.heads(100, 8, 64, torch.float16) == 4
    assert workspace.heads(100, 6, 64, torch.float16) == 6
    assert workspace.heads(10_000, 6, 64, torch.float16) == 1


def test_a_workspace_gives_no_more_than_it_has() -> None:
    workspace = CudaWorkspace(4 * (6 + 2), "cpu")
    partial, lse = workspace.floats((2, 3), (2,))
    assert partial.shape == (2, 3) and lse.shape == (2,)
    partial.fill_(1.0)
    lse.fill_(2.0)
    assert partial.sum() == 6
    with pytest.raises(ConfigError, match="36 bytes, not 32"):
        workspace.floats((9,))


@given(
    pieces=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(0, 2)), max_size=8)
)
def test_slots_are_in_the_order_of_a_stable_sort(pieces: list[tuple[int, int, int]]) -> None:
    """Whether or not runs overlap."""
    slots = [s for at, n, gaps in pieces for s in (*range(at, at + n), *(GAP,) * gaps)]
    kpos = torch.tensor(slots, dtype=torch.int32)
    wanted = sorted((i for i, at in enumerate(slots) if at != GAP), key=slots.__getitem__)
    for shift in (0, 1):  # without and with RoPE
        found, shifts = LogicalOrder.of(kpos, kpos + shift).keys(len(slots))
        assert found.tolist() == wanted
        assert shifts.tolist() == [slots[i] + shift for i in wanted]
        assert found.dtype == shifts.dtype == np.int32

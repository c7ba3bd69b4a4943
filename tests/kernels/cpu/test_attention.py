"""Attention of random paged batches against the float64 reference, and what `store` writes."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import (
    BACKENDS,
    TOLERANCE,
    Layout,
    PagedCase,
    make_case,
    relative_error,
    rope_table,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from picbench.kernels.cpu import attention, kernel_calls
from picbench.kernels.cpu.attention import AttentionBatch, attend, store
from picbench.kernels.cpu.kernel_calls import InPlaceCall
from picbench.kernels.cpu.reference import attend_reference
from picbench.kernels.cpu.scratch import Workspace
from picbench.kernels.paging import BLOCK_SIZE, GAP, split
from picbench.kernels.shape import HeadShape

SMALL = HeadShape(4, 2, 64, torch.float32)
BLOCKS = 5


@st.composite
def planned(draw: st.DrawFn) -> Layout:
    """Canonical chunk blocks anywhere in the prompt, then computed tokens in logical order.

    Pads and replaced slots are GAP, and a computed token stands in for each replaced one.
    """
    chunks = draw(st.lists(st.integers(1, 40), min_size=0, max_size=4))
    texts = draw(st.lists(st.integers(0, 9), min_size=len(chunks) + 1, max_size=len(chunks) + 1))
    texts[-1] = max(1, texts[-1])
    linked = draw(st.integers(0, 20))
    canonical, computed, position = [], [], 0
    for length, text in zip([0, *chunks], texts, strict=True):
        slots = list(range(position, position + length))
        computed += slots[:linked]
        canonical.append([GAP] * min(linked, length) + slots[linked:] + [GAP] * (-length % 16))
        computed += range(position + length, position + length + text)
        position += length + text
    order = draw(st.permutations(canonical))
    kpos = [slot for chunk in order for slot in chunk] + computed
    return Layout(kpos, draw(st.integers(1, len(computed))), _blocks(draw, len(kpos)))


@st.composite
def plain(draw: st.DrawFn) -> Layout:
    """A request without chunks, at any stage of its prefill or decode."""
    length = draw(st.integers(1, 100))
    blocks = _blocks(draw, length)
    return Layout(list(range(length)), draw(st.integers(1, length)), blocks, affine=True)


def _blocks(draw: st.DrawFn, slots: int) -> list[int]:
    count = -(-slots // BLOCK_SIZE)
    return draw(st.lists(st.integers(0, 30), min_size=count, max_size=count, unique=True))


def apart(layouts: list[Layout]) -> list[Layout]:
    """The layouts, each with blocks of its own."""
    return [
        Layout(one.kpos, one.queries, [31 * i + block for block in one.blocks], one.affine)
        for i, one in enumerate(layouts)
    ]


@BACKENDS
@settings(max_examples=60)
@given(
    layouts=st.lists(planned() | plain(), min_size=1, max_size=3).map(apart),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    size=st.sampled_from([64, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_batch_equals_the_reference(
    use_vllm: bool,
    layouts: list[Layout],
    heads: tuple[int, int],
    size: int,
    dtype: torch.dtype,
) -> None:
    case = make_case(layouts, HeadShape(*heads, size, dtype))
    assert relative_error(case.run(use_vllm), case.expected()) <= TOLERANCE[dtype]


@BACKENDS
@settings(max_examples=40)
@given(layout=planned() | plain(), cut=st.integers(1, 99))
def test_chunked_prefill_equals_one_shot(use_vllm: bool, layout: Layout, cut: int) -> None:
    case = make_case([layout], SMALL)
    first = cut % layout.queries
    whole = case.run(use_vllm)
    late = layout.queries - first
    tail = make_case([Layout(layout.kpos, late, layout.blocks, layout.affine)], SMALL)
    assert torch.equal(tail.kv_cache.nan_to_num(), case.kv_cache.nan_to_num())
    split = type(tail)(SMALL, tail.rope, tail.layouts, case.query[first:], case.kv_cache)
    assert relative_error(split.run(use_vllm), whole[first:]) <= 1e-5


@BACKENDS
@settings(max_examples=40)
@given(layouts=st.lists(planned() | plain(), min_size=2, max_size=4).map(apart))
def test_a_batch_equals_its_requests_alone(use_vllm: bool, layouts: list[Layout]) -> None:
    case = make_case(layouts, SMALL)
    together = case.run(use_vllm)
    start = 0
    for layout in layouts:
        stop = start + layout.queries
        alone = type(case)(SMALL, case.rope, (layout,), case.query[start:stop], case.kv_cache)
        assert relative_error(alone.run(use_vllm), together[start:stop]) <= 1e-6
        start = stop


@BACKENDS
def test_a_chunk_that_occurs_twice_is_read_twice(use_vllm: bool) -> None:
    chunk = 16
    kpos = [*range(20, 20 + chunk), *range(chunk), *range(chunk, 20), *range(36, 40)]
    case = make_case([Layout(kpos, 8, [3, 3, 5])], SMALL)
    assert relative_error(case.run(use_vllm), case.expected()) <= 1e-5


@BACKENDS
def test_one_request_sees_a_block_that_another_sees_elsewhere(use_vllm: bool) -> None:
    near = Layout([*range(16), *range(16, 20)], 2, [2, 0])
    far = Layout([*range(100, 116), *range(8)], 3, [2, 1])
    case = make_case([near, far], SMALL)
    assert relative_error(case.run(use_vllm), case.expected()) <= 1e-5


def test_what_chunks_are_compiled_after_is_gathered_once() -> None:
    pytest.importorskip("vllm")
    jobs = [Layout([*range(45), *[GAP] * 3], 16, [7, 8, own]) for own in (0, 3, 5)]
    blind = Layout([GAP] * 20, 3, [1, 2])
    case = make_case([*jobs[:2], blind, jobs[2], Layout([*range(9, 29)], 2, [7, 9])], SMALL)
    [call] = case.build().calls
    assert isinstance(call, kernel_calls.GatheredCall)
    # The last one has the first block at other positions.
    assert call.gather.num_blocks == 2 + 3 + 2
    found, real = case.run(use_vllm=True), case.description["qpos"] != GAP
    assert bool(found.isfinite().all())
    assert relative_error(found[real], case.expected()[real]) <= 1e-5
    for number in (0, 1, 3):
        start = case.description["query_start"][number]
        alone = make_case([case.layouts[number]], SMALL)
        alone = replace(alone, query=case.query[start : start + 16], kv_cache=case.kv_cache)
        assert torch.equal(alone.run(use_vllm=True), found[start : start + 16])


@BACKENDS
def test_no_more_is_gathered_together_than_there_is_room_for(
    use_vllm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_TOGETHER", 64)
    case = make_case(
        [replace(PLANNED, blocks=[4 * n + b for b in range(4)]) for n in range(3)], SMALL
    )
    assert len(case.build(use_vllm).calls) == 3
    assert relative_error(case.run(use_vllm), case.expected()) <= 1e-5


@BACKENDS
def test_padding_queries_are_finite(use_vllm: bool) -> None:
    layout = Layout([*range(16), *range(16, 24), *[GAP] * 8, 24, 25], 18, [1, 2, 0])
    case = make_case([layout], SMALL)
    found, expected = case.run(use_vllm), case.expected()
    real = case.description["qpos"] != GAP
    assert bool(found.isfinite().all())
    assert relative_error(found[real], expected[real]) <= 1e-5


@BACKENDS
@pytest.mark.parametrize("qpos", [[2], [2, 2, 2], [2, 9, 7, 2]])
def test_a_query_that_sees_nothing_gets_zeros(use_vllm: bool, qpos: list[int]) -> None:
    case = make_case([Layout([*range(5, 25)], len(qpos), [1, 0])], SMALL)
    found = _attend_from(case, qpos, use_vllm)
    description = dict(case.description, qpos=torch.tensor(qpos))
    expected = attend_reference(case.query, case.kv_cache, **description, scale=case.scale)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(found[0], torch.zeros_like(found[0]))


@BACKENDS
def test_a_lone_padding_query_is_finite(use_vllm: bool) -> None:
    case = make_case([Layout([*range(20), *[GAP] * 12], 1, [1, 0])], SMALL)
    assert bool(_attend_from(case, [GAP], use_vllm).isfinite().all())


@BACKENDS
def test_padding_queries_that_come_before_all_tokens_are_finite(use_vllm: bool) -> None:
    """All slots are padding as well, and nobody has written to them."""
    found = make_case([Layout([GAP] * 20, 3, [1, 0])], SMALL).run(use_vllm)
    assert bool(found.isfinite().all())


def _attend_from(case: PagedCase, qpos: list[int], use_vllm: bool) -> Tensor:
    """Attention of the case's queries at other positions."""
    batch = AttentionBatch.build(
        **dict(case.description, qpos=torch.tensor(qpos, dtype=torch.int32)),
        affine=[False],
        shape=case.shape,
        use_vllm=use_vllm,
    )
    out = torch.full_like(case.query, float("nan"))
    return attend(case.query, case.kv_cache, batch, case.scale, out)


@BACKENDS
def test_partial_rotary_passes_other_dimensions_through(use_vllm: bool) -> None:
    layouts = [Layout(list(range(35)), 4, [4, 2, 0], affine=True), Layout([*range(9)], 1, [7])]
    case = make_case(layouts, SMALL, rope=rope_table(32))
    assert relative_error(case.run(use_vllm), case.expected()) <= 1e-5


def test_uncovered_shapes_fall_back_to_torch() -> None:
    shape = HeadShape(2, 1, 48, torch.float32)
    case = make_case([Layout(list(range(40)), 5, [1, 3, 2], affine=True)], shape)
    assert relative_error(case.run(), case.expected()) <= 1e-5


def test_heads_are_taken_in_passes_where_scratch_is_scarce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    shape = HeadShape(8, 4, 64, torch.float32)
    layouts = [Layout(list(range(50)), 1, [1, 3, 2, 9], affine=True)]
    case = make_case(
        [*layouts, Layout([*range(40, 56), *range(20), *range(56, 60)], 1, [0, 4, 5])], shape
    )
    monkeypatch.setattr(kernel_calls, "_SCRATCH_BYTES", 2 * 64 * 2 * 64 * 4)
    passes = [
        call.kv_heads for call in case.build().calls if isinstance(call, kernel_calls.GatheredCall)
    ]
    assert passes == [2, 2]
    assert relative_error(case.run(), case.expected()) <= 1e-5


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


@given(st.lists(plain(), min_size=1, max_size=4).map(apart))
@settings(deadline=None)
def test_a_step_of_plain_requests_needs_no_positions(layouts: list[Layout]) -> None:
    pytest.importorskip("vllm")
    case = make_case([replace(layout, rotated=True) for layout in layouts], SMALL)
    case.kv_cache.nan_to_num_()
    bounds = [0, *accumulate(layout.queries for layout in layouts)]
    tables = [torch.tensor(layout.blocks, dtype=torch.int32) for layout in layouts]
    batch = AttentionBatch.of_plain(
        query_start=torch.tensor(bounds, dtype=torch.int32),
        seq_lens=torch.tensor([len(layout.kpos) for layout in layouts], dtype=torch.int32),
        block_table=pad_sequence(tables, batch_first=True),
        shape=SMALL,
        workspace=Workspace(),
    )
    found = attend(case.query, case.kv_cache, batch, 0.125, torch.empty_like(case.query))
    usual = attend(case.query, case.kv_cache, case.build(), 0.125, torch.empty_like(case.query))
    assert torch.equal(found, usual)
    assert [type(call) for call in batch.calls] == [InPlaceCall]


@given(
    slots=st.lists(st.integers(0, BLOCKS * BLOCK_SIZE - 1), max_size=30, unique=True),
    skipped=st.sets(st.integers(0, 29)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([48, 64, 128]),
)
def test_only_named_slots_change(
    slots: list[int], skipped: set[int], dtype: torch.dtype, size: int
) -> None:
    mapping = torch.tensor([-1 if i in skipped else slot for i, slot in enumerate(slots)]).long()
    key, value = torch.randn(2, len(slots) + 3, 2, size).to(dtype)
    kv_cache = torch.full((BLOCKS, 2, BLOCK_SIZE, 2 * size), float("nan"), dtype=dtype)
    store(key, value, kv_cache, mapping)
    wanted = torch.full((2, BLOCKS * BLOCK_SIZE, 2, size), float("nan"), dtype=dtype)
    kept = mapping >= 0
    wanted[:, mapping[kept]] = torch.stack([key[: len(slots)][kept], value[: len(slots)][kept]])
    for half, expected in zip(split(kv_cache), wanted, strict=True):
        found = half.transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_strided_slot_mapping_is_read_with_its_strides() -> None:
    mapping = torch.tensor([[3, 9], [20, 9], [40, 9]])[:, 0]
    key = torch.randn(3, 2, 64)
    kv_cache = torch.zeros(BLOCKS, 2, BLOCK_SIZE, 128)
    store(key, key, kv_cache, mapping)
    assert torch.equal(split(kv_cache)[0][mapping // 16, :, mapping % 16], key)


def test_both_ways_to_store_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    key, value = torch.randn(2, 7, 2, 64)
    slots = torch.tensor([5, 70, -1, 33, 2, -1, 16])
    by_vllm, by_torch = torch.zeros(2, BLOCKS, 2, BLOCK_SIZE, 128)
    store(key, value, by_vllm, slots)
    monkeypatch.setattr(attention.vllm_ops, "covers", lambda head_size, dtype: False)
    store(key, value, by_torch, slots)
    assert torch.equal(by_vllm, by_torch)

"""Paged prefill: queries read the key tiles that they see, and the kernel compiles."""

from typing import Any

import numpy as np
import pytest
import torch
from hopper import compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_prefill_cases import expected, paged_prefill_of, tiles_of
from references import paged_reference

from picbench.experiments.scenes import (
    Slots,
    draw,
    plain,
    planned,
    relative_error,
    rope_table,
)
from picbench.kernels.cuda import device
from picbench.kernels.cuda.prefill import link
from picbench.kernels.cuda.prefill.link import LinkBatch, LinkRequest
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder
from picbench.kernels.cuda.prefill.paged import hopper_prefill, paged_prefill
from picbench.kernels.cuda.prefill.paged.key_tiles import KEYS, LOOSE, KeyTiles
from picbench.kernels.cuda.prefill.paged.tile_schedule import (
    START,
    TileSchedule,
    _makespan,
    query_tiles,
)
from picbench.kernels.cuda.prefill.tiled import TiledPrefill
from picbench.kernels.cuda.warm_up import warm_up_link
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_SIZE, GAP
from picbench.kernels.shape import HeadShape
from picbench.kernels.slot_runs import SlotRuns

requests = st.builds(
    planned,
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    linked=st.sampled_from([0, 4, 16, 40]),
    text=st.integers(1, 70),
    anchor=st.sampled_from([0, 30]),
)


@given(requests)
def test_each_visible_slot_is_in_one_tile(slots: Slots) -> None:
    tiles = tiles_of(slots.kpos, slots.rope_shift)
    seen = tiles.slots[tiles.slots >= 0]
    assert sorted(seen) == torch.nonzero(slots.kpos != GAP).flatten().tolist()
    kpos, rope_shift = slots.kpos.numpy(), slots.rope_shift.numpy()
    for own, at, shift in zip(tiles.slots, tiles.kpos, tiles.rope_shift, strict=True):
        real = own >= 0
        assert (at[real] == kpos[own[real]]).all() and (at[~real] == GAP).all()
        assert (rope_shift[own[real]] == shift).all()
        blocks = own.reshape(-1, BLOCK_SIZE)
        assert all(len(set(block[block >= 0] // BLOCK_SIZE)) <= 1 for block in blocks)


@given(requests)
def test_whole_tiles_show_their_first_keys(slots: Slots) -> None:
    tiles = tiles_of(slots.kpos, slots.rope_shift)
    whole = tiles.highest != GAP
    for at, shown, highest in zip(
        tiles.kpos[whole], tiles.shown[whole], tiles.highest[whole], strict=True
    ):
        assert shown >= KEYS - LOOSE
        assert ((at != GAP) == (np.arange(KEYS) < shown)).all()
        assert at[:shown].max() == highest
    assert (tiles.lowest == tiles.kpos.min(1)).all()


@given(
    st.lists(requests, min_size=1, max_size=3),
    st.sampled_from([2, 8, 32]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([1, 3, 12]),
)
def test_each_query_reads_the_tiles_that_it_sees(
    several: list[Slots], tokens: int, programs: int, most: int
) -> None:
    found, kpos, qpos, base = [], [], [], 0
    for slots in several:
        keys = tiles_of(slots.kpos, slots.rope_shift)
        at = slots.kpos[-slots.computed :].numpy()
        found.extend(query_tiles(keys, at, sum(map(len, qpos)), base, tokens))
        kpos.append((keys, base))
        qpos.append(at)
        base += len(keys.rope_shift)
    at = np.concatenate(qpos)
    schedule = TileSchedule.of(found, len(at), programs, most)
    assert schedule.max_splits <= most
    made: dict[int, list[tuple[int, bool]]] = {i: [] for i in range(len(at))}
    counted = np.zeros(len(at), int)
    for first, queries, begin, masked, common, count, split in schedule.work.tolist():
        assert 0 <= masked <= common <= count and split < schedule.splits[first]
        counted[first : first + queries] += 1
        for i in range(queries):
            mine = range(common if i < tokens // 2 else count)
            made[first + i] += [(int(schedule.key_tiles[begin + n]), n < masked) for n in mine]
    assert (counted == schedule.splits).all()
    start = 0
    for slots, (keys, begin) in zip(several, kpos, strict=True):
        for i in range(start, start + slots.computed):
            seen = {begin + int(n) for n in np.flatnonzero(keys.lowest <= at[i])}
            names = [tile for tile, _ in made[i]]
            assert seen <= set(names) and len(names) == len(set(names))
            assert all(keys.highest[tile - begin] <= at[i] for tile, mask in made[i] if not mask)
        start += slots.computed


@settings(max_examples=15)
@given(
    st.lists(requests, min_size=1, max_size=2),
    st.sampled_from([(4, 2), (7, 1), (3, 3)]),
    st.sampled_from([1 << 22, 1 << 12]),
)
def test_schedule_and_shifts_give_the_reference(
    several: list[Slots], heads: tuple[int, int], room: int
) -> None:
    shape = HeadShape(*heads, 16, torch.float32)
    rope = rope_table(16, 4096, "cpu")
    scene = draw(several, shape, rope, device="cpu", poison=True)
    query = scene.queries(sum(slots.computed for slots in several))
    work = paged_prefill_of(scene, room)
    found = paged_reference(query, scene.kv_cache, work, scene.scale)
    assert relative_error(found, expected(scene, query)) < 1e-6


def test_pads_see_nothing() -> None:
    kpos = torch.tensor([*range(40), *[GAP] * 8, *range(40, 50)], dtype=torch.int32)
    slots = Slots(kpos, torch.zeros_like(kpos), 18)
    shape = HeadShape(4, 2, 16, torch.float32)
    scene = draw([slots], shape, rope_table(16, 64, "cpu"), device="cpu", poison=True)
    query = scene.queries(18)
    work = paged_prefill_of(scene)
    found = paged_reference(query, scene.kv_cache, work, scene.scale)
    assert not found[:8].any()
    assert relative_error(found, expected(scene, query)) < 1e-6


def test_keys_cached_without_rope_have_no_tiles() -> None:
    slots = planned([100], linked=4, text=9, unrotated=True)
    assert KeyTiles.of(SlotRuns.of(slots.kpos.numpy(), slots.rope_shift.numpy())) is None


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 40))
def test_programs_that_all_run_at_once_end_with_the_longest(counts: list[int], more: int) -> None:
    splits = np.ones(len(counts), int)
    found = _makespan(np.array(counts), splits, len(counts) + more)
    assert found == max(counts) + START
    assert _makespan(np.array(counts), splits, 1) == pytest.approx(
        sum(counts) + len(counts) * START
    )


def test_query_tiles_are_split_until_the_gpu_is_full() -> None:
    slots = plain(32768, 256)
    keys = tiles_of(slots.kpos, slots.rope_shift)
    tail = list(query_tiles(keys, np.arange(32512, 32768, dtype=np.int32), 0, 0, 32))
    assert len(TileSchedule.of(tail, 256, 16).work) == 16
    assert len(TileSchedule.of(tail[:1], 32, 16).work) == 12
    assert len(TileSchedule.of(tail * 10, 256, 16).work) == 80


@pytest.mark.parametrize(
    ("new", "context", "served"), [(256, 32768, "paged"), (2048, 32768, "tiles")]
)
def test_few_queries_are_prefilled_in_place_and_many_have_keys_copied(
    monkeypatch: pytest.MonkeyPatch, new: int, context: int, served: str
) -> None:
    monkeypatch.setattr(device, "runs_gluon", lambda: True)
    monkeypatch.setattr(link.flash, "covers", lambda _: False)
    shape = HeadShape(32, 8, 128, torch.bfloat16)
    slots = plain(context, new)
    order = LogicalOrder.of(slots.kpos, slots.rope_shift)
    request = LinkRequest(0, 0, new, order, slots.kpos[-new:])
    table = torch.arange(slots.blocks, dtype=torch.int32)[None]
    rope = rope_table(128, context, "cpu")
    workspace = CudaWorkspace(256 << 20, "cpu")
    assert LinkBatch.build([request], table, rope, shape, workspace).served_by == served
    for options, by in (({"copied": True}, "tiles"), ({"most_tiles": 64}, "paged")):
        again = LinkBatch.build([request], table, rope, shape, workspace, **options)  # type: ignore[arg-type]
        assert again.served_by == by


def test_paged_prefill_that_cannot_pay_is_not_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "runs_gluon", lambda: True)
    monkeypatch.setattr(KeyTiles, "of", lambda *_: pytest.fail("key tiles were made"))
    slots = plain(2048, 1024)
    order = LogicalOrder.of(slots.kpos, slots.rope_shift)
    request = LinkRequest(0, 0, 1024, order, slots.kpos[-1024:])
    table = torch.arange(slots.blocks, dtype=torch.int32)[None]
    shape, room = HeadShape(32, 8, 128, torch.bfloat16), CudaWorkspace(64 << 20, "cpu")
    monkeypatch.setattr(link.flash, "covers", lambda _: True)
    monkeypatch.setattr(link.flash.Runs, "scheduled", lambda self, *_: self)
    built = LinkBatch.build([request], table, rope_table(128, 2048, "cpu"), shape, room)
    assert built.served_by == "FA3"


class Launches(list[dict[str, object]]):
    """Replaces the kernel and records, by launch, what Triton would compile it for."""

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, *arguments: Any, **fixed: object) -> None:
        aligned = [a.data_ptr() % 16 for a in arguments if isinstance(a, torch.Tensor)]
        # The last one, `splits`, is not specialised.
        ints = [(a == 1, a % 16) for a in arguments[:-1] if isinstance(a, int)]
        self.append({**fixed, "aligned": aligned, "ints": ints})


@pytest.mark.parametrize("head_major", [False, True], ids=["token-major", "head-major"])
def test_every_way_to_launch_paged_prefill_is_warmed_up(
    monkeypatch: pytest.MonkeyPatch, head_major: bool
) -> None:
    launches = Launches()
    monkeypatch.setattr(device, "runs_gluon", lambda: True)
    monkeypatch.setattr(hopper_prefill, "attend_paged", launches)
    monkeypatch.setattr(paged_prefill, "merge_splits", lambda *_: None)
    monkeypatch.setattr(TiledPrefill, "attend", lambda *_: None)
    monkeypatch.setattr(link, "gather", lambda *_: None)
    shape = HeadShape(32, 8, 128, torch.bfloat16)
    rope, room = rope_table(128, 4096, "cpu"), CudaWorkspace(64 << 20, "cpu")

    def launched(slots: Slots, *, head_major: bool = head_major) -> dict[str, object]:
        scene = draw([slots], shape, rope, device="cpu", head_major=head_major)
        query = scene.queries(slots.computed)
        paged_prefill_of(scene).attend(query, scene.kv_cache, 1.0, torch.empty_like(query))
        return launches.pop()

    served = [launched(plain(40, 8)), launched(plain(4000, 64))]
    assert [made["SPLIT"] for made in served] == [False, True]
    assert launched(plain(40, 8), head_major=not head_major) not in served
    cache = draw([plain(40, 8)], shape, rope, device="cpu", head_major=head_major).kv_cache
    warm_up_link(cache, rope, shape, room)
    assert list(launches) == served


@pytest.mark.parametrize(
    ("kind", "size", "split"), [("bf16", 128, True), ("fp16", 64, False)], ids=["bf16", "fp16"]
)
def test_kernel_compiles_for_hopper_without_a_gpu(kind: str, size: int, split: bool) -> None:
    fixed = {"SIZE": size, "GROUP": 4, "PADDED": 4, "SPLIT": split, "FLAT": split}
    shared = compiled("prefill.paged.hopper_prefill", "attend_paged", kind, fixed)
    assert shared <= 232_448  # 227 KiB, what a program may have of an H200's multiprocessor

"""What the workers derive from one slot map, against plans and slot by slot."""

import pickle
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.algorithms import parse
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.pages import GAP
from picbench.engines.planning.plan import Plan
from picbench.engines.planning.policy import (
    Anchor,
    ChunkPolicy,
    Deviation,
    DeviationSelection,
    LayoutConfig,
    Pad,
    Segment,
)
from picbench.engines.vllm.worker.cpu.slot_positions import PositionTable
from picbench.engines.vllm.worker.cuda.planned_requests import PlannedRequests
from picbench.engines.vllm.worker.slot_map import SLOT_MAP, Pickable, Runs, SlotMap, arranged_tokens
from picbench.errors import EngineError

BLOCK = 16
GENERATED = 3


def plan(algorithm: str, *segments: Segment) -> Plan:
    chosen = parse(algorithm)
    layout = LayoutConfig(block_size=BLOCK, scope="", pad=chosen.pads, pad_token=0, bos_token=1)
    arranged = chosen.arrange(segments, layout)
    return lay_out(arranged, chosen.plan_chunk, layout, prefix_keys=[])


def text(count: int, first: int = 0) -> Segment:
    return Segment(tuple(range(first, first + count)))


def chunk(count: int, first: int) -> Segment:
    return Segment(tuple(range(first, first + count)), chunk=True)


def slot_by_slot(runs: Runs) -> list[int]:
    return [GAP if first == GAP else first + i for first, count in runs for i in range(count)]


def rope_shifts(sent: SlotMap) -> list[int]:
    runs = sent.slot_runs()
    shifts: list[int] = runs.shifts(0, len(runs)).tolist()
    return shifts


def test_a_step_of_plain_requests_has_vllms_own_positions() -> None:
    sent = SlotMap.plain(16)
    table = PositionTable(64, plain_steps=True)
    maps = {"a": None, "b": None, "c": sent}
    assert table.step(["a", "b"], maps, [0, 5], [3, 1]) is None
    assert table.step(["a", "c"], maps, [0, 5], [3, 1]) is not None
    assert table.step(["b"], {"b": None}, [6], [1]) is None and not table._planned
    for other in (PositionTable(64), PositionTable(64, keys_without_rope=True, plain_steps=True)):
        assert other.step(["a"], maps, [0], [3]) is not None


def params(slot_map: SlotMap | None) -> Any:
    extra_args = {SLOT_MAP: slot_map} if slot_map is not None else None
    return SimpleNamespace(extra_args=extra_args, max_tokens=GENERATED)


def check_workers(sent: SlotMap) -> None:
    """Every visible key is read at its logical position, on either device."""
    planned, cached_at = slot_by_slot(sent.position_runs), slot_by_slot(sent.cached_at_runs)
    positions = planned + [sent.end + i for i in range(GENERATED)]
    cached_at += [GAP] * GENERATED
    canonical = [at != GAP for at in cached_at]
    seen = [p if p != GAP else 0 for p in positions]
    count = len(positions)

    step = PositionTable(count + 5).step(["a"], {"a": sent}, [0], [count])
    assert step is not None
    assert step.queries.tolist() == positions
    assert step.rotary.tolist() == seen
    cached = [0 if own else p for p, own in zip(seen, canonical, strict=True)]
    assert step.keys.tolist() == cached
    (slots,) = step.requests
    assert not isinstance(slots.with_rope, bool)
    assert slots.with_rope[:count].tolist() == [not own for own in canonical]

    requests = PlannedRequests(1, None)
    requests.add("a", params(sent), len(planned))
    batch = requests.batch(["a"], [0], [count])
    shifts = [0] * count
    if batch is None:  # read in place: a chunk that is compiled alone
        assert [p for p in planned if p != GAP] == list(range(sent.end))
    else:
        assert batch.logical(0).tolist() == positions
        assert batch.positions().tolist() == seen
        (request,) = batch.known.requests
        assert request is not None
        shifts = request.rope_shifts(count).tolist()
    for position, at, shift in zip(positions, cached_at, shifts, strict=True):
        if position != GAP:
            assert position == (position if at == GAP else at) + shift


@st.composite
def maps(draw: st.DrawFn) -> SlotMap:
    """Slots in runs of any kind: hidden or visible, computed or canonical."""
    position = st.one_of(st.just(GAP), st.integers(0, 1 << 20))
    runs = draw(st.lists(st.tuples(position, position, st.integers(1, 40)), min_size=1))
    slots = sum(count for _, _, count in runs)
    return SlotMap(
        tuple((first, count) for first, _, count in runs),
        tuple((first, count) for _, first, count in runs),
        draw(st.integers(slots + 1, 1 << 21)),
    )


@given(maps())
def test_both_workers_derive_what_the_map_says_of_each_slot(sent: SlotMap) -> None:
    check_workers(sent)


def check(found: Plan) -> None:
    """A plan's map says of every slot where it is seen, and where a chunk's key was compiled."""
    sent = SlotMap.of(found)
    compiled = {
        page.name: page.positions for canonical in found.canonicals for page in canonical.pages
    }
    assert slot_by_slot(sent.position_runs) == found.positions
    cached_at = slot_by_slot(sent.cached_at_runs)
    assert len(cached_at) == len(found.positions)
    for index, page in enumerate(found.pages):
        at = cached_at[index * BLOCK :][: len(page.tokens)]
        if not page.canonical:
            assert at == [GAP] * len(page.tokens)
            continue
        there = compiled.get(page.copy_of or page.name, page.positions)
        assert GAP not in at
        assert [a if p != GAP else GAP for a, p in zip(at, there, strict=True)] == list(there)
    check_workers(sent)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    tokens = st.lists(st.integers(3, 900), min_size=1, max_size=70).map(tuple)
    segment = st.builds(Segment, tokens, chunk=st.booleans())
    segments = draw(st.lists(segment, min_size=1, max_size=6))
    seed, private = draw(st.integers(0, 1 << 16)), draw(st.booleans())
    anchor, pad = (
        draw(st.sampled_from([Anchor(), Anchor(head=True), Anchor(bos=4)])),
        draw(st.sampled_from(list(Pad))),
    )
    fixed = anchor == Anchor() and draw(st.booleans())
    if pad is Pad.MASKED:
        gaps = draw(st.lists(st.integers(0, 50), min_size=len(segments), max_size=len(segments)))
        ends = accumulate(len(s.tokens) + gap for s, gap in zip(segments, gaps, strict=True))
        segments = [
            replace(s, position=end - len(s.tokens)) for s, end in zip(segments, ends, strict=True)
        ]

    def plan_chunk(index: int, length: int) -> ChunkPolicy:
        linked = [i for i in range(length) if hash((seed, index, i // BLOCK, i % 5)) % 3 == 0]
        return ChunkPolicy(linked, anchor, private, fixed)

    return lay_out(segments, plan_chunk, LayoutConfig(BLOCK, "", pad, pad_token=0, bos_token=1))


@given(plans())
def test_maps_of_plans_and_of_their_compiles(found: Plan) -> None:
    check(found)
    for canonical in found.canonicals:
        check(canonical.compile_plan())


def test_chunks_are_re_rotated_to_where_they_begin() -> None:
    found = plan("naive", text(5), chunk(20, 100), chunk(40, 200), text(3, 300))
    shifts = [5] * 20 + [0] * 12 + [25] * 40 + [0] * 8 + [0] * 8
    assert rope_shifts(SlotMap.of(found)) == shifts
    check(found)


@pytest.mark.parametrize(
    "algorithm",
    [
        "naive",
        "naive:anchor=head",
        "naive:pad=paper",
        "epic:k=0",
        "epic:k=16",
        "mepic",
        "mepic:pad=paper:anchor=head",
        "prompt-cache",
        "block-attention",
        "kvlink:n=5",
        "epic:k=4:bos=chunk",
    ],
)
def test_every_algorithm(algorithm: str) -> None:
    check(
        plan(
            algorithm,
            text(21),
            chunk(150, 100),
            chunk(35, 400),
            text(7, 30),
            chunk(150, 100),
            text(9, 60),
        )
    )


def test_a_chunk_that_leads_the_prompt_is_read_as_it_is_cached() -> None:
    assert not any(rope_shifts(SlotMap.of(plan("naive", chunk(32, 100), text(4)))))


def test_chunks_at_fixed_positions_are_read_as_they_are_cached() -> None:
    prompt = text(5), replace(chunk(40, 100), position=64), replace(text(4), position=300)
    found = plan("prompt-cache", *prompt)
    assert not any(rope_shifts(SlotMap.of(found)))
    assert rope_shifts(SlotMap.of(plan("naive", *prompt)))[:40] == [64] * 40
    [canonical] = found.canonicals
    assert next(canonical.compile_plan().position_runs()) == (64, 40)
    check(found)


def test_compile_requests_are_not_re_rotated() -> None:
    found = plan("naive:anchor=head", text(5), chunk(20, 100), text(3, 300))
    [canonical] = found.canonicals
    compiling = SlotMap.of(canonical.compile_plan())
    assert not any(rope_shifts(compiling))
    assert compiling.canonical().tolist() == [False] * 16 + [True] * 20


def test_maps_travel_to_workers_in_sampling_parameters() -> None:
    from vllm import SamplingParams

    sent = SlotMap.of(plan("mepic", text(5), chunk(40, 100), text(3)))
    params = SamplingParams(extra_args={SLOT_MAP: sent})
    assert SlotMap.sent(pickle.loads(pickle.dumps(params))) == sent
    assert SlotMap.sent(params) is sent


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {SLOT_MAP: [1, 2]}])
def test_other_requests_have_no_map(extra_args: Any) -> None:
    assert SlotMap.sent(SimpleNamespace(extra_args=extra_args)) is None
    assert SlotMap.sent(None) is None


tokens = st.lists(st.integers(3, 900), min_size=1, max_size=40).map(tuple)
prompts = st.lists(st.builds(Segment, tokens=tokens, chunk=st.booleans()), min_size=1, max_size=5)


def pickable(prompt: Any, share: float) -> tuple[Pickable, Any] | None:
    selection = DeviationSelection(share, Deviation.KEYS)
    plan = lay_out(
        prompt,
        lambda index, length: ChunkPolicy(private=True, selection=selection),
        LayoutConfig(16),
    )
    return (Pickable.of(SlotMap.of(plan), plan.tokens), plan) if plan.picks else None


@given(prompts, st.floats(0, 1), st.randoms(use_true_random=False))
def test_every_token_has_one_slot_whatever_is_picked(prompt: Any, share: float, dice: Any) -> None:
    found = pickable(prompt, share)
    if found is None:
        return
    before, plan = found
    flat = [token for segment in prompt for token in segment.tokens]
    assert before.prompt.tolist() == flat
    picked = np.array(
        sorted(dice.sample(range(len(before.slots)), before.picks.count)), dtype=np.int64
    )
    after = before.arrange(picked)
    assert len(after.positions) == len(plan.tokens)
    seen = after.positions[after.positions != GAP]
    assert sorted(seen.tolist()) == list(range(len(flat)))
    # Computed slots are in logical order, hold the right tokens, and end with the prompt's last.
    computed = after.positions[after.first :]
    assert (np.diff(computed) > 0).all()
    assert [flat[p] for p in computed] == after.tokens.tolist()
    assert set(before.positions[before.slots[picked]].tolist()) <= set(computed.tolist())
    # The other copied slots still hold what was copied into them.
    kept = after.positions[: after.first] != GAP
    assert [plan.tokens[i] for i in np.flatnonzero(kept)] == [
        flat[p] for p in after.positions[: after.first][kept]
    ]


def test_tokens_of_a_part_of_the_slots() -> None:
    found = pickable([Segment((5, 6, 7), chunk=True), Segment((8, 9))], 0.5)
    assert found is not None
    after = found[0].arrange(np.array([1]))
    assert after.first == 16
    assert after.tokens.tolist() == [6, 8, 9]
    found_in = [
        arranged_tokens([None, after], [3, start], [2, n])
        for start, n in ((15, 3), (18, 7), (19, 1))
    ]
    assert [[(place, part.tolist()) for place, part in found] for found in found_in] == [
        [(3, [6, 8])],
        [(2, [9])],
        [],
    ]


def test_slots_that_leave_out_a_token_are_an_error() -> None:
    slot_map = SlotMap(((0, 3),), ((0, 2), (GAP, 1)), 4, picks=pickable_picks())
    with pytest.raises(EngineError, match="3 of 4 prompt tokens have slots"):
        Pickable.of(slot_map, [1, 2, 3])


def pickable_picks() -> Any:
    found = pickable([Segment((5, 6, 7), chunk=True), Segment((8, 9))], 0.5)
    assert found is not None
    return found[0].picks

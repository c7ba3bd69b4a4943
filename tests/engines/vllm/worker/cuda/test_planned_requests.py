from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from picbench.engines.planning.pages import GAP
from picbench.engines.planning.policy import Deviation, Picks
from picbench.engines.vllm.worker.cuda.planned_batch import PlannedBatch
from picbench.engines.vllm.worker.cuda.planned_requests import (
    LEAST_SAVED,
    PlainPrefixes,
    PlannedRequests,
)
from picbench.engines.vllm.worker.slot_map import Pickable
from picbench.errors import EngineError
from picbench.kernels.cuda.visible_blocks import CanonicalBlocks


class FakeTable:
    """Remembers what was written to which row."""

    shares = False

    def __init__(self) -> None:
        self.written: dict[int, tuple[list[int], list[int]]] = {}
        self.canonical: dict[int, tuple[list[int], list[int]]] = {}

    def put(
        self, row: int, kpos: Tensor, rope_shift: Tensor, canonical: CanonicalBlocks | None
    ) -> None:
        assert canonical is not None
        self.written[row] = kpos.tolist(), rope_shift.tolist()
        self.canonical[row] = canonical.ids.tolist(), canonical.chunk_shift.tolist()

    def clear(self, row: int) -> None:
        self.canonical.pop(row, None)


#: A chunk of two hidden and two visible slots at 6 and 7, then computed slots.
POSITIONS = [GAP, GAP, 6, 7, 0, 1, 2, 8]
SHIFTS = [(0, 4, 4)]


@pytest.fixture
def table() -> FakeTable:
    return FakeTable()


@pytest.fixture
def requests(table: FakeTable, send: Any) -> PlannedRequests:
    requests = PlannedRequests(2, table)
    requests.add("planned", send(POSITIONS, 9, SHIFTS), 8)
    requests.add("plain", send(None), 5)
    return requests


def step(requests: PlannedRequests, *rows: tuple[str, int, int]) -> PlannedBatch:
    batch = requests.batch(*zip(*rows, strict=True))
    assert batch is not None
    return batch


def decode(requests: PlannedRequests, *names: str) -> None:
    """A step in which these requests compute one token after their prompts."""
    step(requests, *((name, 10_000, 1) for name in names))


def test_rows_are_written_when_their_requests_first_decode(
    requests: PlannedRequests, table: FakeTable
) -> None:
    step(requests, ("planned", 0, 4), ("plain", 4, 1))
    step(requests, ("planned", 4, 1))
    assert not table.written
    step(requests, ("planned", 7, 1))
    assert list(table.written.values()) == [(POSITIONS, [0, 0, 4, 4, 0, 0, 0, 0])]
    table.written.clear()
    step(requests, ("planned", 8, 1))
    assert not table.written


def test_plain_steps_have_no_batch(requests: PlannedRequests) -> None:
    assert requests.batch(["plain", "unknown"], [0, 3], [5, 1]) is None


def test_positions_of_a_mixed_step(requests: PlannedRequests) -> None:
    batch = step(requests, ("plain", 4, 1), ("planned", 2, 6))
    assert batch.known.planned.tolist() == [False, True]
    assert batch.positions().tolist() == [4, 6, 7, 0, 1, 2, 8]
    assert batch.logical(1).tolist() == [6, 7, 0, 1, 2, 8]


def test_pads_get_position_zero(requests: PlannedRequests) -> None:
    batch = step(requests, ("planned", 0, 3))
    assert batch.positions().tolist() == [0, 0, 6]
    assert batch.logical(0).tolist() == [GAP, GAP, 6]


def test_generated_tokens_continue_at_the_end(requests: PlannedRequests) -> None:
    batch = step(requests, ("planned", 7, 3))
    assert batch.positions().tolist() == [8, 9, 10]
    request = batch.known.requests[0]
    assert request is not None
    assert request.rope_shifts(10).tolist() == [0, 0, 4, 4, 0, 0, 0, 0, 0, 0]


def test_only_requests_that_see_all_their_slots_decode(requests: PlannedRequests) -> None:
    assert step(requests, ("plain", 3, 1), ("planned", 7, 1)).leading == 2
    assert step(requests, ("planned", 12, 1), ("plain", 0, 5)).leading == 1
    assert step(requests, ("planned", 6, 1), ("plain", 3, 1)).leading == 0


def test_vllms_attention_serves_long_plain_prefills_and_then_all_plain_requests(
    requests: PlannedRequests,
) -> None:
    for tokens, stock in ((1024, False), (1025, True)):
        batch = step(requests, ("plain", 3, 1), ("planned", 2, 6), ("plain", 0, tokens))
        assert (batch.stock, batch.decoded) == (stock, 0 if stock else 1)
        batch = step(requests, ("planned", 9, 1), ("plain", 3, 1), ("plain", 0, tokens))
        assert (batch.stock, batch.decoded) == (stock, 2)
    assert step(requests, ("planned", 6, 1), ("plain", 3, 1)).stock
    later = ("plain", 1024, 512), ("planned", 2, 6)
    assert not step(requests, *later, ("other", 0, 512)).stock
    assert step(requests, *later, ("other", 0, 513)).stock


def test_plain_requests_decode_together_with_planned_ones(requests: PlannedRequests) -> None:
    batch = step(requests, ("plain", 3, 1), ("planned", 2, 6))
    assert (batch.stock, batch.decoded) == (False, 1)
    batch = step(requests, ("plain", 3, 1), ("planned", 9, 1))
    assert (batch.stock, batch.decoded) == (False, 2)
    assert batch.positions().tolist() == [3, 10]


def test_removed_requests_free_their_rows(requests: PlannedRequests, send: Any) -> None:
    requests.remove("planned")
    requests.remove("never there")
    assert "planned" not in requests
    for name in ("a", "b"):
        requests.add(name, send(POSITIONS, 9, SHIFTS), 8)
    with pytest.raises(EngineError, match="no row"):
        requests.add("c", send(POSITIONS, 9, SHIFTS), 8)


@pytest.mark.parametrize("bare", [False, True])
def test_the_table_is_told_which_blocks_are_canonical(send: Any, bare: bool) -> None:
    """Those that the request does not compute; they are known until it ends."""
    table = FakeTable()
    requests = PlannedRequests(2, table, keys_without_rope=bare)
    positions = [*range(40, 56), *range(56, 63), *[GAP] * 9, *range(3)]
    params = send(positions, 63, [(0, 32, 40)])
    requests.add("planned", params, len(positions), [7, 9, 4])
    decode(requests, "planned")
    row = min(table.written)
    assert table.canonical[row] == ([7, 9], [40] * 23 + [0] * 9)
    requests.add("unknown blocks", params, len(positions))
    decode(requests, "unknown blocks")
    assert [ids for ids, _ in table.canonical.values()] == [[7, 9], []]
    requests.remove("planned")
    assert row not in table.canonical


def test_a_resumed_request_keeps_one_row(requests: PlannedRequests, send: Any) -> None:
    for _ in range(3):
        requests.add("planned", send(POSITIONS, 9, SHIFTS), 10)
    assert "planned" in requests


@pytest.mark.parametrize("pads", [0, 3])
def test_chunks_compiled_alone_are_ordinary(
    requests: PlannedRequests, send: Any, pads: int
) -> None:
    positions = [*range(16 - pads), *[GAP] * pads]
    requests.add("compile", send(positions, 16 - pads, max_tokens=1), 16)
    assert "compile" not in requests


def test_a_request_that_generates_after_pads_is_not(requests: PlannedRequests, send: Any) -> None:
    requests.add("pads", send([0, 1, 2, GAP], 3, max_tokens=2), 4)
    assert "pads" in requests


def test_anchored_compiles_are_not(requests: PlannedRequests, send: Any) -> None:
    requests.add("anchored", send([0, 1, GAP, GAP, 2, 3, 4, GAP], 5, max_tokens=1), 8)
    assert "anchored" in requests


def test_no_request_without_rope_runs_as_a_plain_one(table: FakeTable, send: Any) -> None:
    requests = PlannedRequests(1, table, keys_without_rope=True)
    requests.add("one token", send(None), 1)
    assert "one token" in requests


def test_keys_without_rope_make_every_request_planned(table: FakeTable, send: Any) -> None:
    requests = PlannedRequests(2, table, keys_without_rope=True)
    requests.add("plain", send(None, max_tokens=2), 3)
    decode(requests, "plain")
    assert list(table.written.values()) == [([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])]
    requests.add("planned", send(POSITIONS, 9, SHIFTS, max_tokens=1), 8)
    decode(requests, "planned")
    kpos, shifts = table.written[min(table.written)]
    assert kpos == [*POSITIONS, 9]
    assert shifts == [0, 0, 6, 7, 0, 1, 2, 8, 9]


#: A chunk at 2 to 5, of which two tokens are picked, reserved slots, text before and after.
UNPICKED = [2, 3, 4, 5, GAP, GAP, 0, 1, 6, 7]
TOKENS = [12, 13, 14, 15, 99, 99, 10, 11, 16, 17]


@pytest.mark.parametrize("bare", [False, True])
def test_picked_requests_are_arranged_anew(table: FakeTable, send: Any, bare: bool) -> None:
    requests = PlannedRequests(2, table, keys_without_rope=bare)
    picks = Picks(2, Deviation.VALUES, single=True)
    requests.add("picks", send(UNPICKED, 8, [(0, 4, 2)], max_tokens=2, picks=picks), 10)
    assert list(requests.slot_maps) == ["picks"]
    pickable = Pickable.of(requests.slot_maps["picks"], TOKENS)
    requests.arrange("picks", pickable.arrange(np.array([1, 3])))
    kpos = [2, GAP, 4, GAP, 0, 1, 3, 5, 6, 7]
    decode(requests, "picks")
    if bare:
        assert table.written[1] == ([*kpos, 8, 9], [2, 0, 4, 0, 0, 1, 3, 5, 6, 7, 8, 9])
    else:
        assert table.written[1] == (kpos, [2, 0, 2, 0, 0, 0, 0, 0, 0, 0])
    batch = step(requests, ("other", 3, 1), ("picks", 4, 4), ("other too", 0, 2))
    assert [(start, ids.tolist()) for start, ids in batch.tokens()] == [(1, [10, 11, 13, 15])]
    assert batch.logical(1).tolist() == [0, 1, 3, 5]
    later = step(requests, ("picks", 8, 2), ("other", 0, 2))
    assert [(start, ids.tolist()) for start, ids in later.tokens()] == [(0, [16, 17])]
    assert list(step(requests, ("picks", 10, 1)).tokens()) == []
    requests.remove("picks")
    assert not requests.slot_maps


def test_a_request_with_picks_is_never_run_as_a_plain_one(table: FakeTable, send: Any) -> None:
    requests = PlannedRequests(2, table)
    requests.add(
        "picks", send([0, 1, 2, 3], 4, [(0, 2, 0)], picks=Picks(0, Deviation.KEYS, single=True)), 4
    )
    assert "picks" in requests
    requests.add("static", send([0, 1, 2, 3], 4, [(0, 2, 0)]), 4)
    assert "static" not in requests


def test_a_step_says_whether_its_requests_share(
    requests: PlannedRequests, table: FakeTable
) -> None:
    assert not step(requests, ("planned", 8, 1)).shares
    table.shares = True
    assert step(requests, ("planned", 9, 1)).shares


CELL = 2


def prefixes(*requests: tuple[str, int, list[int]]) -> PlainPrefixes:
    found = PlainPrefixes(CELL)
    for name, prompt, blocks in requests:
        found.add(name, prompt, 8, blocks)
    return found


def test_those_with_a_cell_in_common_wait() -> None:
    found = prefixes(("a", 70, [1, 2, 3, 4, 5]), ("b", 70, [1, 2, 6, 7, 8]), ("c", 70, [9, 2, 3]))
    assert found.waiting == {"a", "b"}
    assert found.take("a", 69) is None
    taken = found.take("a", 70)
    assert taken is not None
    assert taken.blocks == (1, 2, 3, 4)
    assert found.waiting == {"b"}
    found.remove("a")
    assert not found.waiting


def test_a_cell_must_be_full_and_of_the_prompt() -> None:
    assert not prefixes(("a", 31, [1, 2]), ("b", 31, [1, 2])).waiting
    assert not prefixes(("a", 80, [1]), ("b", 80, [1])).waiting


def test_little_that_is_shared_does_not_pay() -> None:
    long = [("long", 16 * 400, list(range(100, 500)))]
    pair = [(name, 48, [1, 2, 3]) for name in "ab"]
    assert prefixes(*pair).waiting == {"a", "b"}
    assert not prefixes(*pair, *long).waiting


def test_a_request_that_comes_back_has_the_blocks_that_it_has_now() -> None:
    found = prefixes(("a", 40, [1, 2]), ("b", 40, [1, 2]))
    found.add("b", 40, 8, [3, 4])
    assert not found.waiting


# Blocks of a tree: what precedes a block is known from it.
PROMPTS = st.lists(st.integers(1, 2), max_size=7).map(
    lambda turns: [int("".join(map(str, turns[: i + 1]))) for i in range(len(turns))]
)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), PROMPTS), max_size=30))
def test_counts_are_those_of_the_requests_that_run(
    events: list[tuple[int, bool, list[int]]],
) -> None:
    found, running = PlainPrefixes(CELL), dict[str, list[int]]()
    for number, comes, blocks in events:
        name = str(number)
        if comes:
            found.add(name, 16 * len(blocks), 8, blocks)
            running[name] = blocks
        else:
            found.remove(name)
            running.pop(name, None)
        total = sum(map(len, running.values()))
        cells = [tuple(b[: i + CELL]) for b in running.values() for i in range(0, len(b) - 1, CELL)]
        saved = CELL * (len(cells) - len(set(cells)))
        expected = {
            name
            for name, own in running.items()
            if len(own) >= CELL and sum(_common(own, b) >= CELL for b in running.values()) > 1
        }
        assert found.waiting == (expected if saved >= LEAST_SAVED * total else set())


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

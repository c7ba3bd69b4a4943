"""How steps are cut into kernel calls; the kernels themselves have tests of their own."""

from typing import Any

import pytest
import torch

from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.cuda import planned_batch
from picbench.engines.vllm.worker.cuda.kernel_planner import (
    KernelPlanner,
    LinkCall,
    _requests,
    rows_and_lengths,
)
from picbench.engines.vllm.worker.cuda.planned_requests import PlainPrefixes, PlannedRequests
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.decode.shared.sharing_costs import SharingCosts
from picbench.kernels.cuda.prefill.gather_rotated import PAGE
from picbench.kernels.cuda.prefill.link import GatheredPrefill
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

SHAPE = HeadShape(4, 2, 32, torch.float32)
TOKEN_BYTES = 2 * 2 * 32 * 4
POSITIONS = [*range(8, 21), *[GAP] * 3, *range(8), 21, 22, 23]

Pair = tuple[PlannedRequests, KernelPlanner]


def planner(room: int, shape: HeadShape = SHAPE) -> KernelPlanner:
    angles = torch.arange(64).unsqueeze(1) / torch.arange(1, 17)
    rope = RopeTable(torch.cat([angles.cos(), angles.sin()], dim=-1), 32)
    table = RequestTable(4, 8, "cpu")
    return KernelPlanner(table, 4, rope, shape, CudaWorkspace(room * TOKEN_BYTES, "cpu"))


@pytest.fixture
def pair(send: Any) -> Pair:
    made = planner(4 * 128)
    return known(made, send), made


def known(made: KernelPlanner, send: Any) -> PlannedRequests:
    requests = PlannedRequests(4, made.table)
    for name in "xyz":
        requests.add(name, send(POSITIONS, 24), len(POSITIONS))
    return requests


def links(pair: Pair, *rows: tuple[str, int, int]) -> list[tuple[int, int]]:
    """The query ranges of the kernel calls of a step that links only."""
    requests, made = pair
    batch = requests.batch(*zip(*rows, strict=True))
    assert batch is not None
    table = torch.arange(len(rows) * 4, dtype=torch.int32).view(len(rows), 4)
    attention = made.plan(batch, table)
    calls = [call for call in attention.calls if isinstance(call, LinkCall)]
    assert len(calls) == len(attention.calls)
    return [(call.batch.first, call.batch.last) for call in calls]


def test_neighbours_link_in_one_call(pair: Pair) -> None:
    assert links(pair, ("x", 16, 11), ("y", 16, 4)) == [(0, 15)]


def test_a_plain_request_between_them_is_linked_as_well(pair: Pair) -> None:
    assert links(pair, ("x", 16, 11), ("plain", 0, 5), ("y", 16, 4)) == [(0, 20)]


def test_one_that_vllm_serves_cuts_the_call(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_batch, "_FEW_READS", 24)
    assert links(pair, ("x", 16, 11), ("plain", 0, 5), ("y", 16, 4)) == [(0, 11), (16, 20)]


@pytest.mark.parametrize("computed", [0, 20])
def test_a_plain_request_sees_all_that_precedes_it(pair: Pair, computed: int) -> None:
    batch = pair[0].batch(["x", "plain"], [16, computed], [11, 9])
    assert batch is not None
    planned, beside = _requests(batch, 0)
    assert planned is not None and beside is not None
    assert (planned.start, planned.stop, beside.start, beside.stop) == (0, 11, 11, 20)
    assert beside.qpos.tolist() == list(range(computed, computed + 9))
    slots, shifts = beside.order.keys(99)
    assert slots.tolist() == list(range(computed + 9))
    assert not shifts.any()
    assert beside.order.seen(beside.qpos.numpy()).tolist() == (beside.qpos + 1).tolist()


def test_a_single_token_in_the_middle_of_a_prompt_is_linked(pair: Pair) -> None:
    assert links(pair, ("x", 16, 1), ("y", 16, 4)) == [(0, 5)]


def test_calls_are_cut_where_the_workspace_ends(send: Any) -> None:
    made = planner(room=2 * PAGE)
    step = [("x", 16, 11), ("y", 16, 2), ("z", 16, 8)]
    assert links((known(made, send), made), *step) == [(0, 13), (13, 21)]


def test_the_copies_of_a_call_fit_the_workspace(send: Any) -> None:
    """Their pages do, also where there is one KV head and no call can be served head by head."""
    made = planner(room=PAGE, shape=HeadShape(4, 1, 32, torch.float32))
    requests = known(made, send)
    batch = requests.batch(["x", "y", "z"], [16, 16, 16], [11, 2, 8])
    assert batch is not None
    calls = made.plan(batch, torch.zeros(3, 4, dtype=torch.int32)).calls
    copied = []
    for call in calls:
        assert isinstance(call, LinkCall)
        assert isinstance(call.batch.prefill, GatheredPrefill)
        copied.append(len(call.batch.prefill.slots))
    assert copied == [2 * PAGE, PAGE]
    assert max(copied) * TOKEN_BYTES // 2 <= PAGE * TOKEN_BYTES


def test_what_pads_a_graph_has_no_keys(pair: Pair) -> None:
    batch = pair[0].batch(["y", "plain", "x"], [30, 7, 27], [1, 1, 1])
    assert batch is not None
    assert batch.decodes
    rows = [pair[0].batch([name], [0], [1]).known.requests[0].row for name in "yx"]  # type: ignore[union-attr]
    found = rows_and_lengths(batch, 5, plain_row=4).tolist()
    assert found == [[rows[0], 4, rows[1], 0, 0], [31, 8, 28, -1, -1]]


def test_plain_requests_that_begin_alike_decode_as_planned_ones(send: Any) -> None:
    """Where they decode, and no other step: what they compute of their prompts is vLLM's."""
    table = SharedRequestTable(4, 80, "cpu", SHAPE, costs=SharingCosts.always())
    groups = table.groups_of
    requests = PlannedRequests(3, table, prefixes=PlainPrefixes(2))
    for name, last in (("one", 7), ("two", 8), ("other", 9)):
        blocks = [1, 2, 3, 4, last] if name != "other" else [5, 6, 10, 11, last]
        requests.add(name, send(None), 70, blocks)
    step = ["one", "two", "other"]
    assert requests.batch(step, [69, 64, 69], [1, 6, 1]) is None
    batch = requests.batch(step, [70, 70, 70], [1, 1, 1])
    assert batch is not None
    assert batch.known.planned.tolist() == [True, True, False]
    assert batch.decodes
    assert batch.positions().tolist() == [70, 70, 70]
    assert {shift for *_, shift in groups.covered()} == {0}
    assert sum(row[0] for row in groups.group_rows()) == 4
    requests.remove("one")
    batch = requests.batch(["two", "other"], [71, 71], [1, 1])
    assert batch is not None
    assert batch.known.planned.tolist() == [True, False]
    assert groups.covered() == []
    requests.remove("two")
    assert requests.batch(["other"], [72], [1]) is None
    assert groups.empty


def test_no_more_of_them_are_planned_than_there_are_rows(send: Any) -> None:
    table = SharedRequestTable(2, 80, "cpu", SHAPE, costs=SharingCosts.always())
    requests = PlannedRequests(1, table, prefixes=PlainPrefixes(2))
    for name in "ab":
        requests.add(name, send(None), 70, [1, 2, 3, 4])
    batch = requests.batch(["a", "b"], [70, 70], [1, 1])
    assert batch is not None
    assert batch.known.planned.tolist() == [True, False]
    requests.remove("a")
    assert requests.batch(["b"], [71], [1]) is None


@pytest.mark.parametrize("bare", [False, True])
def test_requests_with_the_same_blocks_read_them_together(send: Any, bare: bool) -> None:
    """For as long as both are there, and under the blocks that they have."""
    table = SharedRequestTable(3, 8, "cpu", SHAPE, unrotated=bare, costs=SharingCosts.always())
    requests, groups = PlannedRequests(2, table, keys_without_rope=bare), table.groups_of
    here = [*range(8, 24), *range(8), 24]
    there = [*range(30, 46), *range(30), 46]
    requests.add("here", send(here, 25, [(0, 16, 8)]), len(here), [5, 1])
    requests.add("there", send(there, 47, [(0, 16, 30)]), len(there), [5, 2, 3])
    assert groups.covered() == []
    requests.batch(["here", "there"], [25, 47], [1, 1])
    assert sorted((row, shift) for row, _, _, shift in groups.covered()) == [(0, 30), (1, 8)]
    requests.remove("here")
    assert groups.covered() == []
    # A preempted request may come back with other blocks, under which it shares nothing.
    requests.add("here", send(here, 25, [(0, 16, 8)]), len(here), [6, 1])
    requests.batch(["here", "there"], [25, 48], [1, 1])
    assert groups.covered() == []
    for name in ("here", "there"):
        requests.remove(name)
    assert groups.empty


def test_what_vllm_serves_is_left_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_batch, "_FEW_READS", 80)
    batch = pair[0].batch(["y", "plain", "prefilled"], [30, 7, 0], [1, 1, 9])
    assert batch is not None
    assert batch.stock
    assert rows_and_lengths(batch, batch.decoded, plain_row=4)[1].tolist() == [31, 0]

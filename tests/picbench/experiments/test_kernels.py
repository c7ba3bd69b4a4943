"""What kernels are measured with: no wrong one is timed, and pages say what was found."""

from typing import Any

import pytest
import torch

from picbench.errors import InvalidRun
from picbench.experiments import kernels, shared_kernels
from picbench.experiments.scenes import decode_errors, draw, plain, require_right, rope_table
from picbench.kernels.cuda.decode.shared.sharing_costs import (
    SharedReads,
    SharingCosts,
    least_readers,
    own_ms,
    pays,
    query_rows,
    shared_ms,
)
from picbench.kernels.shape import HeadShape

NAN = float("nan")


def test_the_largest_error_is_returned() -> None:
    assert require_right("decode", [1e-3, 2e-3, 0.0], torch.bfloat16) == pytest.approx(2e-3)


@pytest.mark.parametrize("errors", [[0.0, 0.02], [NAN, 0.0], [0.0, NAN]], ids=str)
def test_one_that_is_too_large_or_no_number_is_refused(errors: list[float]) -> None:
    with pytest.raises(InvalidRun, match="decode of it: relative error") as refused:
        require_right("decode of it", errors, torch.bfloat16)
    assert "nothing was timed" in refused.value.hint


def test_a_type_has_a_tolerance_of_its_own() -> None:
    with pytest.raises(InvalidRun):
        require_right("decode", [1e-3], torch.float32)


def test_requests_at_both_ends_and_in_the_middle_are_compared() -> None:
    shape = HeadShape(4, 2, 32, torch.float32)
    requests = [plain(20, 1)] * 5
    scene = draw(requests, shape, rope_table(32, 64, "cpu"), device="cpu")
    query = scene.queries(5)
    ends = torch.tensor([19], dtype=torch.int32)
    right = torch.cat([scene.expected(i, query[i : i + 1], ends) for i in range(5)])
    assert decode_errors(scene, query, right) == [0.0, 0.0, 0.0]
    right[1] = right[3] = NAN
    assert decode_errors(scene, query, right) == [0.0, 0.0, 0.0]
    right[4] = 0.0
    assert decode_errors(scene, query, right) == [0.0, 0.0, 1.0]


FACTS = ("gpu", "driver", "cuda", "torch", "triton", "vllm", "seed", "rounds", "commit")
SPREAD = {"median": 0.5, "q25": 0.4, "q75": 0.6}


def test_both_ways_of_link_are_shown_where_both_were_timed() -> None:
    one = {"kind": "link", "form": "runs", "new": 1100, "context": 32768, "served_by": "tiles"}
    one |= {"time_vs_fa3": SPREAD, "prepare_ms": {"link": 0.3, "in place": 0.9, "copied": 0.25}}
    ways = {"fa3": 1.0, "link": 0.75, "in place": 0.625, "copied": 0.751}
    one |= {"ms": {name: {"median": ms} for name, ms in ways.items()}}
    other = one | {"new": 8192, "prepare_ms": {"link": 0.3}}
    other |= {"ms": {name: {"median": ways[name]} for name in ("fa3", "link")}}
    run = dict.fromkeys(FACTS, "x") | {"workspace_bytes": 1 << 29}
    page = kernels.report({"provenance": run, "results": [one, other]})
    spread = "0.50 (0.40-0.60)"
    row = f"| tiles | 1.000 | 0.750 | {spread} | 0.625 | 0.751 | 0.900 | 0.250 |"
    assert f"| runs | 1100 | 32768 {row}" in page
    assert f"| tiles | 1.000 | 0.750 | {spread} | - | - | - | - |" in page


LLAMA = HeadShape(32, 8, 128, torch.bfloat16)


@pytest.mark.parametrize("case", shared_kernels.CASES, ids=lambda case: case.name)
def test_cases_share_as_much_as_they_say(case: shared_kernels.SharedCase) -> None:
    reads = [read.chunks for read in case.reads(seed=3)]
    assert {len(set(own)) for own in reads} == {case.chosen}
    asked = [chunk for own in reads for chunk in own]
    assert len(asked) == case.requests * case.chosen
    assert max(asked) < case.chunks
    assert (len(set(asked)) == len(asked)) == case.apart


def test_the_page_says_what_was_found() -> None:
    arms = ["own", "chosen", *shared_kernels.LAUNCHES, "of groups", "of tiles", "of merge"]
    times = {name: {"median": 1.5, "best": 1.25} for name in arms}
    row = {
        "case": shared_kernels.CASES[0].name,
        "sharing": 32.0,
        "apart": False,
        "errors": {"shared": 2e-3},
        "ms": times,
        "own_over": {"chosen": {"median": 6.5}},
        "read_gb": 3.0,
        "tflop": 0.3,
        "estimate_ms": {"asked": 1.75, "shared": 0.25},
    }
    run: dict[str, Any] = dict.fromkeys(("driver", "cuda", "torch", "triton", "vllm"), "1")
    run |= {"gpu": "H200", "seed": 0, "rounds": 5, "commit": "abc"}
    document = {"provenance": run, "cases": [row], "host": {"comes": 0.25}}
    page = shared_kernels.report(document)
    assert "| 64 x 64 of 128 x 512 + 1104 | 32.0 | - | 1.500" in page
    assert "shared_gb_ms >= 2.00, tflop_ms >= 0.200" in page


def test_the_host_is_timed() -> None:
    found = shared_kernels.grouping_times(rows=4, chosen=3, chunks=5)
    assert list(found) == ["goes", "comes", "changes", "idle"]
    assert all(0 < spent < 1000 for spent in found.values())


@pytest.mark.parametrize(
    ("readers", "group", "rows"),
    [(0, 4, 0), (1, 4, 16), (4, 4, 16), (5, 4, 64), (16, 4, 64), (20, 4, 80), (32, 4, 128)],
)
def test_rows_of_products(readers: int, group: int, rows: int) -> None:
    assert query_rows(readers, group) == rows


def test_a_cell_is_never_shared_by_one() -> None:
    assert least_readers(32, LLAMA, SharingCosts(own_gb_ms=1e-9)) == 2
    assert not pays(SharedReads(), LLAMA, SharingCosts(launch_ms=0.0))


def test_what_many_read_costs_less_once() -> None:
    """64 requests of 64 of 128 chunks of 512 tokens: about what must be read and multiplied."""
    reads = SharedReads()
    for _ in range(128):
        reads = reads.plus(32, 32, LLAMA.group)
    costs = SharingCosts()
    assert pays(reads, LLAMA, costs)
    assert own_ms(reads, LLAMA, costs) == pytest.approx(1.95, rel=0.02)
    assert 0.1 < shared_ms(reads, LLAMA, costs) < 0.25


def test_sharing_does_not_pay_where_merging_costs_more_than_reading() -> None:
    reads = SharedReads().plus(4, 2, LLAMA.group)
    assert pays(reads, LLAMA, SharingCosts(launch_ms=0.0))
    assert not pays(reads, LLAMA, SharingCosts(parts_gb_ms=0.05, launch_ms=0.0))
    assert not pays(reads, LLAMA, SharingCosts())

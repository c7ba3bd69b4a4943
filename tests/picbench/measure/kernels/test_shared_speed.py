"""What is measured of decode that reads shared chunks once; the kernels have tests of their own."""

from typing import Any

import pytest
import torch

from picbench.experiments import shared_kernels as shared_cases
from picbench.experiments import shared_kernels as shared_speed
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

LLAMA = HeadShape(32, 8, 128, torch.bfloat16)


@pytest.mark.parametrize("case", shared_cases.CASES, ids=lambda case: case.name)
def test_cases_share_as_much_as_they_say(case: shared_cases.SharedCase) -> None:
    reads = [read.chunks for read in case.reads(seed=3)]
    assert {len(set(own)) for own in reads} == {case.chosen}
    asked = [chunk for own in reads for chunk in own]
    assert len(asked) == case.requests * case.chosen
    assert max(asked) < case.chunks
    assert (len(set(asked)) == len(asked)) == case.apart


def test_the_page_says_what_was_found() -> None:
    arms = ["own", "chosen", *shared_cases.LAUNCHES, "of groups", "of tiles", "of merge"]
    times = {name: {"median": 1.5, "best": 1.25} for name in arms}
    row = {
        "case": shared_cases.CASES[0].name,
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
    page = shared_speed.report(document)
    assert "| 64 x 64 of 128 x 512 + 1104 | 32.0 | - | 1.500" in page
    assert "shared_gb_ms >= 2.00, tflop_ms >= 0.200" in page


def test_the_host_is_timed() -> None:
    found = shared_speed.grouping_times(rows=4, chosen=3, chunks=5)
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

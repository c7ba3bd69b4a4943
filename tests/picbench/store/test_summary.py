"""Aggregates against values worked out by hand, and their properties."""

import math
from dataclasses import astuple, replace

import pytest
from harness_fakes import make_snapshot
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.request import Hits, TokenCounts
from picbench.run.result import moved_lines
from picbench.store.records import GroupResult, SampleRow, Tally
from picbench.store.summary import (
    Moved,
    Ratio,
    mean,
    percentiles,
    sum_tokens,
    summarise,
    summarise_arm,
    ttft_ratio,
)

TIMES = st.floats(0.01, 1e6)


def row(
    sample: str, ttft: float | None = 100.0, arm: str = "mepic", **changes: object
) -> SampleRow:
    made = SampleRow(
        arm=arm,
        sample=sample,
        round=0,
        timed=True,
        prompt_sha256="",
        ttft_ms=ttft,
        prefill_ms=1.0,
        tpot_ms=4.0,
        e2e_ms=200.0,
        output_tokens=10,
        tokens=TokenCounts(prompt=90, reused=30, compiled=20, linked=5, padded=1),
        hits=Hits(chunk=2, prefix=1),
        score=0.5,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def failed(sample: str) -> SampleRow:
    return SampleRow(arm="mepic", sample=sample, round=0, timed=False, prompt_sha256="", error="no")


def test_percentiles_interpolate_between_neighbours() -> None:
    found = percentiles([10.0, 20.0, 30.0, 40.0, 50.0])
    assert found is not None
    assert astuple(found) == pytest.approx((30.0, 46.0, 48.0, 49.6))
    assert percentiles([]) is None
    assert (mean([None, 2.0, 4.0]), mean([None])) == (3.0, None)


def test_ratio_is_geometric_and_paired() -> None:
    full = [row("a", 100.0), row("b", 100.0), row("c", 1.0)]
    arm = [row("b", 50.0), row("a", 200.0), row("d", 7.0)]
    ratio = ttft_ratio(arm, full)
    assert ratio is not None
    assert astuple(ratio) == pytest.approx((1.0, 2))
    assert ttft_ratio(arm, [row("x")]) is None
    assert ttft_ratio([row("a")], [row("a", timed=False)]) is None


def test_an_arm_by_hand() -> None:
    tally = Tally()
    tally.add(
        [row("a", 100.0, score=1.0), row("b", 300.0, tpot_ms=None, score=0.0)],
        GroupResult((), busy=2.0, snapshots=(make_snapshot(0, 0.0, 10), make_snapshot(1, 1.5, 30))),
    )
    tally.add([failed("c")], GroupResult((), busy=5.0, clean=False))
    arm = summarise_arm(tally, [], metric="f1", meaningful=True)
    assert (arm.requests, arm.failed) == (3, 1)
    assert arm.ttft_ms is not None
    assert arm.ttft_ms.p50 == 200.0
    assert arm.tpot_ms == 4.0
    assert arm.throughput_tok_s == (2 * 90 + 2 * 10) / 2.0
    assert arm.output_tok_s == 2 * 10 / 2.0
    assert arm.score.mean == 0.5
    assert (arm.blocks.peak_referenced, arm.blocks.mean_referenced) == (30, 10)
    assert arm.tokens == TokenCounts(prompt=180, reused=60, compiled=40, linked=10, padded=2)
    assert arm.computed_tokens == 180 - 60 + 40
    assert arm.hits == Hits(chunk=4, prefix=2)
    assert arm.ttft_vs_full is None


def test_tiers_add_up_over_requests_and_rounds() -> None:
    tally = Tally()
    for name, tiers in (("a", {"host": 3}), ("b", {"host": 1, "disk": 2})):
        hits = Hits(copied=4, tiers=tiers)
        tally.add([row(name, hits=hits)], GroupResult((), busy=1.0, moved={"host": (100, 10)}))
    tally.add([failed("c")], GroupResult((), busy=1.0, clean=False, moved={"disk": (0, 7)}))
    arm = summarise_arm(tally, [], metric="f1", meaningful=True)
    assert arm.hits == Hits(copied=8, tiers={"host": 4, "disk": 2})
    assert arm.moved == {"host": Moved(200, 20), "disk": Moved(0, 7)}
    (line,) = moved_lines({"epic:k=16": arm, "full": replace(arm, moved={"host": Moved(0, 0)})})
    assert line.startswith("epic:k=16: host 0.0 MiB loaded")


def test_an_arm_without_any_answer_has_no_numbers() -> None:
    tally = Tally()
    tally.add([failed("a")], GroupResult((), busy=0.0, clean=False))
    arm = summarise_arm(tally, [], metric="f1", meaningful=True)
    assert (arm.ttft_ms, arm.throughput_tok_s, arm.score.mean) == (None, None, None)


def test_full_compares_with_itself_as_one() -> None:
    tallies = {"full": Tally(rows=[row("a"), row("b", 7.0)]), "mepic": Tally(rows=[row("a")])}
    arms = summarise(tallies, metric="f1", meaningful=True)
    assert arms["full"].ttft_vs_full == Ratio(1.0, 2)


def test_rounds_are_joined_without_the_time_of_other_arms() -> None:
    tally = Tally()
    first = (make_snapshot(0, 0.0, 10), make_snapshot(1, 1.0, 20))
    second = (make_snapshot(0, 0.0, 40),)
    tally.add([], GroupResult((), busy=3.0, snapshots=first))
    tally.add([], GroupResult((), busy=1.0, snapshots=second))
    assert [(s.step, s.time) for s in tally.snapshots] == [(0, 0.0), (1, 1.0), (2, 3.0)]
    assert tally.busy == 4.0


@given(st.lists(TIMES, min_size=1, max_size=20), st.floats(0.1, 10))
def test_ratio_of_a_slowdown_is_the_slowdown_and_inverts(times: list[float], factor: float) -> None:
    full = [row(str(i), time) for i, time in enumerate(times)]
    slow = [row(str(i), time * factor) for i, time in enumerate(times)]
    there, back = ttft_ratio(slow, full), ttft_ratio(full, slow)
    assert there is not None
    assert back is not None
    assert there.geomean == pytest.approx(factor)
    assert math.isclose(there.geomean * back.geomean, 1.0)


@given(st.lists(st.builds(TokenCounts, *[st.integers(0, 1000)] * 5)), st.integers(0, 20))
def test_token_sums_do_not_depend_on_grouping(counts: list[TokenCounts], cut: int) -> None:
    parts = [sum_tokens(counts[:cut]), sum_tokens(counts[cut:])]
    assert sum_tokens(parts) == sum_tokens(counts)

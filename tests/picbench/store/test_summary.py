"""Aggregates against values worked out by hand, their properties, and steps that stalled."""

from collections.abc import Iterable
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from harness_fakes import Harness, make_sample, make_snapshot, run_fakes
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.ledger import KINDS, Snapshot
from picbench.engines.request import Choice, Hits, TokenCounts
from picbench.run.result import moved_lines
from picbench.store.reader import read_run
from picbench.store.records import GroupResult, SampleRow, Tally
from picbench.store.summary import (
    ENOUGH,
    FACTOR,
    ArmSummary,
    Moved,
    Ratio,
    Stalls,
    find_stalls,
    mean,
    percentiles,
    step_seconds,
    sum_tokens,
    summarise,
    ttft_ratio,
)
from picbench.tables.metrics import METRICS
from picbench.tables.run import stalled


def row(sample: str, ttft: float | None = 100.0, **changes: object) -> SampleRow:
    made = SampleRow(
        arm="mepic",
        sample=sample,
        round=0,
        timed=True,
        prompt_sha256="",
        ttft_ms=ttft,
        prefill_ms=1.0,
        tpot_ms=4.0,
        e2e_ms=200.0,
        output_tokens=10,
        tokens=TokenCounts(prompt=90, reused=30, compiled=20, loaded={"host": 8}),
        hits=Hits(chunk=2, prefix=1),
        score=0.5,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def failed(sample: str) -> SampleRow:
    return SampleRow(arm="mepic", sample=sample, round=0, timed=False, prompt_sha256="", error="no")


def summary_of(tally: Tally) -> ArmSummary:
    return summarise({"mepic": tally}, metric="f1", meaningful=True)["mepic"]


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
    tallies = {"full": Tally(rows=full), "mepic": Tally(rows=[row("a")])}
    arms = summarise(tallies, metric="f1", meaningful=True)
    assert arms["full"].ttft_vs_full == Ratio(1.0, 3)


def test_an_arm_by_hand() -> None:
    tally = Tally()
    tally.add(
        [row("a", 100.0, score=1.0), row("b", 300.0, tpot_ms=None, score=0.0)],
        GroupResult((), busy=2.0, snapshots=(make_snapshot(0, 0.0, 10), make_snapshot(1, 1.5, 30))),
    )
    tally.add([failed("c")], GroupResult((), busy=5.0, clean=False))
    arm = summary_of(tally)
    assert (arm.requests, arm.failed) == (3, 1)
    assert arm.ttft_ms is not None
    assert arm.ttft_ms.p50 == 200.0
    assert arm.tpot_ms == 4.0
    assert arm.throughput_tok_s == (2 * 90 + 2 * 10) / 2.0
    assert arm.output_tok_s == 2 * 10 / 2.0
    assert arm.score.mean == 0.5
    assert (arm.blocks.peak_referenced, arm.blocks.mean_referenced) == (30, 10)
    assert arm.tokens == TokenCounts(prompt=180, reused=60, compiled=40, loaded={"host": 16})
    assert arm.tokens.computed == 180 - 60 - 40
    assert arm.hits == Hits(chunk=4, prefix=2)
    assert arm.ttft_vs_full is None


def test_tiers_add_up_over_requests_and_rounds() -> None:
    tally = Tally()
    for name, tiers in (("a", {"host": 3}), ("b", {"host": 1, "disk": 2})):
        hits = Hits(copied=4, tiers=tiers)
        tally.add([row(name, hits=hits)], GroupResult((), busy=1.0, moved={"host": (100, 10)}))
    tally.add([failed("c")], GroupResult((), busy=1.0, clean=False, moved={"disk": (0, 7)}))
    arm = summary_of(tally)
    assert arm.hits == Hits(copied=8, tiers={"host": 4, "disk": 2})
    assert arm.moved == {"host": Moved(200, 20), "disk": Moved(0, 7)}
    (line,) = moved_lines({"epic:k=16": arm, "full": replace(arm, moved={"host": Moved(0, 0)})})
    assert line.startswith("epic:k=16: host 0.0 MiB loaded")


def test_an_arm_without_any_answer_has_no_numbers() -> None:
    arm = summary_of(Tally([failed("a")], [GroupResult((), busy=0.0, clean=False)]))
    assert (arm.ttft_ms, arm.throughput_tok_s, arm.score.mean) == (None, None, None)


def test_rounds_are_joined_without_the_time_of_other_arms() -> None:
    tally = Tally()
    first = (make_snapshot(0, 0.0, 10), make_snapshot(1, 1.0, 20))
    tally.add([], GroupResult((), busy=3.0, snapshots=first))
    tally.add([], GroupResult((), busy=1.0, snapshots=(make_snapshot(0, 0.0, 40),)))
    assert [(s.step, s.time) for s in tally.snapshots] == [(0, 0.0), (1, 1.0), (2, 3.0)]
    assert tally.busy == 4.0


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=20), st.floats(0.1, 10))
def test_ratio_of_a_slowdown_is_the_slowdown_and_inverts(times: list[float], factor: float) -> None:
    full = [row(str(i), time) for i, time in enumerate(times)]
    slow = [row(str(i), time * factor) for i, time in enumerate(times)]
    there, back = ttft_ratio(slow, full), ttft_ratio(full, slow)
    assert there is not None
    assert back is not None
    assert there.geomean == pytest.approx(factor)
    assert there.geomean * back.geomean == pytest.approx(1.0)


@given(st.lists(st.builds(TokenCounts, *[st.integers(0, 1000)] * 5)), st.integers(0, 20))
def test_token_sums_do_not_depend_on_grouping(counts: list[TokenCounts], cut: int) -> None:
    parts = [sum_tokens(counts[:cut]), sum_tokens(counts[cut:])]
    assert sum_tokens(parts) == sum_tokens(counts)


def snapshots(steps: Iterable[tuple[float, float, float]]) -> list[Snapshot]:
    """Snapshots with (time, prompt blocks, decode blocks)."""
    found = []
    for number, (time, prompt, decode) in enumerate(steps):
        blocks = dict.fromkeys(KINDS, 0.0) | {"prompt": prompt, "decode": decode}
        found.append(Snapshot(number, time, 100, blocks | {"free": 100 - prompt - decode}))
    return found


def test_steps_are_told_apart_by_what_they_add() -> None:
    steps = [(0, 10, 0), (1, 20, 0), (3, 20, 1), (3.5, 20, 1), (4, 0, 0), (9, 5, 0), (10, 0, 0)]
    # From 4 to 9 nothing was running.
    assert step_seconds([snapshots(steps)]) == ([1, 2, 1], [0.5, 0.5])
    assert step_seconds([snapshots(steps), snapshots(steps[:2])])[0] == [1, 2, 1, 1]
    assert step_seconds([]) == ([], [])


@pytest.mark.parametrize(
    ("prompt", "other", "stalls"),
    [
        ([0.5] * ENOUGH, [0.02] * 300, Stalls(0, FACTOR * 0.5, 0.5)),
        ([0.5] * ENOUGH, [0.02] * 300 + [30.0], Stalls(1, FACTOR * 0.5, 30.0)),
        # A long prompt among steps of decoding.
        ([3.0] * ENOUGH, [0.001] * 10_000, Stalls(0, FACTOR * 3.0, 3.0)),
        # A pause of less than a second.
        ([0.001] * ENOUGH, [0.9], Stalls(0, 1.0, 0.9)),
        # Too few prompts tell nothing.
        ([0.1] * (ENOUGH - 1), [99.0] * 100, None),
    ],
)
def test_a_step_out_of_proportion_is_a_stall(
    prompt: list[float], other: list[float], stalls: Stalls | None
) -> None:
    assert find_stalls(prompt, other) == stalls


def test_a_stalled_arm_is_named_below_the_table(tmp_path: Path) -> None:
    run_fakes(Harness([make_sample(0)]), tmp_path, "full", "mepic")
    arms = read_run(tmp_path).summary
    assert [*stalled(arms)] == []
    found = {**arms, "mepic": replace(arms["mepic"], stalls=Stalls(1, 5.0, 30.0))}
    assert [*stalled(found)] == [
        "mepic: stalled in 1 steps, the longest of 30.0 s; its own slowest steps allow 5.0 s"
    ]


def test_choices_count_how_requests_were_served() -> None:
    ways = [Choice(4, (), 0.05), Choice(4, (0, 1, 2, 3), 0.2), Choice(2, (1,), 0.1), Choice(1)]
    rows = [row(str(n), choice=choice) for n, choice in enumerate(ways)]
    found = summary_of(Tally([*rows, failed("x")], [GroupResult((), 1.0)])).choices
    assert found is not None
    assert (found.chunks, found.text, found.mixed) == (2, 1, 1)
    assert found.text_share == pytest.approx(5 / 11)
    # 100 ms each, over 50, 200 and 100.
    assert found.ttft_over_expected == pytest.approx(1.0)
    assert summary_of(Tally([row("a")], [])).choices is None
    assert METRICS["text_pct"].value(summary_of(Tally(rows, []))) == pytest.approx(500 / 11)
    of_row = METRICS["text_chunks"].of_row
    assert of_row is not None and [of_row(one) for one in (*rows, row("a"))] == [0, 4, 1, 0, None]

"""Verdicts from evidence made by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from picbench.papers.arm_scores import ArmRows, Case, ScoredPart
from picbench.papers.data import ExperimentData, PointArm, PointData
from picbench.papers.judge import (
    BEGIN,
    DIRECTION,
    END,
    ClaimVerdict,
    Evidence,
    judge_all,
    write_claims,
    write_verdicts,
)
from picbench.papers.settings import Bounds, Claim
from picbench.statistics.intervals import Interval

CONDITIONS = {"caption": "here", "model": "no weights", "hardware": "a machine", "commit": "abc"}
FACTS = {"gpu": "a GPU", "dtype": "float32", "commit": "0123456789"}
SEEDS = (1, 2, 3)


def claim(**content: Any) -> Claim:
    printed = {"claim": "c", "source": "s", "published": "p"}
    return TypeAdapter(Claim).validate_python(printed | content)


def run_claim(**judge: Any) -> Claim:
    """About the time of the arm x, unless it is of another."""
    return claim(judge={"kind": "run", "experiment": "e", "metric": "time", "arm": "x"} | judge)


def score_claim(*arms: str, **judge: Any) -> Claim:
    return claim(judge={"kind": "score", "arms": list(arms)} | judge)


def point(label: str, seed: int, tokens: float, **values: float) -> PointData:
    arms = {arm: PointArm({"time": value}) for arm, value in values.items()}
    return PointData(label, seed, {"mean_tokens": tokens}, arms)


def evidence(*points: PointData) -> Evidence:
    data = ExperimentData("mepic", "e", "cpu", "x", CONDITIONS, points)
    return Evidence({("cpu", "e"): data}, {})


def near(**places: float) -> Evidence:
    """Three seeds of the arm x at each place, a hundredth apart."""
    return evidence(*(point(on, s, 1, x=at + s / 100) for on, at in places.items() for s in SEEDS))


def scored(dataset: str = "musique", **arms: list[float]) -> Evidence:
    found = {arm: ArmRows(scores, [], []) for arm, scores in arms.items()}
    part = ScoredPart(Case("testbed", dataset), 100, FACTS, found)
    return Evidence({}, {part.case: part}, "scores")


def judged(claim: Claim, found: Evidence) -> ClaimVerdict:
    [verdict] = judge_all([claim], found)
    return verdict


def test_a_device_has_notes_of_its_own() -> None:
    content = {"judge": run_claim(most=2).judge.model_dump(), "note": "Both."}
    noted = claim(**content, device_notes={"cpu": "One."})
    [cpu] = near(a=1.0).data.values()
    data = {("cpu", "e"): cpu, ("cuda", "e"): replace(cpu, device="cuda")}
    first, second = judge_all([noted], Evidence(data, {}))
    assert (first.why, second.why) == ("Holds at a. Both. One.", "Holds at a. Both.")
    with pytest.raises(ValueError, match="tpu"):
        claim(**content, device_notes={"tpu": "Two."})


def test_a_claim_has_a_bound_and_no_unknown_field() -> None:
    bounds = Bounds(least=1.0, most=2.0)
    ends = [(1.1, 1.9), (0.5, 0.9), (2.1, 3.0), (0.9, 1.5)]
    found = [bounds.judge(Interval(low, high, 0.95)) for low, high in ends]
    assert found == ["holds", "fails", "fails", "undecided"]
    assert bounds.judge(None) == "undecided"
    with pytest.raises(ValueError, match="Extra inputs"):
        score_claim("a", "b", lest=1)
    with pytest.raises(ValueError, match="least or most"):
        score_claim("a", "b")


def test_ratios_are_paired_by_seed() -> None:
    # Seeds differ tenfold, ratios by a hundredth: only pairs show that.
    times = [(1, 1.0, 2.0), (2, 10.0, 20.2), (3, 100.0, 199.0)]
    points = [point("a", seed, 1, slow=b, fast=a) for seed, a, b in times]
    ratio = {"arm": "slow", "over": "fast"}
    verdict = judged(run_claim(**ratio, least=1.9), evidence(*points))
    assert (verdict.verdict, verdict.ours) == ("holds", "2 (a: slow over fast)")
    # Student's t for two degrees of freedom, by hand.
    logs = np.log([2.0, 2.02, 1.99])
    reach = 4.302653 * logs.std(ddof=1) / np.sqrt(3)
    ends = np.exp([logs.mean() - reach, logs.mean() + reach])
    assert verdict.interval == pytest.approx(ends, 1e-3)
    assert judged(run_claim(**ratio, least=2.1), evidence(*points)).verdict == "fails"
    assert judged(run_claim(**ratio, least=2.0), evidence(*points)).verdict == "undecided"
    assert judged(run_claim(**ratio, least=1.9), evidence(points[0])).verdict == "undecided"


@pytest.mark.parametrize(
    ("judge", "verdict", "ours", "why"),
    [
        ({"least": 3}, "fails", "1.02 (b: x)", "Holds at a, d; fails at b, c."),
        ({"least": 3, "at": ["a"]}, "holds", "4.02 (a: x)", "Holds at a."),
        ({"least": 3, "arm": ["none", "x"], "at": ["b"]}, "fails", "1.02 (b: x)", "Fails at b."),
        (
            {"least": 3, "arm": "none"},
            "undecided",
            None,
            "Not measured: arms or points are missing",
        ),
        ({"least": 3, "over": "none"}, "undecided", None, "Not measured: arms or points are"),
        ({"least": 3, "against": "none"}, "undecided", None, "Not measured: arms or points are"),
        ({"least": 3, "experiment": "f"}, "undecided", None, "Not measured: the experiment f has"),
        ({"least": 0.5}, "holds", "1.02 (b: x)", "Holds at a, b, c, d."),
        ({"most": 20}, "holds", "9.02 (d: x)", "Holds at a, b, c, d."),
        # Between two bounds the nearer one counts.
        ({"at": ["a", "c"], "least": 0, "most": 5}, "holds", "4.02 (a: x)", "Holds at a, c."),
    ],
)
def test_a_claim_is_as_good_as_its_worst_place(
    judge: dict[str, Any], verdict: str, ours: str | None, why: str
) -> None:
    found = judged(run_claim(**judge), near(a=4.0, b=1.0, c=2.0, d=9.0))
    assert (found.verdict, found.ours) == (verdict, ours)
    assert found.why.startswith(why)


def test_places_that_were_not_measured_are_named() -> None:
    points = [point(label, seed, 1.0, x=1.0) for label in "123" for seed in SEEDS]
    points += [point(label, seed, 1.0, b=1.0) for label in "45" for seed in SEEDS]
    found = evidence(*points)
    assert judged(run_claim(most=2), found).why.endswith("at 1, 2, 3. Not measured at 4, 5.")
    some = judged(run_claim(most=2, at=["1", "4", "9"]), found)
    assert some.why.endswith("at 1. Not measured at 4.")
    against = judged(run_claim(most=2, against="5", at=["1", "5"]), found)
    assert "Not measured at" not in against.why


def test_a_place_that_others_are_compared_with_is_none_itself() -> None:
    points = [point(on, s, 100, x=at) for on, at in (("a", 1.0), ("b", 2.0)) for s in (1, 2)]
    # The third seed has nothing to be compared with.
    found = evidence(*points, point("b", 3, 100, x=2.0))
    growth = judged(run_claim(against=["none", "a"], least=1), found)
    assert [(cell.on, cell.value, cell.samples) for cell in growth.cells] == [("b", 2.0, 2)]


def test_a_single_run_has_no_interval() -> None:
    verdict = judged(run_claim(least=1), evidence(point("a", 1, 1, x=12345.6)))
    assert (verdict.verdict, verdict.interval) == ("undecided", None)
    assert verdict.ours == "12,346 (a: x)"
    assert verdict.why == "Undecided at a (a single run has no interval)."


@pytest.mark.parametrize(
    ("metric", "share", "verdict"),
    [
        ("peak_blocks", 99.0, "undecided"),
        ("peak_pct", 99.0, "undecided"),
        # Not all of the pool, no other metric, and nothing where the share is not known.
        ("peak_blocks", 94.9, "fails"),
        ("time", 99.0, "fails"),
        ("peak_blocks", None, "fails"),
    ],
)
def test_peaks_that_the_pool_cuts_off_decide_nothing(
    metric: str, share: float | None, verdict: str
) -> None:
    held = {"peak_blocks": 100.0, "time": 1.0}
    arms = {"a": PointArm(held | {"peak_pct": 99.0}), "b": PointArm(held | {"peak_pct": share})}
    found = evidence(*(PointData("x", seed, {}, arms) for seed in SEEDS))
    assert judged(run_claim(metric=metric, arm="a", over="b", least=2), found).verdict == verdict


def test_growth_and_exponents() -> None:
    found = evidence(
        *(point("short", seed, 100, x=1.0 * seed, y=1.0) for seed in SEEDS),
        *(point("long", seed, 400, x=16.0 * seed, y=2.0) for seed in SEEDS),
    )

    def growth(**judge: Any) -> ClaimVerdict:
        return judged(run_claim(against="short", **judge), found)

    assert growth(exponent=True, least=1.9).ours == "2 (long: x)"
    assert growth(least=15.9, most=16.1).verdict == "holds"
    assert growth(over="y", least=7.9, most=8.1).ours == "8 (long: x over y)"


@pytest.mark.parametrize(
    ("arm", "judge", "verdict"),
    [
        ("naive", {"least": -0.1}, "holds"),
        ("naive", {"least": 0.05}, "fails"),
        ("naive", {"least": 0.5, "ratio": True}, "holds"),
        ("same", {"least": 0}, "undecided"),
        # No row of 100 differs; 97.5 % of such samples would show it if 3.62 % of rows did.
        ("same", {"least": -0.0361}, "undecided"),
        ("same", {"least": -0.0363}, "holds"),
        ("epic:k=2", {"least": 0}, "undecided"),
    ],
)
def test_scores_are_paired_by_row(arm: str, judge: dict[str, Any], verdict: str) -> None:
    hard = (np.random.default_rng(1).random(100) < 0.5).astype(float)
    worse = np.where(np.arange(100) < 4, 0.0, hard)
    found = scored(full=list(hard), naive=list(worse), same=list(hard))
    assert judged(score_claim(arm, "full", **judge), found).verdict == verdict


def test_the_place_that_is_shown_is_one_where_rows_differ() -> None:
    """A difference of 0 is nearer to the bound, and says nothing."""
    right = [1.0, 0.0] * 50
    other = [0.0, 0.0, 0.0, *right[3:92], *[1.0] * 8]
    claimed = score_claim("other", "right", "same", least=-0.02)
    verdict = judged(claimed, scored(other=other, right=right, same=list(right)))
    assert [cell.verdict for cell in verdict.cells] == ["undecided", "undecided"]
    assert verdict.ours == "0.02 (musique: other less right)"


def test_few_rows_decide_little_and_two_are_the_fewest_that_are_told_of() -> None:
    def of(rows: int) -> ClaimVerdict:
        found = scored(full=[1.0] * rows, naive=([0.5, 0.4] * 10)[:rows])
        return judged(score_claim("naive", "full", least=-0.1), found)

    assert of(20).verdict == "fails"
    assert of(8).verdict == "undecided"
    assert "8 rows a set" in str(of(8).run)
    assert of(2).ours == "-0.55 (musique: naive less full)"
    assert (of(1).ours, of(1).run) == (None, None)


def test_rows_are_counted_over_all_sets() -> None:
    sets = {"musique": 40, "samsum": 25}
    every = [scored(on, full=[1.0] * rows, naive=[0.5] * rows) for on, rows in sets.items()]
    found = Evidence({}, {**every[0].parts, **every[1].parts}, "scores")
    verdict = judged(score_claim("naive", "full", least=0), found)
    where = "scores: a GPU, float32"
    assert verdict.run == f"{where}; testbed weights, 25 to 40 rows a set"
    assert verdict.why == "Fails at musique, samsum."
    # Two intervals cover with 95 % together.
    assert {cell.interval.level for cell in verdict.cells if cell.interval} == {0.975}
    one = score_claim("naive", "full", least=0, datasets=["samsum"])
    assert judged(one, found).why == "Fails at samsum."


def test_what_is_zero_divides_nothing() -> None:
    over = score_claim("naive", "full", ratio=True, least=0.5)
    nothing = judged(over, scored(full=[0.0] * 30, naive=[1.0] * 30))
    assert nothing.why == "Not measured: no score is known to be above zero."
    # One row of 30 scores: that row may be as rare as chance has it.
    rare = judged(over, scored(full=[1.0] + [0.0] * 29, naive=[1.0] * 30))
    assert rare.interval is not None and rare.interval[0] < 30 < rare.interval[1] / 10
    assert rare.ours == "30 (musique: naive over full)"


def test_what_chunks_may_not_be_worth_divides_nothing() -> None:
    over = score_claim("naive", "full", ratio=True, least=0.5)
    gains = scored(full=[-1.0, 1.5] * 15, naive=[0.5] * 30)
    for part in gains.parts.values():
        part.likelihood = True
    assert judged(over, gains).why == "Not measured: no score is known to be above zero."


def test_the_table_in_a_document_is_replaced(tmp_path: Path) -> None:
    claims = [run_claim(least=9), claim(judge={"kind": "none", "why": "no"})]
    claims.append(run_claim(least=3).model_copy(update={"claim": "a | b"}))
    write_verdicts(judge_all(claims, near(a=5.0)), tmp_path)
    assert len(json.loads((tmp_path / "verdicts.json").read_text())) == 3
    document = tmp_path / "page.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_claims(document, [("MEPIC", tmp_path)])
    text = document.read_text()
    assert "\nold\n" not in text
    assert "| MEPIC | 1 | 1 | 0 | 1 |" in text
    assert "| MEPIC | undecided | c | p | not measured |" in text
    assert "| MEPIC | fails | c | p | 5.02 (a: x) [" in text
    assert "| MEPIC | holds | a \\| b | p |" in text
    assert ": a machine, commit abc | no weights, n=3 |" in text
    assert text.startswith("before\n") and text.endswith("after\n")
    write_claims(document, [("MEPIC", tmp_path)])
    assert document.read_text() == text


@pytest.mark.parametrize(
    ("published", "whose", "verdict"),
    [
        ("up to 7x", "EPIC", DIRECTION),
        ("5.5 to 9x", "EPIC", DIRECTION),
        ("7, 1.25 and 6.5x", "EPIC", "holds"),
        ("up to 4x", "EPIC", "holds"),
        ("grows", "EPIC", "holds"),
        ("not in the paper", "ours, on EPIC", "holds"),
    ],
)
def test_a_claim_that_is_met_in_direction_says_so(
    published: str, whose: str, verdict: str, tmp_path: Path
) -> None:
    """5.02 times, in an interval that ends below 5.5."""
    wanted = run_claim(least=1).model_copy(update={"published": published})
    write_verdicts(judge_all([wanted], near(a=5.0)), tmp_path)
    document = tmp_path / "page.md"
    document.write_text(f"{BEGIN}\n{END}\n")
    write_claims(document, [("EPIC", tmp_path)])
    assert f"| {whose} | {verdict} | c | {published} |" in document.read_text()

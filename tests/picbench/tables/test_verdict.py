"""The line below a run's table, worked out by hand."""

from dataclasses import replace

import pytest

from picbench.engines.ledger import Occupancy
from picbench.engines.request import Hits, TokenCounts
from picbench.store.summary import ArmSummary, Ratio, ScoreSummary
from picbench.tables.run import verdict


def summary(score: float | None, ttft: float, blocks: float, metric: str = "f1") -> ArmSummary:
    return ArmSummary(
        requests=60,
        failed=0,
        ttft_ms=None,
        prefill_ms=None,
        e2e_ms=None,
        tpot_ms=None,
        throughput_tok_s=None,
        output_tok_s=None,
        busy_s=1.0,
        ttft_vs_full=Ratio(ttft, 60),
        score=ScoreSummary(metric, score, meaningful=True),
        blocks=Occupancy(1000, blocks, blocks, blocks, blocks),
        tokens=TokenCounts(),
        computed_tokens=0,
        output_tokens=0,
        hits=Hits(),
    )


FULL = summary(0.98, 1.0, 400)
NAIVE = summary(0.61, 0.31, 160)
MEPIC = summary(0.93, 0.52, 164)


def test_it_says_what_reuse_gains_and_loses() -> None:
    [line] = verdict({"full": FULL, "mepic": MEPIC}, ["mepic"])
    assert line == (
        "mepic against full: first token in 0.52x the time, 0.41x the blocks at peak, f1 -0.05 "
        "(n=60)"
    )


def test_it_sets_naive_reuse_beside_the_loss() -> None:
    [line] = verdict({"full": FULL, "naive": NAIVE, "mepic": MEPIC}, ["naive", "mepic"])
    assert line.endswith("f1 -0.05 (naive -0.37) (n=60)")


def test_losses_in_time_and_blocks_and_gains_in_score_are_said_as_well() -> None:
    [line] = verdict({"full": FULL, "mepic": summary(0.995, 1.3, 500)}, ["mepic"])
    assert "1.30x the time, 1.25x the blocks at peak, f1 +0.02" in line


def test_equal_scores_have_no_negative_zero() -> None:
    [line] = verdict({"full": FULL, "mepic": replace(FULL)}, ["mepic"])
    assert "f1 +0.00" in line


@pytest.mark.parametrize(
    ("reusing", "subject"),
    [
        (["mepic:pad=paper", "naive"], "mepic:pad=paper"),
        (["naive", "epic:k=16"], "epic:k=16"),
        (["naive"], "naive"),
    ],
)
def test_it_is_about_mepic_or_the_last_arm(reusing: list[str], subject: str) -> None:
    [line] = verdict({"full": FULL, "prefix": FULL} | dict.fromkeys(reusing, MEPIC), reusing)
    assert line.startswith(f"{subject} against full: ")


def test_there_is_none_without_both_arms() -> None:
    assert not list(verdict({}, ["mepic"]))
    assert not list(verdict({"mepic": MEPIC}, ["mepic"]))
    assert not list(verdict({"full": FULL, "prefix": MEPIC}, []))
    assert not list(verdict({"full": FULL, "mepic": replace(MEPIC, ttft_vs_full=None)}, ["mepic"]))


def test_scores_that_mean_nothing_are_left_out() -> None:
    random = replace(MEPIC, score=ScoreSummary("f1", 0.1, meaningful=False))
    lost = replace(MEPIC, failed=1)
    for arm in (random, lost, summary(None, 0.52, 164)):
        [line] = verdict({"full": FULL, "naive": NAIVE, "mepic": arm}, ["naive", "mepic"])
        assert line.endswith("0.41x the blocks at peak (n=60)")


def test_arms_whose_blocks_were_not_counted_say_nothing_of_them() -> None:
    [line] = verdict({"full": summary(0.98, 1.0, 0), "mepic": MEPIC}, ["mepic"])
    assert "blocks" not in line

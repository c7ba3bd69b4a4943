"""What is said of a loss of score."""

from dataclasses import replace

import pytest
from measured_arms import known, make_arm

from picbench.compare.arm import SCORE, MetricChange, compare_arms
from picbench.compare.comparison import on_others, on_these
from picbench.report.contents import drop_at_most, ratio_ends
from picbench.statistics.intervals import Interval
from picbench.statistics.significance import Loss


def score(before: list[float], after: list[float], margin: float = 0.02) -> MetricChange:
    found = compare_arms(make_arm(scores=before), make_arm(scores=after), margin=margin)
    return known(found.metric(SCORE))


@pytest.mark.parametrize(("count", "share"), [(10, 0.2589), (100, 0.0295), (300, 0.0099)])
def test_few_samples_without_a_loss_rule_little_out(count: int, share: float) -> None:
    same = score([1.0] * count, [1.0] * count)
    assert drop_at_most(same) == pytest.approx(share, abs=1e-4)
    words = on_others(same, 0.02)
    assert words.startswith("loses less than 0.02" if share < 0.02 else "none differs, but a loss")
    assert same.loss is (Loss.WITHIN if share < 0.02 else Loss.UNKNOWN)
    assert same.needed == 149


def test_samples_that_changed_are_judged_by_their_interval() -> None:
    worse = score([1.0] * 60, [0.0] * 20 + [1.0] * 40)
    assert on_others(worse, 0.02) == "loses more than 0.02, with 95 % confidence"
    assert worse.loss is Loss.BEYOND
    bounds = known(worse.change.one_sided)
    assert drop_at_most(worse) == -bounds.low
    better = score([0.0] * 30 + [1.0] * 30, [1.0] * 60)
    assert drop_at_most(better) == 0.0
    assert better.loss is Loss.WITHIN


def test_of_one_set_of_documents_no_bound_is_told() -> None:
    before, after = make_arm(scores=[1.0] * 48), make_arm(scores=[0.0] * 13 + [1.0] * 35)
    linked = replace(before, clusters=("d",) * 48)
    worse = known(compare_arms(linked, after, margin=0.02).metric(SCORE))
    assert on_these(worse) == "13 lost, 0 won of 48 on these requests, exact p <0.001"
    assert on_others(worse, 0.02).startswith("not known, as all requests are linked by documents")
    assert drop_at_most(worse) is None
    assert worse.p == pytest.approx(2 / 2**13)


@pytest.mark.parametrize(
    ("ends", "words"),
    [((0.0001, 16404483.8), "below 0.01 to above 100"), ((0.5, 2.0), "0.50 to 2.00")],
)
def test_ends_far_from_one_are_not_told(ends: tuple[float, float], words: str) -> None:
    metric = score([1.0] * 4, [1.0] * 4)
    change = replace(metric.change, interval=Interval(*ends, 0.95))
    assert ratio_ends(replace(metric, change=change)) == words

"""The ledger's arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.ledger import KINDS, Occupancy, Snapshot, summarise


def snapshot(time: float, **blocks: float) -> Snapshot:
    counts = dict.fromkeys(KINDS, 0.0) | blocks
    counts["free"] = 100 - sum(v for k, v in counts.items() if k != "free")
    return Snapshot(step=0, time=time, pool=100, blocks=counts)


def test_referenced_and_resident():
    s = snapshot(0.0, chunk=10, prompt=5.5, pad=0.5, chunk_idle=20, prefix_idle=4)
    assert s.referenced == 16
    assert s.resident == 40


def test_means_are_weighted_by_time():
    rows = [snapshot(0.0, chunk=10), snapshot(1.0, chunk=50), snapshot(4.0, chunk=99)]
    summary = summarise(rows)
    assert summary.peak_referenced == 99
    assert summary.mean_referenced == pytest.approx((10 * 1 + 50 * 3) / 4)


def test_a_summary_by_hand():
    """Three steps within a second; the last one holds until nothing."""
    rows = [
        snapshot(2.0, chunk=10, chunk_idle=30),
        snapshot(2.25, prompt=50),
        snapshot(2.75, decode=20, prefix_idle=60),
    ]
    found = summarise(rows)
    assert (found.pool, found.peak_referenced, found.peak_resident) == (100, 50, 80)
    assert found.mean_referenced == pytest.approx((10 * 0.25 + 50 * 0.5) / 0.75)
    assert found.mean_resident == pytest.approx((40 * 0.25 + 50 * 0.5) / 0.75)


def test_steps_at_one_time_count_alike():
    found = summarise([snapshot(1.0, chunk=10), snapshot(1.0, chunk=30)])
    assert (found.mean_referenced, found.mean_resident) == (20, 20)


def test_nothing_measured():
    assert summarise([]) == Occupancy(0, 0.0, 0.0, 0.0, 0.0)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 100)), min_size=1, max_size=20))
def test_mean_lies_between_extremes(points):
    rows = [snapshot(t, chunk=c) for t, c in sorted(points)]
    counts = [c for _, c in points]
    assert min(counts) - 1e-6 <= summarise(rows).mean_referenced <= max(counts) + 1e-6

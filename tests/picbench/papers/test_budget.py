"""What may be begun in the time that there is."""

from dataclasses import replace
from pathlib import Path

import pytest

from picbench.experiments.runner import TimeBudget
from picbench.papers.budget import Room, expected_arm
from picbench.papers.data import ExperimentData
from picbench.papers.settings import points, read_settings
from picbench.workloads.traffic.traffic_facts import TrafficFacts

ROOT = Path(__file__).parents[3]

FACTS = TrafficFacts(
    requests=10,
    users=1,
    mean_tokens=1000.0,
    mean_chunks=10.0,
    mean_chunk_tokens=100.0,
    unique_chunks=10,
    reuse=0.0,
    fresh_tokens=100.0,
    cached=0.0,
    top_chunk=0.1,
    rate=None,
)


def test_work_is_expected_to_take_as_much_longer_as_before() -> None:
    now = [0.0]
    budget = TimeBudget(100.0, lambda: now[0])
    assert budget.allows(40.0, start=50.0)
    now[0] = 60.0
    budget.note(expected=10.0, took=20.0)
    assert budget.allows(15.0)
    assert not budget.allows(25.0)
    assert budget.stopped


def test_once_time_is_over_nothing_is_begun() -> None:
    budget = TimeBudget(10.0, lambda: 5.0)
    assert not budget.allows(20.0)
    assert not budget.allows(0.1)


def test_without_a_limit_all_is_allowed() -> None:
    budget = TimeBudget(0.0)
    assert budget.allows(1e9)
    assert not budget.stopped


def test_loads_that_were_measured_took_about_as_long_as_expected() -> None:
    factors = {}
    for path in (ROOT / "results" / "papers").glob("*/data/cuda-*.json"):
        data = ExperimentData.read(path)
        settings = read_settings(data.paper)
        if data.experiment not in settings.loads:
            continue
        rooms = {
            point.label: Room.of(point.run) for point in points(settings, data.experiment, "cuda")
        }
        for point in data.points:
            facts = TrafficFacts(**{"users": 1, **point.facts})
            for name, arm in point.arms.items():
                took = arm.metrics["makespan_s"]
                assert took is not None
                expected = expected_arm(name, facts, "cuda", rooms[point.label])
                cell = (data.paper, data.experiment, point.label, point.seed, name)
                factors[cell] = took / expected
    assert {cell: factor for cell, factor in factors.items() if not 1 / 2 < factor < 2} == {}
    assert len(factors) > 20


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_recurs_takes_less_time_than_what_is_new(device: str) -> None:
    new, known = (replace(FACTS, fresh_tokens=fresh) for fresh in (1000.0, 100.0))
    room = Room(100_000, 128)
    for arm in ("mepic", "epic:k=16", "cacheblend:r=0.15", "naive"):
        assert expected_arm(arm, known, device, room) < expected_arm(arm, new, device, room)
    assert expected_arm("prefix", known, device, room) == expected_arm("prefix", new, device, room)
    late = replace(known, rate=0.1)
    assert expected_arm("naive", late, device, room) == 100.0


def test_few_requests_at_a_time_take_a_step_for_each_token() -> None:
    many = replace(FACTS, requests=1000)
    few, most = (expected_arm("minipic", many, "cuda", Room(10**7, count)) for count in (8, 1024))
    assert few > 100
    assert most < 10


def test_requests_that_come_slowly_hold_little_of_a_pool() -> None:
    # What 100 requests hold at once would leave no room for chunks; at 40 a second none waits.
    facts = replace(FACTS, requests=100, mean_tokens=4000.0, mean_chunk_tokens=390.0)
    facts = replace(facts, fresh_tokens=100.0, unique_chunks=100)
    room = Room(400_000, 128)
    at_once = expected_arm("epic:k=16", facts, "cuda", room)
    slowly = expected_arm("epic:k=16", replace(facts, rate=40.0), "cuda", room)
    assert slowly == 2.5
    assert at_once > 3.5


def test_what_a_pool_forgets_is_computed_again() -> None:
    facts = replace(FACTS, mean_tokens=4000.0, mean_chunk_tokens=390.0, fresh_tokens=600.0)
    facts = replace(facts, requests=300, unique_chunks=500)
    large, small = Room(10_000_000, 128), Room(100_000, 128)
    full = expected_arm("full", facts, "cuda", small)
    assert full == expected_arm("full", facts, "cuda", large)
    assert expected_arm("mepic", facts, "cuda", small) == expected_arm(
        "mepic", facts, "cuda", large
    )
    kept = expected_arm("epic:k=16", facts, "cuda", large)
    forgotten = expected_arm("epic:k=16", facts, "cuda", small)
    assert kept < 0.6 * full
    assert 0.9 * full < forgotten < 1.1 * full

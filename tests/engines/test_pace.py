"""Requests go when they are due, never earlier, and late ones are known."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.pace import Pace
from picbench.errors import ConfigError


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def made(text: str, clock: Clock, **settings: Any) -> Pace[str]:
    """A pace whose clocks go alike."""
    return Pace(text, clock=clock, wall=lambda: 1e9 + clock.now, **settings)


def taken(pace: Pace[str]) -> list[str]:
    return [one.item for one in pace.due()]


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    pace = Pace("abcd", limit=2)
    assert taken(pace) == ["a", "b"]
    assert taken(pace) == []
    pace.finished()
    assert taken(pace) == ["c"]
    assert pace
    for _ in range(2):
        pace.finished()
    assert pace.idle
    assert taken(pace) == ["d"]
    pace.finished()
    assert not pace


def test_an_open_loop_hands_out_in_the_order_of_arrival() -> None:
    clock = Clock()
    pace = Pace("abc", limit=9, arrivals=[2.0, 0.0, 1.0], clock=clock)
    assert taken(pace) == ["b"]
    clock.now += 0.999
    assert taken(pace) == []
    clock.now += 1.001
    assert taken(pace) == ["c", "a"]


def test_latency_counts_from_the_arrival_that_was_meant() -> None:
    clock = Clock()
    pace = made("ab", clock, limit=1, arrivals=[1.0, 2.0])
    clock.now += 1.5
    [first] = pace.due()
    assert first.late == pytest.approx(0.5)
    assert first.arrived == pytest.approx(1e9 + 101.0)
    clock.now += 3.5
    assert not list(pace.due())
    pace.finished()
    [second] = pace.due()
    assert second.late == pytest.approx(3.0)
    assert second.arrived - first.arrived == pytest.approx(1.0)


def test_a_closed_loop_is_never_late() -> None:
    clock = Clock()
    pace = made("ab", clock, limit=1)
    [first] = pace.due()
    clock.now += 5
    pace.finished()
    [second] = pace.due()
    assert (first.late, second.late) == (0.0, 0.0)
    assert second.arrived - first.arrived == pytest.approx(5)


def test_an_item_of_a_closed_loop_arrives_when_there_is_room_for_it() -> None:
    clock = Clock()
    pace = made("abcd", clock, limit=2)
    due = pace.due()
    first = next(due)
    clock.now += 3  # Whoever submits "a" is busy for so long.
    second = next(due)
    assert second.arrived - first.arrived == pytest.approx(0)
    clock.now += 1
    pace.finished()
    clock.now += 2
    pace.finished()
    clock.now += 5
    third, fourth = pace.due()
    assert third.arrived - first.arrived == pytest.approx(4)
    assert fourth.arrived - first.arrived == pytest.approx(6)
    assert fourth.late == 0


@pytest.mark.parametrize("arrivals", [None, [0.0, 0.0]])
def test_a_wall_clock_that_is_set_shifts_no_later_request(arrivals: list[float] | None) -> None:
    clock, wall = Clock(), Clock(5e8)
    pace = Pace("ab", 1, arrivals, clock, wall)
    list(pace.due())
    clock.now, wall.now = clock.now + 2, wall.now + 3600
    pace.finished()
    [second] = pace.due()
    waited = 0.0 if arrivals is None else 2.0
    assert second.arrived == pytest.approx(wall.now - waited)


@given(
    st.lists(st.floats(0, 50), min_size=1, max_size=20),
    st.lists(st.floats(0, 10), min_size=1, max_size=60),
    st.integers(1, 5),
)
def test_nothing_is_early_and_nothing_is_lost(
    arrivals: list[float], steps: list[float], limit: int
) -> None:
    clock = Clock()
    pace = Pace(range(len(arrivals)), limit, arrivals, clock)
    seen: list[int] = []
    flying = 0
    for step in [*steps, *[60.0] * (len(arrivals) + 1)]:
        clock.now += step
        for one in pace.due():
            assert clock.now - 100.0 >= arrivals[one.item]
            assert one.late >= 0
            seen.append(one.item)
            flying += 1
        assert flying <= limit
        while flying:
            pace.finished()
            flying -= 1
    assert sorted(seen) == list(range(len(arrivals)))
    assert [arrivals[item] for item in seen] == sorted(arrivals)
    assert not pace


@pytest.mark.parametrize("arrivals", [[0.0], [0.0, -1.0], [0.0, float("nan")]])
def test_arrivals_that_cannot_be_are_refused(arrivals: list[float]) -> None:
    with pytest.raises(ConfigError, match="arrival times for 2 requests"):
        Pace("ab", 1, arrivals)

"""Which arms are on the frontier, and which is its knee."""

from hypothesis import given
from hypothesis import strategies as st
from measured_arms import known

from picbench.report.figures import ArmPoint, frontier, knee

POINTS = st.lists(
    st.builds(
        ArmPoint,
        arm=st.text(max_size=3),
        time=st.sampled_from([1.0, 2.0, 3.0, 10.0, 100.0]),
        score=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    ),
    max_size=8,
)


def beats(one: ArmPoint, other: ArmPoint) -> bool:
    pair, against = (-one.time, one.score), (-other.time, other.score)
    return pair != against and all(a >= b for a, b in zip(pair, against, strict=True))


@given(POINTS)
def test_the_frontier_is_what_no_other_beats(points: list[ArmPoint]) -> None:
    kept = frontier(points)
    for point in points:
        assert (point in kept) is not any(beats(other, point) for other in points)
    assert [p.time for p in kept] == sorted(p.time for p in kept)
    assert [p.score for p in kept] == sorted(p.score for p in kept)


@given(POINTS)
def test_the_knee_is_inside_the_frontier(points: list[ArmPoint]) -> None:
    kept = frontier(points)
    found = knee(kept)
    assert found is None or found in kept[1:-1]


def test_the_knee_is_where_more_time_stops_to_pay() -> None:
    points = [
        ArmPoint("naive", 10, 0.2),
        ArmPoint("early", 20, 0.8),
        ArmPoint("late", 80, 0.85),
        ArmPoint("full", 100, 0.9),
    ]
    found = known(knee(points))
    assert found.arm == "early"


def test_a_frontier_that_sags_has_no_knee() -> None:
    points = [ArmPoint("a", 10, 0.2), ArmPoint("b", 90, 0.3), ArmPoint("c", 100, 0.9)]
    assert knee(points) is None
    assert knee(points[:2]) is None

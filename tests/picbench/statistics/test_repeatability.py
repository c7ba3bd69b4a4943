"""How often answers differ from one time to the next."""

from picbench.compare.significance import nondeterminism


def test_answers_are_compared_by_sample() -> None:
    found = nondeterminism({"a": "1", "b": "2", "c": "3"}, {"b": "2", "a": "9", "d": "4"})
    assert (found.pairs, found.differing, found.rate) == (2, 1, 0.5)
    assert found.interval is not None
    assert 0.0 < found.interval.low < 0.5 < found.interval.high < 1.0


def test_a_deterministic_arm_still_has_an_upper_bound() -> None:
    """Three divided by n, roughly: 200 equal answers exclude a rate of 2 %."""
    same = {str(i): "x" for i in range(200)}
    found = nondeterminism(same, same)
    assert found.rate == 0
    assert found.interval is not None
    assert found.interval.low == 0
    assert 0.015 < found.interval.high < 0.02


def test_nothing_in_common_has_no_rate() -> None:
    assert nondeterminism({"a": "1"}, {"b": "1"}).rate is None

"""What may be begun in the time that there is."""

from picbench.papers.budget import TimeBudget


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

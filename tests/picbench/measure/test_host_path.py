"""The host path: whose time counts where, and the page."""

from typing import Any, cast

import pytest
from harness_fakes import GPU_FACTS

from picbench.measure import host_path as measuring
from picbench.measure.host_path import (
    AROUND,
    CUDA_PARTS,
    PARTS,
    PartTimes,
    _resolved,
    name_of,
    render,
    timing,
)
from picbench.measure.warm.warm_chunks import ARMS


class Clock:
    """Time passes only where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


class Called:
    def outer(self) -> str:
        return self.inner()

    def inner(self) -> str:
        return "done"


def test_a_part_does_not_count_in_the_one_that_calls_it() -> None:
    clock = Clock()
    times = PartTimes(clock)
    inner = times.timed("inner", lambda: clock.spend(2.0))

    def run() -> None:
        clock.spend(1.0)
        inner()
        inner()

    times.timed("outer", run)()
    clock.spend(9.0)
    times.timed("outer", run)()
    assert (times.began["inner"], times.ended["outer"]) == (1.0, 19.0)
    assert times.take() == {"inner": 8.0, "outer": 2.0}
    assert times.take() == {}


def test_a_part_that_raises_counts() -> None:
    clock = Clock()
    times = PartTimes(clock)

    def run() -> None:
        clock.spend(1.0)
        raise ValueError("injected")

    with pytest.raises(ValueError, match="injected"):
        times.timed("part", run)()
    assert times.take() == {"part": 1.0}


def test_methods_are_timed_for_a_while() -> None:
    inner, outer = Called.inner, Called.outer
    with timing({"in": f"{__name__}.Called.inner", "out": f"{__name__}.Called.outer"}) as times:
        assert Called().outer() == "done"
        assert set(times.take()) == {"in", "out"}
    assert (Called.inner, Called.outer) == (inner, outer)


def test_parts_are_methods_that_there_are() -> None:
    for name in (*PARTS.values(), *AROUND.values()):
        owner, attribute = name.rsplit(".", 1)
        assert callable(getattr(_resolved(owner), attribute))
    assert len({*PARTS, *CUDA_PARTS, *AROUND}) == len(PARTS) + len(CUDA_PARTS) + len(AROUND)


def test_steps_are_those_of_the_arm_that_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(
        engine: Any, arm: str, chunks: Any, name: str
    ) -> tuple[dict[str, float], dict[str, float]]:
        place = float(ARMS.index(arm))
        return {"request plan": place}, {"step whole": place}

    monkeypatch.setattr(measuring, "_timed", timed)
    for repeat in range(1, 6):
        found = measuring.host_path(cast("Any", None), f"repeat {repeat}", chunks=2)
        assert found["step whole"] == 0.0
        plans = [found[name_of(arm, "request plan")] for arm in ARMS]
        assert plans == [float(place) for place in range(len(ARMS))]


def test_the_page() -> None:
    other = ARMS[2]
    figures = {
        "request plan": [10.0, 12.0],
        name_of(other, "request plan"): [20.0, 20.0],
        "request all parts": [14.0, 14.0],
        "request until scheduled": [30.0, 30.0],
        name_of(other, "request until scheduled"): [40.0, 42.0],
        "step plan": [0.0, 0.0],
        "step all parts": [50.0, 50.0],
        "step whole": [5000.0, 5000.0],
    }
    page = render({"picbench": figures}, GPU_FACTS | {"model": "M", "dtype": "d", "chunks": 64})
    assert "| part | " + " | ".join(f"`{arm}`" for arm in ARMS) + " |" in page
    assert "| plan | 11.000 (10.000 - 12.000) | - | 20.000 (20.000 - 20.000) | - | - |" in page
    assert "| until scheduled | 30.000 (30.000 - 30.000) | - | 41.000 (40.000 - 42.000) |" in page
    assert "| plan | 0.0 (0.0 - 0.0) |" in page
    assert "worker" not in page
    assert "a step that decodes is 1.0 %." in page

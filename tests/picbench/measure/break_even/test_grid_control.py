"""Which points of a grid say how fast a machine is for a trace, and what they say."""

from dataclasses import replace

import pytest

from picbench.engines.algorithms import Registry
from picbench.errors import ConfigError
from picbench.experiments.grid_plan import GRIDS, draw_traffic, plan_grid
from picbench.experiments.profile_check import GridControls, slowness_by_kind
from picbench.profile.grid import (
    ALONE,
    BURST,
    ArmCell,
    GridFacts,
    GridPoint,
    MeasuredCell,
    MeasuredGrid,
)
from picbench.profile.predictor import GridPredictor
from picbench.profile.profile import (
    ArmProfile,
    RequestSize,
    RequestSizes,
    TraceProfile,
    TrafficSums,
)
from picbench.profile.reuse import ReuseTotals

SETTINGS = GRIDS["cpu"]
FACTS = GridFacts("a machine", {}, "m", "float32", 1 << 20, 100, 4, "")


def cell(prompt: float, computed: float, output: float) -> ArmCell:
    """A machine that computes a thousand tokens a second, and ten tokens of a reply."""
    return ArmCell(
        requests=4,
        ttft_s=0.01 + computed / 1e3,
        ttft_p95_s=1.0,
        requests_s=1 / (0.01 + computed / 1e3 + (output - 1) / 10),
        peak_blocks=10,
        prompt=prompt,
        computed=computed,
        output=output,
    )


def share(arm: str, point: GridPoint) -> float:
    """How much of a prompt arms compute: mepic what does not recur, the others nearly all."""
    return 1.02 - point.reuse if arm == "mepic" else 0.9 + 0.1 * (arm == "full")


@pytest.fixture(scope="module")
def grid() -> MeasuredGrid:
    cells = []
    for traffic in plan_grid(SETTINGS):
        prompt = traffic.point.chunks * traffic.point.chunk_tokens
        arms = {
            arm: cell(prompt, prompt * share(arm, traffic.point), 4)
            for arm in ("full", "prefix", "mepic")
        }
        cells.append(MeasuredCell(traffic.point, traffic.seed, arms))
    return MeasuredGrid(FACTS, cells)


def profile(arm: str, prompt: int, computed: int) -> tuple[TraceProfile, ArmProfile]:
    """A trace of two requests alike, of which an arm computes so much."""
    totals = ReuseTotals(requests=2, prompt=2 * prompt, reused=2 * (prompt - computed))
    sizes = RequestSizes()
    sizes.add(RequestSize(prompt, computed, 0, 0, 0, 4))
    found = ArmProfile(Registry().parse(arm), totals, None, 1, sizes)
    traffic = TrafficSums(requests=2, prompt=2 * prompt)
    return TraceProfile("trace", "named", True, None, 4, traffic, (found,)), found


@pytest.mark.parametrize(
    ("arm", "computed", "reuse"),
    [("mepic", 96, 0.0), ("mepic", 48, 0.5), ("mepic", 7, 0.95), ("naive", 7, 0.95)],
)
def test_a_control_computes_about_as_much(
    grid: MeasuredGrid, arm: str, computed: int, reuse: float
) -> None:
    whole, own = profile(arm, 96, computed)
    found = GridControls(grid, SETTINGS).choose(whole, own, ALONE)
    assert (found.point.chunks, found.point.chunk_tokens) == (2, 48)
    assert found.point.reuse == reuse
    assert found.point.load == ALONE
    [traffic] = [t for t in plan_grid(SETTINGS) if (t.point, t.seed) == (found.point, 0)]
    assert found.samples == draw_traffic(traffic, SETTINGS).cold


def test_a_control_is_about_as_long(grid: MeasuredGrid) -> None:
    whole, own = profile("prefix", 700, 650)
    found = GridControls(grid, SETTINGS).choose(whole, own, BURST)
    assert (found.point.chunks, found.point.chunk_tokens) == (6, 128)
    assert found.point.load == BURST


def test_a_grid_without_such_arms_is_refused(grid: MeasuredGrid) -> None:
    cells = [
        replace(one, arms={arm: value for arm, value in one.arms.items() if arm != "mepic"})
        for one in grid.cells
    ]
    whole, own = profile("naive", 96, 48)
    with pytest.raises(ConfigError, match="the grid has no cells of alone requests"):
        GridControls(MeasuredGrid(FACTS, cells), SETTINGS).choose(whole, own, ALONE)


def test_arms_that_map_chunks_have_a_speed_of_their_own(grid: MeasuredGrid) -> None:
    predictor = GridPredictor(grid)
    points = {point.load: point for point in grid.points() if point.reuse == 0.5}

    def served(arm: str, slow: float) -> tuple[tuple[GridPoint, ArmCell], ...]:
        found = []
        for load in (ALONE, BURST):
            point = points[load]
            [one] = {c.arms[arm] for c in grid.points()[point]}
            slower = replace(one, ttft_s=slow * one.ttft_s, requests_s=one.requests_s / slow)
            found.append((point, slower))
        return tuple(found)

    arms = {"full": served("full", 1.0), "prefix": served("prefix", 1.2)}
    found = slowness_by_kind(predictor, arms | {"mepic": served("mepic", 1.5)})
    assert found[True].ttft == pytest.approx(1.5, rel=0.02)
    assert found[True].seconds == pytest.approx(1.5, rel=0.02)
    assert found[False].ttft == pytest.approx(1.1, rel=0.02)
    assert found[False].seconds == pytest.approx(1.1, rel=0.02)

"""What a page says of grids that end after a stage."""

from dataclasses import replace

import pytest

from picbench.experiments.break_even import stage_errors
from picbench.experiments.grid_plan import GRIDS, GridSettings, GridStage, plan_grid
from picbench.profile.grid import ArmCell, GridFacts, GridPoint, MeasuredCell, MeasuredGrid

FACTS = GridFacts("a machine", {}, "m", "float32", 1024, 100, 4, "")

#: A grid of two stages: prompts alone are served again before anything else is.
SETTINGS = replace(GRIDS["cpu"], again_tokens=10_000)


def cell(point: GridPoint, factor: float) -> ArmCell:
    prompt = point.chunks * point.chunk_tokens + 48.0
    seconds = factor * (0.01 + prompt / 1e3)
    return ArmCell(
        requests=4,
        ttft_s=seconds,
        ttft_p95_s=seconds,
        requests_s=1 / seconds,
        peak_blocks=10 * factor,
        prompt=prompt,
        computed=prompt,
        output=4,
    )


def measured(settings: GridSettings) -> MeasuredGrid:
    """mepic is better from half of the reuse on, with the last seeds from a quarter on."""
    cells = []
    for traffic in plan_grid(settings):
        for point in traffic.points:
            mepic = (1.5 if traffic.seed == 0 else 1.25) - point.reuse + 0.01
            arms = {arm: cell(point, 1.0) for arm in ("prefix", "reorder")}
            arms["mepic"] = cell(point, mepic)
            cells.append(MeasuredCell(point, traffic.seed, arms, 2.0))
    return MeasuredGrid(FACTS, cells)


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        (SETTINGS, (GridStage.ONCE, GridStage.SMALL, GridStage.AGAIN)),
        (GRIDS["cpu"], (GridStage.ONCE, GridStage.AGAIN)),
    ],
    ids=["small prompts first", "seed by seed"],
)
def test_each_stage_is_held_against_the_whole(
    settings: GridSettings, stages: tuple[GridStage, ...]
) -> None:
    grid = measured(settings)
    rows = [line.split(" | ") for line in stage_errors(grid, settings).splitlines()[2:]]
    assert tuple(row[0].removeprefix("| ") for row in rows) == stages
    counts = [int(row[1].split(" of ")[0]) for row in rows]
    assert [row[1] for row in rows] == [f"{count} of {count}" for count in counts]
    assert counts == sorted(counts)
    assert counts[-1] == len(grid.cells)
    half = replace(grid, cells=grid.cells[: counts[0] // 2])
    assert f"| {GridStage.ONCE} | {counts[0] // 2} of {counts[0]} |" in stage_errors(half, settings)
    assert [row[2] for row in rows] == [f"{2 * count:,}" for count in counts]
    assert "90 % within 25 points of the whole grid's" in rows[0][-1]
    assert "90 % within 0 points of the whole grid's" in rows[-1][-1]

"""Measure a grid within a time budget; what is measured stays, and the same call goes on.

All engines are up at once, and the arms of a cell are served one after another, in a new order for
each cell. Cells that something else on the host disturbed are measured once more after their stage.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from picbench.engines.config import EngineConfig
from picbench.errors import IncomparableRuns
from picbench.grid.measured_grid import (
    ALONE,
    ArmCell,
    GridFacts,
    GridPoint,
    MeasuredCell,
    MeasuredGrid,
    read_grid,
    write_grid,
)
from picbench.measure.break_even.break_even_ratios import SUBJECT
from picbench.measure.break_even.grid_engines import Described, GridEngines, open_engines
from picbench.measure.break_even.grid_estimate import GridProgress, estimate_grid
from picbench.measure.break_even.grid_plan import (
    GRIDS,
    GridSettings,
    GridStage,
    GridTraffic,
    draw_traffic,
    plan_grid,
)
from picbench.measure.break_even.same_engines import refuse_other_engines
from picbench.measure.break_even.serve_cells import make_work
from picbench.output import provenance
from picbench.output.json_file import locked
from picbench.profile.prediction.graph_sizes import graph_sizes, same_graphs
from picbench.workloads import models

#: Cells of one grid are measured on several days. Graphs are compared arm by arm.
_MAY_DIFFER = ("commit", "graph_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRun:
    """Which grid to measure, where it goes, and for how many seconds at most (0: no limit).

    Of a grid that several processes measure, each of them on a GPU of its own, `part` (k, n) is
    what this one serves; all of them write the same file.
    """

    model: str
    device: str
    dtype: str
    seconds: float
    output: Path
    commit: str | None = None
    caveat: str = ""
    part: tuple[int, int] = (1, 1)

    @property
    def settings(self) -> GridSettings:
        """The grid of the device."""
        return GRIDS[self.device]

    @property
    def engine(self) -> EngineConfig:
        """What the engines serve, on what."""
        path = str(models.resolve(self.model).path)
        return EngineConfig(model=path, device=self.device, dtype=self.dtype)

    @property
    def path(self) -> Path:
        """Where the cells are."""
        return self.output / "grid.json"


def estimate(run: GridRun) -> GridProgress:
    """What is left of the run's part."""
    grid = read_grid(run.path) if run.path.exists() else None
    planned = plan_grid(run.settings, run.part)
    return estimate_grid(planned, run.settings, run.device, grid)


def measure_grid(run: GridRun, say: Callable[[str], None]) -> GridProgress:
    """Measure what is left, as long as there is time, and write it cell by cell.

    Raises IncomparableRuns where the file has cells of other hardware, versions or models.
    """
    grid = read_grid(run.path) if run.path.exists() else None
    left = _left(plan_grid(run.settings, run.part), grid)
    say(str(estimate(run)))
    if not left:
        return estimate(run)
    began = time.monotonic()
    with open_engines(run.engine, run.settings) as (engines, described):
        facts = grid_facts(run, described)
        add_cells(run.path, facts, ())
        longest = 0.0
        for number, traffic in enumerate(_in_stages(left, run), 1):
            before = time.monotonic() - began
            if run.seconds and before + longest > run.seconds:
                break
            add_cells(run.path, facts, _measure(traffic, run, engines))
            spent = time.monotonic() - began
            longest = max(longest, spent - before)
            say(f"{number}: {traffic.point}, seed {traffic.seed}, {spent:,.0f} s")
    return estimate(run)


def add_cells(path: Path, facts: GridFacts, cells: Sequence[MeasuredCell]) -> MeasuredGrid:
    """Add cells to a file that other processes may add to, too; the grid that it has then.

    Of a cell that it has already the one that was disturbed less is kept. Raises IncomparableRuns
    where it has cells of other hardware, versions or models.
    """
    with locked(path):
        grid = _joined(read_grid(path) if path.exists() else None, facts, path)
        kept = {(cell.point, cell.seed): cell for cell in grid.cells}
        new = {(cell.point, cell.seed): cell for cell in cells if _is_better(cell, kept)}
        joined = _with_commit(grid.facts, facts.versions["commit"]) if new else grid.facts
        grid = MeasuredGrid(joined, list((kept | new).values()))
        write_grid(path, grid)
    return grid


def _is_better(cell: MeasuredCell, kept: Mapping[tuple[GridPoint, int], MeasuredCell]) -> bool:
    known = kept.get((cell.point, cell.seed))
    return known is None or cell.quiet > known.quiet


def _measure(traffic: GridTraffic, run: GridRun, engines: GridEngines) -> list[MeasuredCell]:
    settings = run.settings
    requests = draw_traffic(traffic, settings)
    running = 1 if traffic.point.load == ALONE else settings.running
    arms = settings.arms_at(traffic.point)
    order = Random(f"{traffic}").sample(arms, len(arms))
    found: dict[str, Sequence[ArmCell]] = {}
    began = time.monotonic()
    for arm in order:
        stock = engines.is_stock(arm)
        work = make_work(arm, requests, running, stock=stock, filling=settings.running)
        found[arm] = engines.serve(work)
    seconds = (time.monotonic() - began) / len(traffic.points)
    return [
        MeasuredCell(point, traffic.seed, {arm: found[arm][place] for arm in arms}, seconds)
        for place, point in enumerate(traffic.points)
    ]


def grid_facts(run: GridRun, described: Described) -> GridFacts:
    """What is measured here, and on what; engines are `described` by themselves."""
    engine = described[SUBJECT]
    found = provenance.facts(*provenance.ENGINE, device=run.device, commit=run.commit)
    versions = {name: str(found[name]) for name in ("driver", "torch", "vllm", "commit")}
    return GridFacts(
        hardware=str(found["gpu"]),
        versions=versions,
        model=models.resolve(run.model).label,
        dtype=run.dtype,
        block_bytes=int(str(engine["block_bytes"])),
        pool=run.settings.pool,
        running=run.settings.running,
        caveat=run.caveat,
        step_tokens=int(str(engine["batch_tokens"])),
        graph_tokens={arm: int(str(each["graph_tokens"])) for arm, each in described.items()},
    )


def _joined(grid: MeasuredGrid | None, facts: GridFacts, path: Path) -> MeasuredGrid:
    """The grid to add cells to."""
    if grid is None or not grid.cells:
        return MeasuredGrid(facts, [])
    if not same_graphs(grid.facts, facts):
        raise IncomparableRuns(
            f"{path}: was measured with {graph_sizes(grid.facts)}, here are {graph_sizes(facts)}",
            hint="name another `output`",
        )
    refuse_other_engines(path, grid.facts, facts, _MAY_DIFFER)
    return grid


def _with_commit(facts: GridFacts, commit: str) -> GridFacts:
    """Facts of a grid that has cells of `commit`, too."""
    commits = [*facts.versions["commit"].split(", "), commit]
    joined = ", ".join(dict.fromkeys(commits))
    return replace(facts, versions={**facts.versions, "commit": joined})


def _left(planned: Sequence[GridTraffic], grid: MeasuredGrid | None) -> list[GridTraffic]:
    done = {(cell.point, cell.seed) for cell in grid.cells} if grid else set()
    return [traffic for traffic in planned if (traffic.point, traffic.seed) not in done]


def _in_stages(left: Sequence[GridTraffic], run: GridRun) -> Iterator[GridTraffic]:
    """What is left of each stage, and then once more what was disturbed there, by any call."""
    stage_of = run.settings.stage
    for stage in GridStage:
        yield from (traffic for traffic in left if stage_of(traffic) is stage)
        yield from (traffic for traffic in _disturbed(run) if stage_of(traffic) is stage)


def _disturbed(run: GridRun) -> Iterator[GridTraffic]:
    """The traffic of the run's part that something else disturbed when it was measured."""
    cells = read_grid(run.path).cells
    found = {(cell.point, cell.seed) for cell in cells if cell.disturbed}
    for traffic in plan_grid(run.settings, run.part):
        if any((point, traffic.seed) in found for point in traffic.points):
            yield traffic

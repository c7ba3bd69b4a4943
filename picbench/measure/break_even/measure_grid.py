"""Measure a grid within a time budget; what is measured stays, and the same call goes on.

All engines are up at once, each in a process of its own, and the arms of a cell are served one
after another, in a new order for each cell. On a GPU `full`, `prefix` and `reorder` are stock vLLM
with the budgets that it has by default. On a CPU one engine serves all arms: stock vLLM has blocks
of another size there.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

from picbench.arms.server import Server
from picbench.engines.config import EngineConfig
from picbench.errors import IncomparableRuns
from picbench.grid.measured_grid import (
    ALONE,
    ArmCell,
    GridFacts,
    MeasuredCell,
    MeasuredGrid,
    read_grid,
    write_grid,
)
from picbench.measure.break_even.break_even_ratios import SUBJECT
from picbench.measure.break_even.grid_estimate import GridProgress, estimate_grid
from picbench.measure.break_even.grid_plan import (
    ARMS,
    GRIDS,
    GridSettings,
    GridTraffic,
    draw_traffic,
    plan_grid,
)
from picbench.measure.break_even.same_engines import refuse_other_engines
from picbench.measure.break_even.serve_cells import make_work, serve_cells
from picbench.measure.started_engines import started_engines
from picbench.output import provenance
from picbench.output.json_file import locked
from picbench.profile.prediction.graph_sizes import graph_sizes, same_graphs
from picbench.workloads import models

#: The engine of each arm, and whether it is stock.
Engines = Mapping[str, tuple[Server, bool]]

#: What the engine of each arm says of itself.
Described = Mapping[str, Mapping[str, object]]

#: Arms that stock vLLM serves.
_STOCK = ("full", "prefix", "reorder")

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
    with open_engines(run) as (engines, described):
        facts = grid_facts(run, described)
        add_cells(run.path, facts, ())
        longest = 0.0
        for number, traffic in enumerate(left, 1):
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

    Raises IncomparableRuns where it has cells of other hardware, versions or models.
    """
    with locked(path):
        grid = _joined(read_grid(path) if path.exists() else None, facts, path)
        known = {(cell.point, cell.seed) for cell in grid.cells}
        new = [cell for cell in cells if (cell.point, cell.seed) not in known]
        joined = _with_commit(grid.facts, facts.versions["commit"]) if new else grid.facts
        grid = MeasuredGrid(joined, [*grid.cells, *new])
        write_grid(path, grid)
    return grid


def _measure(traffic: GridTraffic, run: GridRun, engines: Engines) -> list[MeasuredCell]:
    settings = run.settings
    requests = draw_traffic(traffic, settings)
    running = 1 if traffic.point.load == ALONE else settings.running
    arms = settings.arms_at(traffic.point)
    order = Random(f"{traffic}").sample(arms, len(arms))
    found: dict[str, Sequence[ArmCell]] = {}
    began = time.monotonic()
    for arm in order:
        engine, stock = engines[arm]
        work = make_work(arm, requests, running, stock=stock, filling=settings.running)
        found[arm] = engine.call(partial(serve_cells, work))
    seconds = (time.monotonic() - began) / len(traffic.points)
    return [
        MeasuredCell(point, traffic.seed, {arm: found[arm][place] for arm in arms}, seconds)
        for place, point in enumerate(traffic.points)
    ]


@contextmanager
def open_engines(run: GridRun) -> Iterator[tuple[Engines, Described]]:
    """The engine of each arm and whether it is stock, and what it says of itself."""
    settings = run.settings
    config = EngineConfig(
        model=str(models.resolve(run.model).path),
        device=run.device,
        dtype=run.dtype,
        context=settings.longest + 64,
        kv_blocks=settings.pool,
        tiers="",
    )
    configs = {"picbench": config}
    if run.device == "cuda":
        configs["stock"] = replace(config, stock=True, algorithm="prefix")
    with started_engines(configs) as (servers, described):
        chosen = {
            arm: "stock" if "stock" in servers and arm in _STOCK else "picbench" for arm in ARMS
        }
        yield (
            {arm: (servers[name], name == "stock") for arm, name in chosen.items()},
            {arm: described[name] for arm, name in chosen.items()},
        )


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

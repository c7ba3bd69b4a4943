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
from tempfile import TemporaryDirectory

from picbench.arms.server import Server, launch
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
from picbench.measure.break_even.grid_plan import (
    ARMS,
    GRIDS,
    GridSettings,
    GridTraffic,
    draw_traffic,
    plan_grid,
)
from picbench.measure.break_even.serve_cells import make_work, serve_cells
from picbench.output import provenance
from picbench.workloads import models

#: Arms that stock vLLM serves.
_STOCK = ("full", "prefix", "reorder")

#: Of these facts cells of one grid may have different ones: they are measured on several days.
_MAY_DIFFER = ("commit",)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRun:
    """Which grid to measure, where it goes, and for how many seconds at most (0: no limit)."""

    model: str
    device: str
    dtype: str
    seconds: float
    output: Path
    commit: str | None = None
    caveat: str = ""

    @property
    def settings(self) -> GridSettings:
        """The grid of the device."""
        return GRIDS[self.device]

    @property
    def path(self) -> Path:
        """Where the cells are."""
        return self.output / "grid.json"


@dataclass(frozen=True, slots=True)
class GridProgress:
    """How much of a grid is measured, and what the rest may take.

    `tokens` are prompt tokens of all arms that are left; `seconds` is None before any was measured.
    """

    done: int
    total: int
    tokens: int
    seconds: float | None

    def __str__(self) -> str:
        left = "not known yet" if self.seconds is None else f"about {self.seconds / 60:,.0f} min"
        return (
            f"{self.done} of {self.total} traffics measured, {self.tokens:,} prompt tokens left, "
            f"{left} without the start of engines"
        )


def estimate(run: GridRun, grid: MeasuredGrid | None) -> GridProgress:
    """What is left; seconds by those of the prompt tokens that were measured."""
    planned = plan_grid(run.settings)
    left = _left(planned, grid)
    tokens = sum(_tokens(traffic, run.settings) for traffic in left)
    seconds = None
    if grid and grid.cells:
        known = [traffic for traffic in planned if traffic not in left]
        spent = sum(cell.seconds for cell in grid.cells)
        seconds = tokens * spent / max(1, sum(_tokens(t, run.settings) for t in known))
    return GridProgress(len(planned) - len(left), len(planned), tokens, seconds)


def measure_grid(run: GridRun, say: Callable[[str], None]) -> GridProgress:
    """Measure what is left, as long as there is time, and write it cell by cell.

    Raises IncomparableRuns where the file has cells of other hardware, versions or models.
    """
    grid = read_grid(run.path) if run.path.exists() else None
    say(str(estimate(run, grid)))
    left = _left(plan_grid(run.settings), grid)
    if not left:
        return estimate(run, grid)
    began = time.monotonic()
    with open_engines(run) as (engines, block_bytes):
        facts = grid_facts(run, block_bytes)
        grid = _joined(grid, facts, run.path)
        longest = 0.0
        for number, traffic in enumerate(left, 1):
            before = time.monotonic() - began
            if run.seconds and before + longest > run.seconds:
                break
            grid = MeasuredGrid(grid.facts, [*grid.cells, *_measure(traffic, run, engines)])
            write_grid(run.path, grid)
            spent = time.monotonic() - began
            longest = max(longest, spent - before)
            say(f"{number}: {traffic.point}, seed {traffic.seed}, {spent:,.0f} s")
    return estimate(run, grid)


def _measure(
    traffic: GridTraffic, run: GridRun, engines: Mapping[str, tuple[Server, bool]]
) -> list[MeasuredCell]:
    settings = run.settings
    cold, warm, stream = draw_traffic(traffic, settings)
    running = 1 if traffic.point.load == ALONE else settings.running
    order = Random(f"{traffic}").sample(ARMS, len(ARMS))
    found: dict[str, Sequence[ArmCell]] = {}
    began = time.monotonic()
    for arm in order:
        engine, stock = engines[arm]
        work = make_work(arm, (cold, warm), running, stream.arrivals, stock=stock)
        found[arm] = engine.call(partial(serve_cells, work))
    seconds = (time.monotonic() - began) / len(traffic.points)
    return [
        MeasuredCell(point, traffic.seed, {arm: found[arm][place] for arm in ARMS}, seconds)
        for place, point in enumerate(traffic.points)
    ]


@contextmanager
def open_engines(run: GridRun) -> Iterator[tuple[Mapping[str, tuple[Server, bool]], int]]:
    """The engine of each arm and whether it is stock, and the bytes of a KV block."""
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
    servers: dict[str, Server] = {}
    with TemporaryDirectory(prefix="picbench-") as logs:
        try:
            for name, each in configs.items():
                servers[name] = launch(name, each, Path(logs) / f"{name}.log")
            described = [server.ready() for server in servers.values()]
            stock = "stock" in servers
            yield (
                {
                    arm: (servers["stock"], True)
                    if stock and arm in _STOCK
                    else (servers["picbench"], False)
                    for arm in ARMS
                },
                int(str(described[0]["block_bytes"])),
            )
            for server in servers.values():
                server.close()
        finally:
            for server in servers.values():
                server.kill()


def grid_facts(run: GridRun, block_bytes: int) -> GridFacts:
    """What is measured here, and on what."""
    found = provenance.facts(*provenance.ENGINE, device=run.device, commit=run.commit)
    versions = {name: str(found[name]) for name in ("driver", "torch", "vllm", "commit")}
    return GridFacts(
        hardware=str(found["gpu"]),
        versions=versions,
        model=models.resolve(run.model).label,
        dtype=run.dtype,
        block_bytes=block_bytes,
        pool=run.settings.pool,
        running=run.settings.running,
        caveat=run.caveat,
    )


def _joined(grid: MeasuredGrid | None, facts: GridFacts, path: Path) -> MeasuredGrid:
    """The grid to add cells to; its commit is that of the first cells."""
    if grid is None:
        return MeasuredGrid(facts, [])
    for name, value in grid.facts.versions.items():
        if name not in _MAY_DIFFER and facts.versions.get(name) != value:
            raise IncomparableRuns(
                f"{path}: was measured with {name} {value}, here is {facts.versions.get(name)}",
                hint="name another `output`",
            )
    for field in ("hardware", "model", "dtype", "block_bytes", "pool", "running"):
        if getattr(grid.facts, field) != getattr(facts, field):
            raise IncomparableRuns(
                f"{path}: its {field} is {getattr(grid.facts, field)}, here it is "
                f"{getattr(facts, field)}",
                hint="name another `output`",
            )
    return grid


def _left(planned: Sequence[GridTraffic], grid: MeasuredGrid | None) -> list[GridTraffic]:
    done = {(cell.point, cell.seed) for cell in grid.cells} if grid else set()
    return [traffic for traffic in planned if (traffic.point, traffic.seed) not in done]


def _tokens(traffic: GridTraffic, settings: GridSettings) -> int:
    point = traffic.point
    requests = 2 * (settings.alone if point.load == ALONE else settings.burst)
    return len(ARMS) * requests * (point.chunks * point.chunk_tokens + 48)

"""How long what is left of a grid will take."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random

import numpy as np

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.ledger import summarise
from picbench.engines.request import Request, Result
from picbench.errors import EngineError, IncomparableRuns
from picbench.experiments.break_even import SUBJECT
from picbench.experiments.engines import started_engines
from picbench.experiments.grid_plan import (
    ARMS,
    GRIDS,
    GridRequests,
    GridSettings,
    GridStage,
    GridTraffic,
    draw_traffic,
    plan_grid,
)
from picbench.experiments.warm_chunks import QuietCores
from picbench.files import locked
from picbench.profile.grid import (
    ALONE,
    BURST,
    ArmCell,
    GridFacts,
    GridPoint,
    MeasuredCell,
    MeasuredGrid,
    read_grid,
    write_grid,
)
from picbench.run.schedule import ChunkOrder, to_request
from picbench.run.server import Server
from picbench.store import provenance
from picbench.workloads import models
from picbench.workloads.sample import Sample

#: Prompt tokens a second of which nothing is cached, and seconds of a step that only generates.
#: CPU: two cores of an AMD EPYC, the testbed's model. CUDA: an H200, Llama-3.1-8B's shape.
_SPEED = {"cpu": 2_700.0, "cuda": 38_000.0}
_STEP = {"cpu": 0.015, "cuda": 0.01}

#: Seconds until engines answer that start together.
_START = {"cpu": 25.0, "cuda": 130.0}

#: Tokens of a prompt beside its chunks, about.
_TEXT = 48

#: Arms that map chunks, half of which are not there yet where the cache is cold.
_LINKED = ("mepic", "naive")


@dataclass(frozen=True, slots=True)
class GridShare:
    """A part of the traffic: how much of it is left, prompt tokens of all arms, and seconds."""

    name: str
    left: int
    total: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.total - self.left} of {self.total} measured, "
            f"{self.tokens:,} prompt tokens left, about {self.seconds:,.0f} s"
        )


@dataclass(frozen=True, slots=True)
class GridProgress:
    """How much of a grid is measured, kind by kind, and stage by stage in their order.

    `start` are seconds until engines answer.
    """

    shares: tuple[GridShare, ...]
    stages: tuple[GridShare, ...]
    start: float

    @property
    def done(self) -> int:
        """How many traffics were measured."""
        return self.total - sum(share.left for share in self.shares)

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(share.total for share in self.shares)

    @property
    def tokens(self) -> int:
        """Prompt tokens that are left."""
        return sum(share.tokens for share in self.shares)

    @property
    def seconds(self) -> float:
        """Seconds that are left, without the start of engines."""
        return sum(share.seconds for share in self.shares)

    def __str__(self) -> str:
        stages = [f"{n}. {share}" for n, share in enumerate(self.stages, 1)]
        lines = [*map(str, self.shares), *(stages if len(stages) > 1 else ())]
        whole = (
            f"{self.done} of {self.total} traffics measured, {self.tokens:,} prompt tokens left, "
            f"about {self.seconds:,.0f} s, and {self.start:,.0f} s for each start of engines"
        )
        return "\n".join([*lines, whole])


def estimate_grid(
    planned: Sequence[GridTraffic], settings: GridSettings, device: str, grid: MeasuredGrid | None
) -> GridProgress:
    """What is left of `planned`; by the seconds of what is measured, once anything is."""
    done = {(cell.point, cell.seed) for cell in grid.cells} if grid else set()
    factor = _factor(grid, settings, device) if grid and grid.cells else 1.0
    kinds: dict[str, list[GridTraffic]] = {}
    stages: dict[str, list[GridTraffic]] = {}
    for traffic in planned:
        kinds.setdefault(_kind(traffic, settings), []).append(traffic)
        stages.setdefault(settings.stage(traffic), []).append(traffic)
    share = partial(_share, done=done, settings=settings, device=device, factor=factor)
    return GridProgress(
        tuple(share(name, found) for name, found in sorted(kinds.items())),
        tuple(share(name, found) for name, found in stages.items()),
        _START[device],
    )


def _share(
    name: str,
    found: Sequence[GridTraffic],
    *,
    done: set[tuple[GridPoint, int]],
    settings: GridSettings,
    device: str,
    factor: float,
) -> GridShare:
    left = [traffic for traffic in found if (traffic.point, traffic.seed) not in done]
    tokens = sum(_prompt(t, settings) * len(settings.arms_at(t.point)) for t in left)
    seconds = factor * sum(_expected(t, settings, device) for t in left)
    return GridShare(name, len(left), len(found), tokens, seconds)


def _factor(grid: MeasuredGrid, settings: GridSettings, device: str) -> float:
    """By how much what was measured took longer than expected."""
    cold = [cell for cell in grid.cells if cell.point.cache == "cold"]
    known = [GridTraffic(cell.point, cell.seed) for cell in cold]
    spent = sum(cell.seconds for cell in grid.cells)
    expected = sum(_expected(traffic, settings, device) for traffic in known)
    return spent / expected if spent and expected else 1.0


def _expected(traffic: GridTraffic, settings: GridSettings, device: str) -> float:
    """Seconds of all arms of a traffic, with a cold cache and a warm one."""
    point, requests = traffic.point, 2 * settings.requests(traffic.point)
    running = 1 if point.load == ALONE else settings.running
    generated = point.output * max(2, requests / running) * _STEP[device]
    arriving = requests / float(point.load) if point.load not in (ALONE, BURST) else 0.0
    filled = _fill(traffic, settings) / _SPEED[device]
    return sum(
        max(share * _prompt(traffic, settings) / _SPEED[device] + generated, arriving)
        + (filled if arm != "full" else 0.0)
        for arm, share in _computed(traffic, settings)
    )


def _computed(traffic: GridTraffic, settings: GridSettings) -> Iterator[tuple[str, float]]:
    """The share of prompt tokens that each arm computes, about."""
    for arm in settings.arms_at(traffic.point):
        yield arm, 1 - 0.75 * traffic.point.reuse if arm in _LINKED else 1.0


def _fill(traffic: GridTraffic, settings: GridSettings) -> float:
    """Tokens that fill the cache of one arm: chunks that warm requests draw from the corpus."""
    point = traffic.point
    drawn = settings.requests(point) * point.chunks * point.reuse
    used = point.corpus * (1 - math.pow(1 - 1 / point.corpus, drawn))
    return used * (point.chunk_tokens + _TEXT)


def _prompt(traffic: GridTraffic, settings: GridSettings) -> int:
    """Prompt tokens of all requests of one arm."""
    point = traffic.point
    return 2 * settings.requests(point) * (point.chunks * point.chunk_tokens + _TEXT)


def _kind(traffic: GridTraffic, settings: GridSettings) -> str:
    point = traffic.point
    if point.load != BURST:
        return "alone" if point.load == ALONE else "at rates"
    if point.output != settings.output:
        return "other replies"
    if point.corpus not in (settings.corpus, point.chunks):
        return "other corpora"
    return "in bursts"


def refuse_other_engines(
    path: Path, there: GridFacts, here: GridFacts, may_differ: Collection[str] = ()
) -> None:
    """Raise IncomparableRuns with the first fact or version in which a file's facts are others.

    Caveats may differ, and what is named.
    """
    read, mine = _named(there), _named(here)
    for name in read | mine:
        if name not in may_differ and read.get(name) != mine.get(name):
            raise IncomparableRuns(
                f"{path}: was measured with {name} {read.get(name)}, here is {mine.get(name)}",
                hint="name another `output`",
            )


def _named(facts: GridFacts) -> dict[str, object]:
    """Versions beside all other facts."""
    found = asdict(facts)
    versions: dict[str, object] = found.pop("versions")
    del found["caveat"]
    return versions | found


@dataclass(frozen=True, slots=True)
class CellBatch:
    """Requests that are served together, at their `arrivals` if any: seconds from its start.

    One that is not `measured` is there for the cache.
    """

    requests: tuple[Request, ...]
    arrivals: tuple[float, ...] | None = None
    measured: bool = True


@dataclass(frozen=True, slots=True)
class CellWork:
    """What an arm serves: batches one after another, without dropping KV between them.

    Where they do not arrive, `running` requests are served at a time, and `filling` of those that
    are there for the cache: what it has in the end is the same.
    """

    arm: str
    batches: tuple[CellBatch, ...]
    running: int
    filling: int = 1


class CellWorkMaker:
    """Makes requests of samples for one arm; `full` of a stock engine gets a tenant for each."""

    def __init__(self, arm: str, *, stock: bool) -> None:
        self._arm, self._stock = arm, stock
        self._order, self._tenants = ChunkOrder(), 0

    def make(
        self,
        samples: Sequence[Sample],
        arrivals: Sequence[float] | None = None,
        *,
        measured: bool = True,
    ) -> CellBatch:
        """A batch that follows those that were made before; `arrivals` may begin at any time."""
        times = None if arrivals is None else tuple(time - arrivals[0] for time in arrivals)
        return CellBatch(tuple(map(self._request, samples)), times, measured)

    def _request(self, sample: Sample) -> Request:
        reordered = self._arm == "reorder"
        sent = self._order.arrange(sample) if reordered else sample
        request = to_request(sent, None if self._stock else "prefix" if reordered else self._arm)
        if not (self._stock and self._arm == "full"):
            return request
        self._tenants += 1
        return replace(request, salt=f"tenant {self._tenants}")


def make_work(
    arm: str, requests: GridRequests, running: int, *, stock: bool, filling: int = 1
) -> CellWork:
    """What an arm serves at a point. Nothing fills the cache of `full`, which has none."""
    maker, count = CellWorkMaker(arm, stock=stock), len(requests.cold)
    times = requests.arrivals
    cold = maker.make(requests.cold, times and times[:count])
    fill = maker.make(() if arm == "full" else requests.fill, measured=False)
    warm = maker.make(requests.warm, times and times[count:])
    return CellWork(arm, (cold, fill, warm), running, filling)


def without_replies(work: CellWork) -> CellWork:
    """The same prompts, of whose replies only the first token is generated: for TTFT."""
    batches = (
        replace(batch, requests=tuple(replace(r, max_tokens=1) for r in batch.requests))
        for batch in work.batches
    )
    return replace(work, batches=tuple(batches))


@dataclass(frozen=True, slots=True)
class ServedCells:
    """A cell for each batch that is measured, and the shortest loop on a core; see `QuietCores`."""

    cells: list[ArmCell]
    shortest: float | None


def serve_cells(work: CellWork, shortest: float | None, engine: Engine) -> ServedCells:
    """Serve all batches from an empty cache.

    The `shortest` loop that was met before says which cores are quiet; None: any core will do.
    Raises EngineError for a failure.
    """
    engine.reset()
    cores = None if shortest is None else QuietCores(shortest)
    found = []
    for batch in work.batches:
        if not batch.requests:
            continue
        engine.measure()
        running = work.running if batch.measured else work.filling
        served = _serve(engine, batch, running, cores)
        failed = next((result.error for result in served.results if result.error), None)
        if failed is not None:
            raise EngineError(f"a request of the grid failed: {failed}")
        if batch.measured:
            found.append(_cell(served, summarise(engine.memory).peak_referenced))
    return ServedCells(found, None if cores is None else cores.shortest)


@dataclass(frozen=True, slots=True)
class _Served:
    """Results, the seconds that the engine was busy, and the share of calls on a quiet core."""

    results: Sequence[Result]
    busy_s: float
    quiet: float | None


def _serve(engine: Engine, batch: CellBatch, running: int, cores: QuietCores | None) -> _Served:
    """Serve a batch in one call of the engine; where cores matter, one for each request alone."""
    alone = cores is not None and running == 1 and batch.arrivals is None
    calls = [(one,) for one in batch.requests] if alone else [batch.requests]
    results, busy, quiet = list[Result](), 0.0, 0
    for requests in calls:
        quiet += cores is not None and cores.settle()
        results += engine.generate(
            requests,
            ignore_eos=True,
            concurrency=None if batch.arrivals else running,
            arrivals=batch.arrivals,
        )
        busy += engine.busy_s
    return _Served(results, busy, None if cores is None else quiet / len(calls))


def _cell(served: _Served, peak: float) -> ArmCell:
    results = served.results
    ttft = [result.timings.ttft for result in results]
    counts = [result.counts for result in results]
    computed = [c.prompt - (c.reused or 0) + c.compiled for c in counts]
    compiled = [count.compiled for count in counts]
    return ArmCell(
        requests=len(results),
        ttft_s=float(np.median(ttft)),
        ttft_p95_s=float(np.quantile(ttft, 0.95)),
        requests_s=len(results) / served.busy_s,
        peak_blocks=peak,
        prompt=float(np.mean([count.prompt for count in counts])),
        computed=float(np.mean(computed)),
        output=float(np.mean([len(result.tokens) for result in results])),
        compiled=float(np.mean(compiled)),
        middle=_middle(sorted(zip(computed, compiled, strict=True))),
        quiet=served.quiet,
    )


def _middle(ascending: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The means of the one or two requests whose TTFT makes the median."""
    low, high = ascending[(len(ascending) - 1) // 2], ascending[len(ascending) // 2]
    return (low[0] + high[0]) / 2, (low[1] + high[1]) / 2


#: What the engine of each arm says of itself.
Described = Mapping[str, Mapping[str, object]]

#: Arms that stock vLLM serves.
_STOCK = ("full", "prefix", "reorder")


class GridEngines:
    """The engine of each arm, which serves cells.

    With `settles` requests alone begin on quiet cores. All engines hold a core against the quietest
    one that any of them has met so far.
    """

    def __init__(
        self, servers: Mapping[str, Server], stock: frozenset[str], *, settles: bool
    ) -> None:
        self._servers, self._stock = servers, stock
        self._shortest = inf if settles else None

    def is_stock(self, arm: str) -> bool:
        """Whether stock vLLM serves an arm."""
        return arm in self._stock

    def serve(self, work: CellWork) -> list[ArmCell]:
        """Serve what an arm is to serve; a cell for each batch that is measured.

        Raises EngineError for a failure.
        """
        serve = partial(serve_cells, work, self._shortest)
        served: ServedCells = self._servers[work.arm].call(serve)
        self._shortest = served.shortest
        return served.cells


@contextmanager
def open_engines(
    config: EngineConfig, settings: GridSettings
) -> Iterator[tuple[GridEngines, Described]]:
    """Engines of a model, for a device and a type, and what the one of each arm says of itself."""
    config = replace(config, context=settings.longest + 64, kv_blocks=settings.pool, tiers="")
    configs = {"picbench": config}
    if config.device == "cuda":
        configs["stock"] = replace(config, stock=True, algorithm="prefix")
    with started_engines(configs) as (servers, described):
        on_gpu = config.device == "cuda"
        stock = frozenset(_STOCK if on_gpu else ())
        names = {arm: "stock" if arm in stock else "picbench" for arm in ARMS}
        by_arm = {arm: servers[name] for arm, name in names.items()}
        # A CPU that computes the steps is never quiet.
        engines = GridEngines(by_arm, stock, settles=on_gpu)
        yield engines, {arm: described[name] for arm, name in names.items()}


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
    if not grid.facts.same_graphs(facts):
        raise IncomparableRuns(
            f"{path}: was measured with {grid.facts.graphs()}, here are {facts.graphs()}",
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

"""The grid of break-even: which traffic it has, in which order, and how engines serve it.

The values of its axes are in ``data/break_even.yaml``.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import count, product
from math import inf
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import yaml
from pydantic import TypeAdapter

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.ledger import summarise
from picbench.engines.request import Request, Result
from picbench.errors import EngineError, IncomparableRuns
from picbench.experiments.host_cores import QuietCores
from picbench.profile.grid import (
    ALONE,
    BURST,
    ArmCell,
    GridFacts,
    GridPoint,
)
from picbench.run.measurements import BreakEven, ProfileCheck
from picbench.run.runner import Described, Engines
from picbench.run.schedule import ChunkOrder, to_request
from picbench.store import provenance
from picbench.workloads import models
from picbench.workloads.sample import Sample, SampleSegment
from picbench.workloads.traffic.corpus import from_tokens
from picbench.workloads.traffic.draw import draw
from picbench.workloads.traffic.settings import Traffic

#: The grids and the unseen traces, by device.
DATA = Path(__file__).parent / "data" / "break_even.yaml"

#: Ids that every model's vocabulary has; the first ones are often special.
IDS = range(16, 1000)

#: Arms that are compared, those that stock vLLM serves on a GPU, and those that are compared at a
#: rate of arrivals, where seconds pass whatever is served.
ARMS = ("full", "prefix", "reorder", "mepic", "naive")
_STOCK, _RATED = ("full", "prefix", "reorder"), ("prefix", "reorder", "mepic")

#: Tokens of a prompt beside its chunks, about.
_TEXT = 48

#: Facts that cells of one grid may differ in: they are measured on several days.
_MAY_DIFFER = ("commit", "graph_tokens")


class GridStage(StrEnum):
    """What is measured after what: a grid is of use after each of them."""

    ONCE = "each traffic once"
    SMALL = "small prompts alone, with other seeds"
    BESIDE = "other corpora and rates"
    AGAIN = "all else, with other seeds"


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSettings:
    """The values of each axis, and how much is served in a cell; ``break_even.yaml`` says more."""

    reuse: tuple[float, ...]
    chunks: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    corpus: int
    seeds: int
    alone: int
    most_alone: int
    alone_tokens: int
    burst: int
    burst_tokens: int
    running: int
    alone_output: int
    output: int
    pool: int
    arms: tuple[str, ...]
    prompt_tokens_s: float
    step_s: float
    corpora: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    outputs: tuple[int, ...] = ()
    alone_chunks: tuple[int, ...] = ()
    small_arms: tuple[str, ...] = ()
    small_tokens: int = 0
    again_tokens: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its reply."""
        return max(self.chunks) * max(self.chunk_tokens) + 64 + max(self.output, *self.outputs, 0)

    def requests(self, point: GridPoint) -> int:
        """How many requests are served at a point with a cold cache, and again with a warm one."""
        prompt = point.chunks * point.chunk_tokens
        if point.load == ALONE:
            return min(self.most_alone, max(self.alone_tokens // prompt, self.alone))
        return min(self.burst, max(self.burst_tokens // prompt, self.running // 2))

    def arms_at(self, point: GridPoint) -> tuple[str, ...]:
        """The arms that are served at a point.

        `full` takes the same at every reuse. Where no chunk recurs, `reorder` sends what `prefix`
        does.
        """
        arms = self.arms if point.reuse == min(self.reuse) else self.arms[1:]
        arms = arms if point.load in (ALONE, BURST) else _RATED
        if not point.reuse:
            arms = tuple(arm for arm in arms if arm != "reorder")
        new = (1 - point.reuse) * point.chunks * point.chunk_tokens
        small = point.load == ALONE and new <= self.small_tokens
        return (*arms, *self.small_arms) if small else arms

    def stage(self, traffic: "GridTraffic") -> GridStage:
        """When traffic is measured."""
        point, prompt = traffic.point, traffic.point.chunks * traffic.point.chunk_tokens
        if traffic.seed:
            small = point.load == ALONE and prompt <= self.again_tokens
            return GridStage.SMALL if small else GridStage.AGAIN
        closed = point.load in (ALONE, BURST)
        usual = point.corpus == max(self.corpus, point.chunks)
        return GridStage.ONCE if closed and usual else GridStage.BESIDE

    def seconds(self, point: GridPoint) -> float:
        """About how long all arms take at a point, with a cold cache and a warm one."""
        requests = 2 * self.requests(point)
        prompts = requests * (point.chunks * point.chunk_tokens + _TEXT)
        steps = point.output * max(2, requests / (1 if point.load == ALONE else self.running))
        took = prompts / self.prompt_tokens_s + steps * self.step_s
        arriving = 0.0 if point.load in (ALONE, BURST) else requests / float(point.load)
        return len(self.arms_at(point)) * max(took, arriving)


def read_grids() -> dict[str, GridSettings]:
    """The grids that are measured, by device."""
    found = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, GridSettings]).validate_python(found["grids"])


@dataclass(frozen=True, slots=True)
class GridTraffic:
    """Traffic that every arm serves with a cold cache, and as much again with a warm one."""

    point: GridPoint
    seed: int

    @property
    def points(self) -> tuple[GridPoint, GridPoint]:
        """The points that it gives: the cold one, the warm one."""
        return self.point, replace(self.point, cache="warm")

    @property
    def keys(self) -> set[tuple[GridPoint, int]]:
        """What its cells are told apart by."""
        return {(point, self.seed) for point in self.points}


def plan_grid(settings: GridSettings) -> list[GridTraffic]:
    """All traffic of a grid: stage by stage, seed by seed, in a random order, so that any part of
    a stage is even.
    """
    found: list[GridTraffic] = []
    for seed in range(settings.seeds):
        points = list(_points(settings))
        Random(f"{seed}/order").shuffle(points)
        found += [GridTraffic(point, seed) for point in points]
    order = list(GridStage)
    return sorted(found, key=lambda traffic: order.index(settings.stage(traffic)))


def _points(settings: GridSettings) -> Iterator[GridPoint]:
    def point(
        reuse: float, chunks: int, tokens: int, corpus: int, load: str, output: int
    ) -> GridPoint:
        return GridPoint(
            reuse=reuse,
            chunks=chunks,
            chunk_tokens=tokens,
            corpus=max(corpus, chunks),
            load=load,
            output=output,
            cache="cold",
        )

    loads = (
        (ALONE, settings.alone_output, (*settings.chunks, *settings.alone_chunks)),
        (BURST, settings.output, settings.chunks),
    )
    for load, output, counts in loads:
        for reuse, chunks, tokens in product(settings.reuse, counts, settings.chunk_tokens):
            yield point(reuse, chunks, tokens, settings.corpus, load, output)
    middle, longest = settings.chunks[len(settings.chunks) // 2], max(settings.chunk_tokens)
    much, most = settings.reuse[-2:]
    for reuse, corpus in product((much, most), settings.corpora):
        yield point(reuse, middle, longest, corpus, BURST, settings.output)
    for output in settings.outputs:
        yield point(much, middle, longest, settings.corpus, BURST, output)
    for reuse, rate in product((settings.reuse[0], much), settings.rates):
        yield point(reuse, middle, longest, settings.corpus, f"{rate:g}", settings.output)


class SampleBatch(NamedTuple):
    """Samples that are served together, at their `arrivals` if any: seconds from its start.

    One that is not `measured` fills the cache.
    """

    samples: Sequence[Sample]
    arrivals: tuple[float, ...] | None = None
    measured: bool = True


class GridBatches(NamedTuple):
    """What is served at a point: `cold` requests from an empty cache, requests of one chunk each
    that `fill` it, and `warm` ones.

    `fill` has the chunks of the corpus that `warm` needs, so that each was once the first of a
    prompt: prefix caching finds these. It has as large a share of them as the corpus that fits the
    pool.
    """

    cold: SampleBatch
    fill: SampleBatch
    warm: SampleBatch


def draw_traffic(traffic: GridTraffic, settings: GridSettings) -> GridBatches:
    """Draw the requests of a traffic."""
    point, number = traffic.point, settings.requests(traffic.point)
    corpus = from_tokens(
        IDS,
        traffic.seed,
        pool=point.corpus,
        chunk_tokens=point.chunk_tokens,
        max_tokens=point.output,
    )
    wanted = Traffic(
        requests=2 * number,
        seed=traffic.seed,
        chunks=(point.chunks, point.chunks),
        cached=point.reuse,
        rate=None if point.load in (ALONE, BURST) else float(point.load),
    )
    drawn = draw(wanted, corpus)
    cold, warm = drawn.samples[:number], drawn.samples[number:]
    fits = settings.pool * BLOCK_SIZE / (point.corpus * point.chunk_tokens)
    times = drawn.arrivals
    return GridBatches(
        SampleBatch(cold, _from_start(times[:number]) if times else None),
        SampleBatch(tuple(_fill(warm, drawn.preload, fits)), measured=False),
        SampleBatch(warm, _from_start(times[number:]) if times else None),
    )


def _from_start(arrivals: Sequence[float]) -> tuple[float, ...]:
    return tuple(time - arrivals[0] for time in arrivals)


def _fill(
    warm: Sequence[Sample], known: Collection[SampleSegment], fits: float
) -> Iterator[Sample]:
    """Requests of one chunk each for a share `fits` of the `known` chunks in `warm`."""
    used = dict.fromkeys(chunk for sample in warm for chunk in sample.chunks if chunk in known)
    for place, chunk in enumerate(list(used)[: math.ceil(fits * len(used))]):
        first, last = warm[0].segments[0], warm[0].segments[-1]
        yield replace(warm[0], id=f"fill {place}", segments=(first, chunk, last), max_tokens=1)


@dataclass(frozen=True, slots=True)
class CellWork:
    """What an arm serves: batches one after another, without dropping KV between them.

    Where they do not arrive, `running` requests are served at a time, and `filling` of those that
    fill the cache: what it has in the end is the same. Nothing fills the cache of `full`, which has
    none; where a `stock` engine serves it, each of its requests is a tenant.
    """

    arm: str
    batches: Sequence[SampleBatch]
    running: int
    stock: bool
    filling: int = 1

    def requests(self) -> Iterator[tuple[SampleBatch, list[Request]]]:
        """The requests of each batch that has any."""
        order, tenants = ChunkOrder(), count(1)
        reordered, alone = self.arm == "reorder", self.stock and self.arm == "full"
        algorithm = None if self.stock else "prefix" if reordered else self.arm
        for batch in self.batches:
            if not batch.measured and self.arm == "full":
                continue
            sent = map(order.arrange, batch.samples) if reordered else batch.samples
            made = [to_request(sample, algorithm) for sample in sent]
            if alone:
                made = [replace(one, salt=f"tenant {next(tenants)}") for one in made]
            if made:
                yield batch, made


class ServedCells(NamedTuple):
    """A cell for each measured batch, and the shortest loop on a core; see `QuietCores`."""

    cells: list[ArmCell]
    shortest: float | None


def serve_cells(work: CellWork, shortest: float | None, engine: Engine) -> ServedCells:
    """Serve all batches from an empty cache, in the engine's process.

    The `shortest` loop that was met before says which cores are quiet; None: any core will do.
    Raises EngineError for a failure.
    """
    engine.reset()
    cores = None if shortest is None else QuietCores(shortest)
    found = []
    for batch, requests in work.requests():
        engine.measure()
        running = work.running if batch.measured else work.filling
        results, busy_s, quiet = _serve(engine, requests, batch.arrivals, running, cores)
        failed = next((result.error for result in results if result.error), None)
        if failed is not None:
            raise EngineError(f"a request of the grid failed: {failed}")
        if batch.measured:
            peak = summarise(engine.memory).peak_referenced
            found.append(_cell(results, len(results) / busy_s, peak, quiet))
    return ServedCells(found, None if cores is None else cores.shortest)


def _serve(
    engine: Engine,
    requests: Sequence[Request],
    arrivals: Sequence[float] | None,
    running: int,
    cores: QuietCores | None,
) -> tuple[list[Result], float, float | None]:
    """Serve a batch in one call of the engine; where cores matter, one for each request alone.

    Returns results, the seconds that the engine was busy, the share of calls on a quiet core.
    """
    alone = cores is not None and running == 1 and arrivals is None
    calls = [[one] for one in requests] if alone else [requests]
    results, busy, quiet = list[Result](), 0.0, 0
    for each in calls:
        quiet += cores is not None and cores.settle()
        concurrency = None if arrivals else running
        results += engine.generate(
            each, ignore_eos=True, concurrency=concurrency, arrivals=arrivals
        )
        busy += engine.busy_s
    return results, busy, None if cores is None else quiet / len(calls)


def _cell(
    results: Sequence[Result], requests_s: float, peak: float, quiet: float | None
) -> ArmCell:
    ttft = [result.timings.ttft for result in results]
    counts = [result.counts for result in results]
    computed = [c.prompt - (c.reused or 0) + c.compiled for c in counts]
    both = sorted(zip(computed, (c.compiled for c in counts), strict=True))
    # The one or two requests whose TTFT makes the median.
    low, high = both[(len(both) - 1) // 2], both[len(both) // 2]
    return ArmCell(
        requests=len(results),
        ttft_s=float(np.median(ttft)),
        ttft_p95_s=float(np.quantile(ttft, 0.95)),
        requests_s=requests_s,
        peak_blocks=peak,
        prompt=float(np.mean([count.prompt for count in counts])),
        computed=float(np.mean(computed)),
        output=float(np.mean([len(result.tokens) for result in results])),
        compiled=float(np.mean([count.compiled for count in counts])),
        middle=((low[0] + high[0]) / 2, (low[1] + high[1]) / 2),
        quiet=quiet,
    )


class GridEngines:
    """Which engine serves each arm on a device.

    On a GPU stock vLLM serves the arms that it can, and requests alone begin on quiet cores. All
    engines hold a core against the quietest one that any of them has met so far.
    """

    def __init__(self, device: str) -> None:
        on_gpu = device == "cuda"
        self.stock = frozenset(_STOCK if on_gpu else ())
        # A CPU that computes the steps is never quiet.
        self._shortest = inf if on_gpu else None

    def configs(self, config: EngineConfig) -> dict[str, EngineConfig]:
        """The engines, by name."""
        found = {"picbench": config}
        if self.stock:
            found["stock"] = replace(config, stock=True, algorithm="prefix")
        return found

    def name(self, arm: str) -> str:
        """The name of an arm's engine."""
        return "stock" if arm in self.stock else "picbench"

    def serve(self, engines: Engines, work: CellWork) -> list[ArmCell]:
        """Serve what an arm is to serve; a cell for each measured batch.

        Raises EngineError for a failure.
        """
        serve = partial(serve_cells, work, self._shortest)
        served: ServedCells = engines[self.name(work.arm)].call(serve)
        self._shortest = served.shortest
        return served.cells


def engine_config(settings: BreakEven | ProfileCheck, grid: GridSettings) -> EngineConfig:
    """The engine that serves a grid, or is checked with one."""
    return EngineConfig(
        model=str(models.resolve(settings.served).path),
        device=settings.device,
        dtype=settings.served_dtype,
        context=grid.longest + 64,
        kv_blocks=grid.pool,
        tiers="",
    )


def grid_facts(
    settings: BreakEven | ProfileCheck, grid: GridSettings, serving: GridEngines, found: Described
) -> GridFacts:
    """What is measured here, and on what; engines are described by themselves."""
    engine = found[serving.name("mepic")]
    facts = provenance.facts(*provenance.ENGINE, device=settings.device, commit=settings.commit)
    graphs = {arm: found[serving.name(arm)]["graph_tokens"] for arm in ARMS}
    return GridFacts(
        hardware=str(facts["gpu"]),
        versions={name: str(facts[name]) for name in ("driver", "torch", "vllm", "commit")},
        model=models.resolve(settings.served).label,
        dtype=settings.served_dtype,
        block_bytes=int(str(engine["block_bytes"])),
        pool=grid.pool,
        running=grid.running,
        caveat=settings.caveat,
        step_tokens=int(str(engine["batch_tokens"])),
        graph_tokens={arm: int(str(size)) for arm, size in graphs.items()},
    )


def refuse_other_engines(
    path: Path, there: GridFacts, here: GridFacts, may_differ: Collection[str] = ()
) -> None:
    """Raise IncomparableRuns with the first fact or version that differs from a file's.

    Caveats may differ, and what is named.
    """

    def named(facts: GridFacts) -> dict[str, Any]:
        found = asdict(facts) | {"caveat": None}
        return {**found.pop("versions"), **found}

    read, mine = named(there), named(here)
    for name in read | mine:
        if name not in may_differ and read.get(name) != mine.get(name):
            raise IncomparableRuns(
                f"{path}: was measured with {name} {read.get(name)}, here is {mine.get(name)}",
                hint="name another `output`",
            )

"""The grid of break-even: which traffic it has, in which order, and how engines serve it.

The values of its axes are in ``data/break_even.yaml``.
"""

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import count, cycle, islice, product
from math import inf
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import yaml
from pydantic import TypeAdapter

from picbench.engines.algorithms import of_chunks, parse
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.ledger import summarise
from picbench.engines.request import Request, Result
from picbench.errors import EngineError, IncomparableRuns, PicBenchError
from picbench.profile.predictor import ALONE, BURST, ArmCell, GridFacts, GridPoint
from picbench.run import runner
from picbench.run.measurements import BreakEven, ProfileCheck
from picbench.run.schedule import reorder, to_request
from picbench.workloads.prompts.chunk_order import ContextIndex
from picbench.workloads.sample import Sample
from picbench.workloads.traffic.corpus import from_tokens
from picbench.workloads.traffic.draw import draw
from picbench.workloads.traffic.settings import Traffic

#: The grids and the unseen traces, by device.
DATA = Path(__file__).parent / "data" / "break_even.yaml"

#: Ids that every model's vocabulary has; the first ones are often special.
IDS = range(16, 1000)

#: The arm that chooses, request by request, of prompts in the order that finds the longest prefix:
#: its times are of no one kind, so none are fitted to it.
AUTO = "auto:reorder"

#: Arms that are compared, those that stock vLLM serves on a GPU, and those that are compared at a
#: rate of arrivals, where seconds pass whatever is served.
ARMS = ("full", "prefix", "reorder", "mepic", "naive")
_STOCK, _RATED = ("full", "prefix", "reorder"), ("prefix", "reorder", "mepic", AUTO)

#: Tokens of a prompt beside its chunks, about.
_TEXT = 48

#: A core is quiet if its loop takes at most so many times as long as the shortest one that was
#: seen. On an H200's host small steps take no longer up to there; from 1.6 on 1.2 times as long.
_QUIET = 1.35


class GridStage(StrEnum):
    """What is measured after what: a grid is of use after each of them."""

    ONCE = "each traffic once"
    SMALL = "small prompts alone, with other seeds"
    BESIDE = "other corpora and rates"
    AGAIN = "all else, with other seeds"

    @property
    def rank(self) -> int:
        """Its place in the order."""
        return list(GridStage).index(self)


@dataclass(frozen=True, slots=True)
class GridTraffic:
    """Traffic that every arm serves with a cold cache, and as much again with a warm one."""

    point: GridPoint
    seed: int

    @property
    def keys(self) -> list[tuple[GridPoint, int]]:
        """Those of its cells: the cold one, the warm one."""
        return [(point, self.seed) for point in (self.point, replace(self.point, cache="warm"))]


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

    def requests(self, point: GridPoint) -> int:
        """How many requests are served at a point with a cold cache, and again with a warm one."""
        if point.load == ALONE:
            return min(self.most_alone, max(self.alone_tokens // point.prompt, self.alone))
        return min(self.burst, max(self.burst_tokens // point.prompt, self.running // 2))

    def arms_at(self, point: GridPoint) -> tuple[str, ...]:
        """The arms that are served at a point.

        `full` takes the same at every reuse. Where no chunk recurs, `reorder` sends what `prefix`
        does.
        """
        arms = self.arms if point.reuse == min(self.reuse) else self.arms[1:]
        arms = arms if point.closed else _RATED
        if not point.reuse:
            arms = tuple(arm for arm in arms if arm != "reorder")
        small = point.load == ALONE and (1 - point.reuse) * point.prompt <= self.small_tokens
        return (*arms, *self.small_arms) if small else arms

    def stage(self, traffic: GridTraffic) -> GridStage:
        """When traffic is measured."""
        point = traffic.point
        if traffic.seed:
            small = point.load == ALONE and point.prompt <= self.again_tokens
            return GridStage.SMALL if small else GridStage.AGAIN
        usual = point.corpus == max(self.corpus, point.chunks)
        return GridStage.ONCE if point.closed and usual else GridStage.BESIDE

    def seconds(self, point: GridPoint) -> float:
        """About how long all arms take at a point, with a cold cache and a warm one."""
        requests = 2 * self.requests(point)
        steps = point.output * max(2, requests / (1 if point.load == ALONE else self.running))
        took = requests * (point.prompt + _TEXT) / self.prompt_tokens_s + steps * self.step_s
        arriving = 0.0 if point.closed else requests / float(point.load)
        return len(self.arms_at(point)) * max(took, arriving)

    def points(self) -> Iterator[GridPoint]:
        """All points with a cold cache."""
        middle, longest = self.chunks[len(self.chunks) // 2], max(self.chunk_tokens)
        much, most = self.reuse[-2:]
        sized = product(self.reuse, (*self.chunks, *self.alone_chunks), self.chunk_tokens)
        found = [(*each, self.corpus, ALONE, self.alone_output) for each in sized]
        sized = product(self.reuse, self.chunks, self.chunk_tokens)
        found += [(*each, self.corpus, BURST, self.output) for each in sized]
        for reuse, corpus in product((much, most), self.corpora):
            found.append((reuse, middle, longest, corpus, BURST, self.output))
        for output in self.outputs:
            found.append((much, middle, longest, self.corpus, BURST, output))
        for reuse, rate in product((self.reuse[0], much), self.rates):
            found.append((reuse, middle, longest, self.corpus, f"{rate:g}", self.output))
        for reuse, chunks, tokens, corpus, load, output in found:
            yield GridPoint(
                reuse=reuse,
                chunks=chunks,
                chunk_tokens=tokens,
                corpus=max(corpus, chunks),
                load=load,
                output=output,
                cache="cold",
            )


def read_grids() -> dict[str, GridSettings]:
    """The grids that are measured, by device."""
    found = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, GridSettings]).validate_python(found["grids"])


def plan_grid(settings: GridSettings) -> list[GridTraffic]:
    """All traffic of a grid: stage by stage, seed by seed, in a random order, so that any part of
    a stage is even.
    """
    found: list[GridTraffic] = []
    for seed in range(settings.seeds):
        points = list(settings.points())
        Random(f"{seed}/order").shuffle(points)
        found += [GridTraffic(point, seed) for point in points]
    return sorted(found, key=lambda traffic: settings.stage(traffic).rank)


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
    tokens, length = point.chunk_tokens, point.output
    corpus = from_tokens(
        IDS, traffic.seed, pool=point.corpus, chunk_tokens=tokens, max_tokens=length
    )
    wanted = Traffic(
        requests=2 * number,
        seed=traffic.seed,
        chunks=(point.chunks, point.chunks),
        cached=point.reuse,
        rate=None if point.closed else float(point.load),
    )
    drawn = draw(wanted, corpus)

    def batch(own: slice) -> SampleBatch:
        times = drawn.arrivals and drawn.arrivals[own]
        from_start = tuple(time - times[0] for time in times) if times else None
        return SampleBatch(drawn.samples[own], from_start)

    warm = batch(slice(number, None))
    asked = (chunk for sample in warm.samples for chunk in sample.chunks)
    used = list(dict.fromkeys(chunk for chunk in asked if chunk in drawn.preload))
    fits = settings.pool * BLOCK_SIZE / (point.corpus * tokens)
    model = warm.samples[0]
    first, last = model.segments[0], model.segments[-1]
    fill = [
        replace(model, id=f"fill {place}", segments=(first, chunk, last), max_tokens=1)
        for place, chunk in enumerate(used[: math.ceil(fits * len(used))])
    ]
    return GridBatches(batch(slice(number)), SampleBatch(fill, measured=False), warm)


#: What is served together, and its requests.
MadeBatch = tuple[SampleBatch, list[Request]]


def make_requests(arm: str, batches: Sequence[SampleBatch], *, stock: bool) -> Iterator[MadeBatch]:
    """The requests of each batch that has any, as an arm sends them.

    Nothing fills the cache of `full`, which has none; where a `stock` engine serves it, each of its
    requests is a tenant. What fills that of `auto` is served both as text and as chunks.
    """
    index, tenants, wanted = ContextIndex(), count(1), parse(arm)
    algorithm = None if stock else wanted.served
    for batch in batches:
        if not batch.measured and arm == "full":
            continue
        if not batch.measured and arm == AUTO:
            yield batch, [to_request(sample, "prefix") for sample in batch.samples]
        sent = (reorder(s, index) if wanted.reorders else s for s in batch.samples)
        # What fills a cache is compiled, also where chunks may be served as text.
        named = algorithm if batch.measured or stock else of_chunks(wanted).served
        made = [to_request(sample, named) for sample in sent]
        if stock and arm == "full":
            made = [replace(one, salt=f"tenant {next(tenants)}") for one in made]
        if made:
            yield batch, made


def serve_cells(
    batches: Sequence[MadeBatch], running: int, filling: int, shortest: float | None, engine: Engine
) -> tuple[list[ArmCell], float | None]:
    """Serve all batches from an empty cache, in the engine's process: a cell for each measured one.

    KV is not dropped between them. Where they do not arrive, `running` requests are served at a
    time, and `filling` of those that fill the cache: what it has in the end is the same.

    The `shortest` loop that was met before says which cores are quiet; None: any core will do. The
    shortest one by now is returned. Where cores matter, each request alone is a call of the engine.
    Raises EngineError for a failure.
    """
    engine.reset()
    cores = None if shortest is None else QuietCores(shortest)
    found = []
    for batch, requests in batches:
        engine.measure()
        at_once = running if batch.measured else filling
        alone = cores is not None and at_once == 1 and batch.arrivals is None
        calls = [[one] for one in requests] if alone else [requests]
        results, busy_s, quiet = list[Result](), 0.0, 0
        for each in calls:
            quiet += cores is not None and cores.settle()
            results += engine.generate(
                each,
                ignore_eos=True,
                concurrency=None if batch.arrivals else at_once,
                arrivals=batch.arrivals,
            )
            busy_s += engine.busy_s
        failed = next((result.error for result in results if result.error), None)
        if failed is not None:
            raise EngineError(f"a request of the grid failed: {failed}")
        if batch.measured:
            share = None if cores is None else quiet / len(calls)
            peak = summarise(engine.memory).peak_referenced
            found.append(_cell(results, len(results) / busy_s, peak, share))
    return found, None if cores is None else cores.shortest


def _cell(
    results: Sequence[Result], requests_s: float, peak: float, quiet: float | None
) -> ArmCell:
    ttft = [result.timings.ttft for result in results]
    counts = [result.counts for result in results]
    computed = [(c.computed or 0) + c.compile_work for c in counts]
    both = sorted(zip(computed, (c.compile_work for c in counts), strict=True))
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
        compiled=float(np.mean([count.compile_work for count in counts])),
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

    def configs(
        self, settings: BreakEven | ProfileCheck, grid: GridSettings
    ) -> dict[str, EngineConfig]:
        """The engines that serve a grid, or are checked with one, by name."""
        output = max(grid.output, *grid.outputs, 0)
        longest = max(grid.chunks) * max(grid.chunk_tokens) + 64 + output
        config = runner.engine_of(settings, context=longest + 64, kv_blocks=grid.pool)
        found = {"picbench": config}
        if self.stock:
            found["stock"] = replace(config, stock=True, algorithm="prefix")
        return found

    def name(self, arm: str) -> str:
        """The name of an arm's engine."""
        return "stock" if arm in self.stock else "picbench"

    def facts(
        self, settings: BreakEven | ProfileCheck, grid: GridSettings, found: runner.Described
    ) -> GridFacts:
        """What is measured here, and on what; engines are described by themselves."""
        engine, facts = found[self.name("mepic")], runner.facts_of(settings)
        graphs = {arm: int(str(found[self.name(arm)]["graph_tokens"])) for arm in (*ARMS, AUTO)}
        return GridFacts(
            hardware=str(facts["gpu"]),
            versions={name: str(facts[name]) for name in ("driver", "torch", "vllm", "commit")},
            model=facts["model"],
            dtype=settings.served_dtype,
            block_bytes=int(str(engine["block_bytes"])),
            pool=grid.pool,
            running=grid.running,
            caveat=settings.caveat,
            step_tokens=int(str(engine["batch_tokens"])),
            graph_tokens=graphs,
        )

    def serve(
        self,
        engines: runner.Engines,
        arm: str,
        batches: Sequence[SampleBatch],
        running: int,
        filling: int = 1,
    ) -> list[ArmCell]:
        """Serve what an arm is to serve: see `make_requests` and `serve_cells`."""
        made = list(make_requests(arm, batches, stock=arm in self.stock))
        serve = partial(serve_cells, made, running, filling, self._shortest)
        cells: list[ArmCell]
        cells, self._shortest = engines[self.name(arm)].call(serve)
        return cells


class FactsRecord:
    """A record of the runner in a file of its own format, which other processes may add to, too.

    `facts_of` gives those of the engines that are measured here. The first error ends a call.
    """

    def __init__(self, path: Path, facts_of: Callable[[runner.Described], GridFacts]) -> None:
        self.path, self._facts_of = path, facts_of
        self.start: float | None = None
        self.seconds: Mapping[str, Sequence[float]] = {}

    def begin(self, engines: runner.Engines, described: runner.Described, seconds: float) -> None:
        """Raise IncomparableRuns if the file was measured with other engines."""
        self.start = seconds
        self.join(self._facts_of(described))

    def join(self, facts: GridFacts) -> None:
        """Read the file, or begin it. Raises IncomparableRuns for other facts in it."""
        raise NotImplementedError

    def fail(self, cell: runner.Cell, error: PicBenchError) -> None:
        """Raise the error."""
        raise error


def refuse_other_engines(
    path: Path, there: GridFacts, here: GridFacts, may_differ: Collection[str] = ()
) -> None:
    """Raise IncomparableRuns with the first fact or version that differs from a file's.

    Caveats may differ, and what is named.
    """
    read, mine = ({**facts.versions, **asdict(facts)} for facts in (there, here))
    for name in read | mine:
        known = name in ("caveat", "versions", *may_differ)
        if not known and read.get(name) != mine.get(name):
            raise IncomparableRuns(
                f"{path}: was measured with {name} {read.get(name)}, here is {mine.get(name)}",
                hint="name another `output`",
            )


class QuietCores:
    """Moves the calling thread to a quiet core. It may use all of its cores before and afterwards.

    `shortest` is the shortest loop of others on this machine: all cores may be busy at the moment.
    """

    def __init__(self, shortest: float = inf) -> None:
        self.shortest, self._cores = shortest, own_cores()
        self._others = cycle(self._cores)
        self._is_quiet()
        for core in self._cores:
            move_to(core)
            self._is_quiet()

    def settle(self) -> bool:
        """Stay on a quiet core, or look for one; whether there is one."""
        if self._is_quiet():
            return True
        for core in islice(self._others, len(self._cores)):
            move_to(core)
            if self._is_quiet():
                return True
        return False

    def _is_quiet(self) -> bool:
        took = time_loop()
        self.shortest = min(self.shortest, took)
        return took <= _QUIET * self.shortest


def time_loop() -> float:
    """Seconds of a short loop of Python, which needs nothing but its core.

    The shortest of three: an interrupt makes one of them longer.
    """
    times = []
    for _ in range(3):
        began, total = time.perf_counter(), 0
        for number in range(5_000):
            total += number
        times.append(time.perf_counter() - began)
    return min(times)


def own_cores() -> Sequence[int]:
    """The cores that this thread may use; none where the system cannot say, or move it."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else ()


def move_to(core: int) -> None:
    """Move this thread to a core, which it may leave again; it stays where a core has gone."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
    except OSError:
        return
    os.sched_setaffinity(0, allowed)

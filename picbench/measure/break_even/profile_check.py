"""Does `picbench profile` predict what engines take? Three traces that no grid has, measured.

Each trace is a request file. Every arm serves it from an empty cache, one request at a time, and
then again, as many at a time as in the grid's bursts. Right before, it serves a point of the grid
in the same way, which says how fast the machine is now.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import median

from picbench.engines.algorithms import Registry
from picbench.errors import ConfigError
from picbench.grid.measured_grid import ALONE, BURST, ArmCell, GridFacts, GridPoint, MeasuredGrid
from picbench.measure.break_even.checked_figures import (
    CheckedFigure,
    summarise_figures,
    write_figures,
)
from picbench.measure.break_even.grid_plan import (
    ARMS,
    IDS,
    GridSettings,
    draw_traffic,
    plan_grid,
)
from picbench.measure.break_even.measure_grid import Engines, GridRun, grid_facts, open_engines
from picbench.measure.break_even.serve_cells import (
    CellWork,
    CellWorkMaker,
    serve_cells,
    without_replies,
)
from picbench.profile.prediction.predictor import GridPredictor
from picbench.profile.trace_profile import TraceProfile, profile_trace
from picbench.profile.traces.trace_reader import Encode, read_trace_file
from picbench.workloads.sample import Sample
from picbench.workloads.traffic.corpus import from_tokens
from picbench.workloads.traffic.draw import Stream, draw
from picbench.workloads.traffic.file import Header, write_requests
from picbench.workloads.traffic.settings import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenTrace:
    """Requests unlike those of the grid: how many chunks, of which length, from which corpus.

    Chunks are drawn by popularity (`zipf`), or a share `reuse` of their tokens from the corpus.
    """

    name: str
    requests: int
    chunks: tuple[int, int]
    chunk_tokens: int
    corpus: int
    output: int
    zipf: float = 0.0
    reuse: float | None = None

    def draw(self, seed: int) -> Stream:
        """The requests."""
        corpus = from_tokens(
            IDS,
            seed,
            pool=self.corpus,
            chunk_tokens=self.chunk_tokens,
            max_tokens=self.output,
        )
        traffic = Traffic(
            requests=self.requests,
            seed=seed,
            chunks=self.chunks,
            zipf=self.zipf,
            cached=self.reuse,
        )
        return draw(traffic, corpus)


#: By device. Within what its grid covers, and none of its points.
TRACES: Mapping[str, tuple[UnseenTrace, ...]] = {
    "cuda": (
        UnseenTrace(
            name="popular", requests=64, chunks=(6, 14), chunk_tokens=320, corpus=120, output=24,
            zipf=1.0,
        ),
        UnseenTrace(
            name="few-documents", requests=64, chunks=(2, 6), chunk_tokens=480, corpus=40,
            output=48, reuse=0.9,
        ),
        UnseenTrace(
            name="mostly-new", requests=48, chunks=(10, 20), chunk_tokens=200, corpus=80,
            output=16, reuse=0.4,
        ),
    ),
    "cpu": (
        UnseenTrace(
            name="popular", requests=24, chunks=(3, 5), chunk_tokens=96, corpus=30, output=4,
            zipf=1.0,
        ),
        UnseenTrace(
            name="few-documents", requests=24, chunks=(2, 4), chunk_tokens=112, corpus=12,
            output=4, reuse=0.8,
        ),
        UnseenTrace(
            name="mostly-new", requests=16, chunks=(4, 6), chunk_tokens=64, corpus=20, output=4,
            reuse=0.3,
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckedServing:
    """What an arm took in one repeat of a trace, and of points of the grid: alone, and together."""

    alone: ArmCell
    together: ArmCell
    control_alone: ArmCell
    control_together: ArmCell


@dataclass(frozen=True, slots=True)
class GridControl:
    """A point of the grid, with the traffic of its first seed: how fast the machine is."""

    point: GridPoint
    samples: tuple[Sample, ...]


def check_profile(
    run: GridRun, grid: MeasuredGrid, repeats: int, say: Callable[[str], None]
) -> list[CheckedFigure]:
    """Measure the traces of the device and compare; writes ``profile.json`` and ``profile.md``.

    Raises ConfigError for a grid of another model than is served.
    """
    predictor, found = GridPredictor(grid), list[CheckedFigure]()
    streams = {trace.name: trace.draw(seed=77) for trace in TRACES[run.device]}
    with open_engines(run) as (engines, described):
        facts = grid_facts(run, described)
        if facts.model != grid.facts.model:
            raise ConfigError(
                f"the grid is of {grid.facts.model}, this is {facts.model}", hint="`model`"
            )
        for name, stream in streams.items():
            profile = _profile(name, stream, run, grid.facts)
            mean = profile.traffic.prompt / profile.traffic.requests
            controls = [_control(run.settings, load, mean) for load in (ALONE, BURST)]
            served = _serve(name, stream, controls, engines, grid.facts.running, repeats)
            found += _compare(profile, predictor, controls, served)
            own = [one for one in found if one.trace == name]
            say(f"{name}: {summarise_figures(own)}")
            write_figures(run.output, facts, grid, found, repeats)
    return found


def _control(settings: GridSettings, load: str, prompt: float) -> GridControl:
    """The grid's point of a load, in the middle of its reuses, whose prompt is nearest."""
    reuse = settings.reuse[len(settings.reuse) // 2]
    planned = [t for t in plan_grid(settings) if t.point.load == load and t.point.reuse == reuse]
    traffic = min(
        planned, key=lambda t: (abs(t.point.chunks * t.point.chunk_tokens - prompt), t.seed)
    )
    return GridControl(traffic.point, draw_traffic(traffic, settings).cold)


def _profile(name: str, stream: Stream, run: GridRun, facts: GridFacts) -> TraceProfile:
    path = run.output / f"{name}.jsonl"
    write_requests(path, Header(dataset="synthetic", synthetic=True), stream)
    arms = [Registry().parse(arm) for arm in ARMS]
    return profile_trace(
        name,
        read_trace_file(path, _no_texts),
        arms,
        running=facts.running,
        step_tokens=facts.step_tokens,
    )


def _no_texts() -> Encode:
    raise ConfigError("the trace has texts, and no tokenizer is loaded")


def _serve(
    name: str,
    stream: Stream,
    controls: Sequence[GridControl],
    engines: Engines,
    running: int,
    repeats: int,
) -> list[dict[str, CheckedServing]]:
    """What each arm took, repeat by repeat; an order of arms for each."""
    found: list[dict[str, CheckedServing]] = []
    samples: Sequence[Sample] = stream.samples
    for repeat in range(repeats):
        own: dict[str, CheckedServing] = {}
        for arm in Random(f"{name} {repeat}").sample(ARMS, len(ARMS)):
            engine, stock = engines[arm]
            cells: list[ArmCell] = []
            for control, at_once in zip(controls, (1, running), strict=True):
                for each in (control.samples, samples):
                    batch = CellWorkMaker(arm, stock=stock).make(each)
                    work = CellWork(arm, (batch,), at_once)
                    work = without_replies(work) if at_once == 1 else work
                    cells += engine.call(partial(serve_cells, work))
            control_alone, alone, control_together, together = cells
            own[arm] = CheckedServing(alone, together, control_alone, control_together)
        found.append(own)
    return found


def _slowness(
    predictor: GridPredictor, controls: Sequence[GridControl], served: Mapping[str, CheckedServing]
) -> tuple[float, float]:
    """How much longer controls took in one repeat than the grid says: TTFT alone, bursts."""
    ttft, seconds = [], []
    for arm, one in served.items():
        alone = predictor.predict_cell(arm, controls[0].point, one.control_alone)
        together = predictor.predict_cell(arm, controls[1].point, one.control_together)
        if alone.ttft_s and together.requests_s:
            ttft.append(one.control_alone.ttft_s / alone.ttft_s)
            seconds.append(together.requests_s / one.control_together.requests_s)
    return (median(ttft), median(seconds)) if ttft else (1.0, 1.0)


def _compare(
    profile: TraceProfile,
    predictor: GridPredictor,
    controls: Sequence[GridControl],
    served: Sequence[Mapping[str, CheckedServing]],
) -> Iterator[CheckedFigure]:
    gib = predictor.grid.facts.block_bytes / 2**30
    slow = [_slowness(predictor, controls, repeat) for repeat in served]
    ttft, seconds = ([pair[place] for pair in slow] for place in (0, 1))
    for arm in profile.arms:
        name = arm.algorithm.spec
        found = predictor.predict(profile, arm)
        alone = [repeat[name].alone for repeat in served]
        together = [repeat[name].together for repeat in served]
        computed = arm.counted.computed / max(1, arm.counted.requests)
        figure = partial(CheckedFigure, profile.name, name)
        yield figure("computed tokens", [c.computed for c in alone], computed, found.inside)
        if found.ttft_s and found.requests_s:
            times, rates = [c.ttft_s for c in alone], [c.requests_s for c in together]
            yield figure("TTFT, s", times, found.ttft_s, found.inside, ttft)
            yield figure("requests/s", rates, found.requests_s, found.inside, seconds, rate=True)
        blocks = [c.peak_blocks * gib for c in together]
        yield figure("KV, GiB", blocks, found.kv_gib, found.inside)

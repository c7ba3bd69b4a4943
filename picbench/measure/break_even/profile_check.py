"""Does `picbench profile` predict what engines take? Three traces that no grid has, measured.

Each trace is a request file. Every arm serves it from an empty cache, one request at a time, and
then again, as many at a time as in the grid's bursts. Right before each, it serves a point of the
grid, which says how fast the machine is now. Repeats are of all traces, one after another: those
of a trace are minutes apart.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean

from picbench.engines.algorithms import Registry
from picbench.errors import ConfigError
from picbench.grid.measured_grid import ALONE, BURST, ArmCell, GridFacts, MeasuredGrid
from picbench.measure.break_even.checked_figures import (
    CheckedFigure,
    graph_warnings,
    summarise_figures,
    write_figures,
)
from picbench.measure.break_even.checked_repeats import (
    SEED,
    CheckedRepeat,
    CheckedRepeats,
    CheckedServing,
    add_repeat,
    read_own_repeats,
    read_repeats,
    refuse_other_traces,
)
from picbench.measure.break_even.grid_control import (
    GridControl,
    GridControls,
    slowness_by_kind,
)
from picbench.measure.break_even.grid_engines import GridEngines, open_engines
from picbench.measure.break_even.grid_plan import ARMS, IDS
from picbench.measure.break_even.measure_grid import GridRun, grid_facts
from picbench.measure.break_even.serve_cells import (
    CellWork,
    CellWorkMaker,
    without_replies,
)
from picbench.output.json_file import locked
from picbench.profile.prediction.arm_kinds import links_chunks
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


#: All that was measured, so that other predictions can be held against it.
_CELLS = "profile-cells.json"


@dataclass(frozen=True, slots=True)
class _CheckedTrace:
    """A trace, what is predicted of it, and the two controls of each arm: alone, and in a burst."""

    name: str
    samples: Sequence[Sample]
    profile: TraceProfile
    controls: Mapping[str, tuple[GridControl, GridControl]]


def check_profile(
    run: GridRun,
    predictor: GridPredictor,
    repeats: int,
    say: Callable[[str], None],
    seed: int = SEED,
) -> tuple[list[CheckedFigure], bool]:
    """Measure the traces of the device, all of them once in each of the repeats that are left.

    They are drawn with `seed`. Returns the figures, and whether nothing of the run's part is left.
    A repeat begins if as many of the run's seconds are left as the longest one took, and the first
    of a call in any case. After each, ``profile.json`` and ``profile.md`` are of all those in
    ``profile-cells.json``. Where none is left, no engine is started, and they are written anew.

    Raises ConfigError for a part without repeats, and for a grid of another model than is served,
    and IncomparableRuns for repeats of other engines, or of other traces, in the folder.
    """
    mine = range(run.part[0] - 1, repeats, run.part[1])
    if not mine:
        raise ConfigError(f"`part` {run.part[0]}/{run.part[1]}: no repeat of {repeats} is its own")
    path = run.output / _CELLS
    if done := read_repeats(path):
        refuse_other_traces(path, done, seed)
        if set(mine) <= _numbers(done):
            _refuse_other_models(done.facts, predictor)
            traces = _read_traces(run, predictor, seed)
            return _write(run.output, traces, predictor, done)[0], True
    began, longest = time.monotonic(), 0.0
    with open_engines(run.engine, run.settings) as (engines, described):
        facts = grid_facts(run, described)
        _refuse_other_models(facts, predictor)
        for warning in graph_warnings(facts, predictor):
            say(f"warning: {warning}")
        traces = _read_traces(run, predictor, seed)
        known = _numbers(read_own_repeats(path, facts, seed))
        for place, number in enumerate(number for number in mine if number not in known):
            before = time.monotonic()
            if run.seconds and place and before - began + longest > run.seconds:
                break
            served = {
                trace.name: _serve(trace, engines, predictor.grid.facts.running, number)
                for trace in traces
            }
            now = add_repeat(path, facts, CheckedRepeat(number, served), seed)
            found, now = _write(run.output, traces, predictor, now)
            longest = max(longest, time.monotonic() - before)
            say(f"{len(now.repeats)} of {repeats}, {time.monotonic() - began:,.0f} s")
            say(summarise_figures(found))
    return found, set(mine) <= _numbers(now)


def _write(
    output: Path, traces: Sequence[_CheckedTrace], predictor: GridPredictor, known: CheckedRepeats
) -> tuple[list[CheckedFigure], CheckedRepeats]:
    """Write the page of all repeats that there are, those of other processes among them."""
    with locked(output):
        done = read_own_repeats(output / _CELLS, known.facts, known.seed)
        found = [
            one
            for trace in traces
            for one in _compare(
                trace.profile, predictor, [repeat.traces[trace.name] for repeat in done.repeats]
            )
        ]
        write_figures(output, done, predictor, found, _quiet(done))
    return found, done


def _quiet(done: CheckedRepeats) -> float | None:
    """The share of the requests alone that began on a quiet core; None where any does not say."""
    alone = [
        serving.alone.quiet
        for repeat in done.repeats
        for arms in repeat.traces.values()
        for serving in arms.values()
    ]
    known = [share for share in alone if share is not None]
    return fmean(known) if known and len(known) == len(alone) else None


def _read_traces(run: GridRun, predictor: GridPredictor, seed: int) -> list[_CheckedTrace]:
    """The traces of the device; processes that share a folder write and read them in turn."""
    with locked(run.output):
        return list(_traces(run, predictor.grid, seed))


def _refuse_other_models(facts: GridFacts, predictor: GridPredictor) -> None:
    if facts.model != predictor.grid.facts.model:
        raise ConfigError(
            f"the grid is of {predictor.grid.facts.model}, this is {facts.model}", hint="`model`"
        )


def _numbers(done: CheckedRepeats) -> set[int]:
    return {repeat.number for repeat in done.repeats}


def _traces(run: GridRun, grid: MeasuredGrid, seed: int) -> Iterator[_CheckedTrace]:
    chosen = GridControls(grid, run.settings)
    for trace in TRACES[run.device]:
        stream = trace.draw(seed)
        profile = _profile(trace.name, stream, run, grid.facts)
        controls = {
            arm.algorithm.spec: (
                chosen.choose(profile, arm, ALONE),
                chosen.choose(profile, arm, BURST),
            )
            for arm in profile.arms
        }
        yield _CheckedTrace(trace.name, stream.samples, profile, controls)


def _profile(name: str, stream: Stream, run: GridRun, facts: GridFacts) -> TraceProfile:
    path = run.output / f"{name}.jsonl"
    write_requests(path, Header(dataset="synthetic", synthetic=True), stream)
    arms = list(map(Registry().parse, ARMS))
    return profile_trace(
        name,
        read_trace_file(path, _no_texts),
        arms,
        running=facts.running,
        facts=facts,
    )


def _no_texts() -> Encode:
    raise ConfigError("the trace has texts, and no tokenizer is loaded")


def _serve(
    trace: _CheckedTrace, engines: GridEngines, running: int, repeat: int
) -> dict[str, CheckedServing]:
    """What each arm took in a repeat, which has an order of arms of its own."""
    own: dict[str, CheckedServing] = {}
    for arm in Random(f"{trace.name} {repeat}").sample(ARMS, len(ARMS)):
        cells: list[ArmCell] = []
        for control, at_once in zip(trace.controls[arm], (1, running), strict=True):
            for each in (control.samples, trace.samples):
                batch = CellWorkMaker(arm, stock=engines.is_stock(arm)).make(each)
                work = CellWork(arm, (batch,), at_once)
                work = without_replies(work) if at_once == 1 else work
                cells += engines.serve(work)
        one, other = (control.point for control in trace.controls[arm])
        own[arm] = CheckedServing(cells[1], cells[3], ((one, cells[0]), (other, cells[2])))
    return own


def _compare(
    profile: TraceProfile,
    predictor: GridPredictor,
    served: Sequence[Mapping[str, CheckedServing]],
) -> Iterator[CheckedFigure]:
    gib = predictor.grid.facts.block_bytes / 2**30
    slow = [
        slowness_by_kind(predictor, {arm: one.controls for arm, one in repeat.items()})
        for repeat in served
    ]
    for arm in profile.arms:
        name = arm.algorithm.spec
        found = predictor.predict(profile, arm)
        alone = [repeat[name].alone for repeat in served]
        together = [repeat[name].together for repeat in served]
        computed = arm.counted.computed / max(1, arm.counted.requests)
        figure = partial(CheckedFigure, profile.name, name)
        yield figure("computed tokens", [c.computed for c in alone], computed, found.inside)
        if found.ttft_s and found.requests_s:
            speeds = [repeat[links_chunks(arm.algorithm)] for repeat in slow]
            times, rates = [c.ttft_s for c in alone], [c.requests_s for c in together]
            ttft, seconds = [one.ttft for one in speeds], [one.seconds for one in speeds]
            first = partial(figure, "TTFT, s", times, found.ttft_s, found.inside, ttft)
            yield first(within=found.ttft_s_range)
            burst = partial(figure, "requests/s", rates, found.requests_s, found.inside, seconds)
            yield burst(rate=True, within=found.requests_s_range)
        blocks = [c.peak_blocks * gib for c in together]
        yield figure("KV, GiB", blocks, found.kv_gib, found.inside)

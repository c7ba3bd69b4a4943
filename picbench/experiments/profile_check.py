"""What engines took for traces that were predicted: the file that repeats are added to."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from math import inf, log
from pathlib import Path
from random import Random
from statistics import fmean, median

from pydantic import TypeAdapter, ValidationError

from picbench.engines.algorithms import Registry
from picbench.errors import ConfigError, IncomparableRuns, first_refusal
from picbench.experiments.grid import (
    CellWork,
    CellWorkMaker,
    GridEngines,
    GridRun,
    grid_facts,
    open_engines,
    refuse_other_engines,
    without_replies,
)
from picbench.experiments.grid_plan import (
    ARMS,
    IDS,
    GridSettings,
    GridTraffic,
    draw_traffic,
    plan_grid,
)
from picbench.files import locked, write_json, write_whole
from picbench.profile.grid import (
    ALONE,
    BURST,
    ArmCell,
    GridFacts,
    GridPoint,
    MeasuredGrid,
    links_chunks,
)
from picbench.profile.predictor import GridPredictor
from picbench.profile.profile import ArmProfile, TraceProfile, profile_trace
from picbench.profile.traces import Encode, read_trace_file
from picbench.tables import table as markdown
from picbench.workloads.sample import Sample
from picbench.workloads.traffic.corpus import from_tokens
from picbench.workloads.traffic.draw import Stream, draw
from picbench.workloads.traffic.file import Header, write_requests
from picbench.workloads.traffic.settings import Traffic

SCHEMA = 1

#: What traces are drawn with where nothing else is asked for, or said.
SEED = 77

#: The point of a control, and what an arm took there.
ControlCell = tuple[GridPoint, ArmCell]


@dataclass(frozen=True, slots=True)
class CheckedServing:
    """What an arm took in one repeat of a trace, alone and together; before each, of a control."""

    alone: ArmCell
    together: ArmCell
    controls: tuple[ControlCell, ControlCell]


@dataclass(frozen=True, slots=True)
class CheckedRepeat:
    """What each arm took for each trace in the repeat of this number, which begin at 0."""

    number: int
    traces: Mapping[str, Mapping[str, CheckedServing]]


@dataclass(frozen=True, slots=True)
class CheckedRepeats:
    """All repeats of engines that `facts` describe, in the order of their numbers.

    Their traces were drawn with `seed`.
    """

    facts: GridFacts
    repeats: Sequence[CheckedRepeat]
    seed: int = SEED


def read_repeats(path: Path) -> CheckedRepeats | None:
    """The repeats in a file, None if there is no file; ConfigError for what is no such file."""
    if not path.exists():
        return None
    try:
        found: object = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
            raise ValueError(f"no repeats of schema {SCHEMA}")
        return TypeAdapter(CheckedRepeats).validate_python(found)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {_reason(error)}", hint="name another `output`") from error


def read_own_repeats(path: Path, facts: GridFacts, seed: int = SEED) -> CheckedRepeats:
    """Those of engines that `facts` are of, none of them if there is no file.

    Raises IncomparableRuns for those of others, and of traces that were drawn with another seed.
    """
    found = read_repeats(path) or CheckedRepeats(facts, (), seed)
    refuse_other_engines(path, found.facts, facts)
    refuse_other_traces(path, found, seed)
    return found


def refuse_other_traces(path: Path, found: CheckedRepeats, seed: int) -> None:
    """Raise IncomparableRuns for repeats of traces that were drawn with another seed."""
    if found.seed != seed:
        raise IncomparableRuns(
            f"{path}: its traces were drawn with seed {found.seed}, not {seed}",
            hint="name another `output`, or that `seed`",
        )


def add_repeat(
    path: Path, facts: GridFacts, repeat: CheckedRepeat, seed: int = SEED
) -> CheckedRepeats:
    """Add to a file that other processes may add to, too; all repeats that it has then."""
    with locked(path):
        known = {one.number: one for one in read_own_repeats(path, facts, seed).repeats}
        joined = {repeat.number: repeat} | known
        found = CheckedRepeats(facts, [joined[number] for number in sorted(joined)], seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"schema": SCHEMA} | asdict(found))
    return found


def _reason(error: Exception) -> str:
    return str(first_refusal(error) if isinstance(error, ValidationError) else error)


#: Errors up to this share are what is promised.
WITHIN = 0.15

_HEAD = (
    "trace",
    "arm",
    "figure",
    "measured",
    "predicted",
    "error",
    "spread",
    "error at the grid's speed",
    "predicted range",
    "verdict",
    "in the grid's range",
)


class CheckVerdict(StrEnum):
    """Whether a prediction is as good as promised."""

    HOLDS = "holds"
    AT_SPEED = "at the grid's speed"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class CheckedFigure:
    """A figure of an arm on a trace: measured in each repeat, and what was predicted of it.

    `slowness` is how many times as long the machine took in each repeat for points of the grid as
    the grid says; times and rates at the grid's speed have it divided out. `within` is the range
    that was predicted of single measurements. Counts have neither.
    """

    trace: str
    arm: str
    figure: str
    measured: list[float] = field(repr=False)
    predicted: float
    inside: bool
    slowness: list[float] = field(default_factory=list, repr=False)
    rate: bool = False
    within: tuple[float, float] | None = None

    @property
    def in_range(self) -> bool:
        """Whether the median of what was measured is within the predicted range."""
        low, high = self.within or (-inf, inf)
        return low <= median(self.measured) <= high

    @property
    def error(self) -> float:
        """Relative, to the median of what was measured."""
        return self.predicted / median(self.measured) - 1

    @property
    def at_speed(self) -> list[float]:
        """What was measured, at the grid's speed."""
        if not self.slowness:
            return self.measured
        each = zip(self.measured, self.slowness, strict=True)
        return [value * slow if self.rate else value / slow for value, slow in each]

    @property
    def error_at_speed(self) -> float:
        """Relative, to the median of what was measured at the grid's speed."""
        return self.predicted / median(self.at_speed) - 1

    @property
    def verdict(self) -> CheckVerdict:
        """By the errors."""
        if abs(self.error) <= WITHIN:
            return CheckVerdict.HOLDS
        return CheckVerdict.AT_SPEED if abs(self.error_at_speed) <= WITHIN else CheckVerdict.FAILS


def summarise_figures(found: Sequence[CheckedFigure]) -> str:
    """How many predictions hold, figure by figure."""
    texts = []
    for figure in dict.fromkeys(one.figure for one in found):
        own = [one for one in found if one.figure == figure]
        errors = [abs(one.error) for one in own]
        good = sum(error <= WITHIN for error in errors)
        text = f"{figure}: {good} of {len(errors)} within {WITHIN:.0%}"
        if own[0].slowness:
            again = sum(abs(one.error_at_speed) <= WITHIN for one in own)
            text += f" ({again} at the grid's speed)"
        if own[0].within:
            text += f", {sum(one.in_range for one in own)} in the predicted range"
        texts.append(f"{text}, median error {median(errors):.0%}, worst {max(errors):.0%}")
    return "; ".join(texts)


def graph_warnings(facts: GridFacts, predictor: GridPredictor) -> list[str]:
    """What to know where the engines of `facts`, or a calibration's, had other CUDA graphs."""
    here = facts.graph_warning(predictor.grid.facts, "these engines")
    return [warning for warning in (predictor.warning, here) if warning]


def write_figures(
    output: Path,
    done: CheckedRepeats,
    predictor: GridPredictor,
    found: Sequence[CheckedFigure],
    quiet: float | None = None,
) -> None:
    """Write ``profile.json`` and ``profile.md``.

    `quiet` is the share of the requests alone that began on a core that nothing else used.
    """
    grid, calibration, facts = predictor.grid, predictor.calibration, done.facts
    at_speed = f"At the speed of: {calibration.about()} " if calibration else ""
    page = [
        "# What `picbench profile` predicts, against engines",
        f"Three traces that the grid has no point of, drawn with seed {done.seed}, served by "
        f"{facts.model}, {facts.dtype}, {facts.hardware}, commit {facts.versions['commit'][:7]}. "
        f"{facts.caveat and facts.caveat.rstrip('.') + '. '}"
        f"Median (lowest - highest) of {len(done.repeats)} repeats, arms in a new order in each; "
        f"spread is highest over lowest. Predicted from: {grid.about()} {at_speed}TTFT: median of "
        "requests alone, from an empty cache; "
        f"requests a second and KV: {grid.facts.running} at a time.{_load_of_machine(quiet)}",
        "Between them each arm served points of the grid again that compute about as much: how "
        f"much longer they took than the {'calibrated ' if calibration else ''}grid says, in the "
        "median over the arms that map chunks "
        "and over the others, is how slow the machine was for them in that repeat "
        f"({_slowness(found)}). `at the grid's speed` has that divided out.",
        *graph_warnings(facts, predictor),
        f"{summarise_figures(found)}.",
        markdown.table(_HEAD, [_row(one) for one in found]),
    ]
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / "profile.md", ("\n\n".join(page) + "\n").encode())
    document = {
        "facts": asdict(facts),
        "grid": asdict(grid.facts),
        "calibration": asdict(calibration.facts) if calibration else None,
        "found": [asdict(one) for one in found],
    }
    write_json(output / "profile.json", document)


def _load_of_machine(share: float | None) -> str:
    if share is None:
        return ""
    return f" {share:.0%} of the requests alone began on a core that nothing else used."


def _row(one: CheckedFigure) -> tuple[str, ...]:
    return (
        one.trace,
        one.arm,
        one.figure,
        f"{median(one.measured):.4g} ({min(one.measured):.4g} - {max(one.measured):.4g})",
        f"{one.predicted:.4g}",
        f"{one.error:+.0%}",
        f"{max(one.measured) / min(one.measured):.2f}",
        f"{one.error_at_speed:+.0%}" if one.slowness else "-",
        f"{one.within[0]:.4g} - {one.within[1]:.4g}" if one.within else "-",
        one.verdict,
        "yes" if one.inside else "no",
    )


def _slowness(found: Sequence[CheckedFigure]) -> str:
    return ", ".join(_ranges(found))


def _ranges(found: Sequence[CheckedFigure]) -> Iterator[str]:
    """The machine's slowness, trace by trace and figure by figure, over arms of both kinds."""
    for trace in dict.fromkeys(one.trace for one in found):
        for figure in dict.fromkeys(one.figure for one in found if one.slowness):
            slow = [
                s for one in found if (one.trace, one.figure) == (trace, figure)
                for s in one.slowness
            ]  # fmt: skip
            yield f"{trace}, {figure}: {median(slow):.2f} ({min(slow):.2f} - {max(slow):.2f})"


@dataclass(frozen=True, slots=True)
class GridControl:
    """A point of the grid, with its traffic from an empty cache."""

    point: GridPoint
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class MachineSlowness:
    """How many times as long a machine takes as the grid says: first tokens, bursts."""

    ttft: float
    seconds: float


class GridControls:
    """Chooses controls for arms on traces."""

    def __init__(self, grid: MeasuredGrid, settings: GridSettings) -> None:
        self._settings = settings
        self._registry = Registry()
        self._cells = grid.points()
        self._traffic = {traffic.point: traffic for traffic in reversed(plan_grid(settings))}

    def choose(self, profile: TraceProfile, arm: ArmProfile, load: str) -> GridControl:
        """The point of a load whose mean request is the most like the arm's on a trace.

        Raises ConfigError for a grid without such points.
        """
        sizes, links = arm.sizes, links_chunks(arm.algorithm)
        wanted = (
            profile.traffic.prompt / profile.traffic.requests,
            arm.counted.computed / max(1, arm.counted.requests),
            fmean(size.output for size in sizes) if sizes else 1.0,
        )
        planned = {
            traffic: size
            for point, traffic in self._traffic.items()
            if point.load == load and (size := self._size(point, links)) is not None
        }
        if not planned:
            raise ConfigError(f"the grid has no cells of {load} requests", hint="measure it again")
        nearest = min(planned, key=lambda traffic: _distance(planned[traffic], wanted))
        return self._draw(nearest)

    def _size(self, point: GridPoint, links: bool) -> tuple[float, float, float] | None:
        """What the arms of a kind computed at a point, in the mean."""
        cells = [
            cell
            for measured in self._cells.get(point, ())
            for arm, cell in measured.arms.items()
            if links_chunks(self._registry.parse(arm)) is links
        ]
        if not cells:
            return None
        return (
            fmean(cell.prompt for cell in cells),
            fmean(cell.computed for cell in cells),
            float(point.output),
        )

    def _draw(self, traffic: GridTraffic) -> GridControl:
        return GridControl(traffic.point, draw_traffic(traffic, self._settings).cold)


def slowness_by_kind(
    predictor: GridPredictor, served: Mapping[str, Sequence[tuple[GridPoint, ArmCell]]]
) -> dict[bool, MachineSlowness]:
    """How slow the machine was in one repeat, for arms that map chunks, and for those that do not.

    `served` are two controls of each arm: alone, and in a burst. The median over arms of a kind.
    """
    registry, found = Registry(), dict[bool, list[MachineSlowness]]()
    for arm, (alone, burst) in served.items():
        ttft = predictor.predict_cell(arm, *alone).ttft_s
        rate = predictor.predict_cell(arm, *burst).requests_s
        if ttft and rate:
            one = MachineSlowness(alone[1].ttft_s / ttft, rate / burst[1].requests_s)
            found.setdefault(links_chunks(registry.parse(arm)), []).append(one)
    return {links: _middle(each) for links, each in found.items()}


def _middle(each: Sequence[MachineSlowness]) -> MachineSlowness:
    def middle(value: Callable[[MachineSlowness], float]) -> float:
        return median(map(value, each))

    return MachineSlowness(middle(lambda one: one.ttft), middle(lambda one: one.seconds))


def _distance(size: Sequence[float], wanted: Sequence[float]) -> float:
    return sum(abs(log(one / other)) for one, other in zip(size, wanted, strict=True))


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

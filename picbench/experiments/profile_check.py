"""Predictions of `picbench profile` for traces that no grid has, held against engines.

A cell of the runner is a repeat: every arm serves each trace alone and together, and before each a
control: a point of the grid that computes about as much, which says how slow the machine is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf, log
from pathlib import Path
from random import Random
from statistics import fmean, median

import yaml
from pydantic import TypeAdapter

from picbench.engines.algorithms import Registry
from picbench.errors import ConfigError, IncomparableRuns
from picbench.experiments import grid
from picbench.experiments.grid import ARMS
from picbench.files import locked, write_json, write_whole
from picbench.profile.predictor import (
    ALONE,
    BURST,
    ArmCell,
    GridFacts,
    GridPoint,
    GridPredictor,
    MeasuredGrid,
    choose_predictor,
    links_chunks,
    read_measured,
)
from picbench.profile.profile import ArmProfile, TraceProfile, profile_trace
from picbench.run import runner
from picbench.run.measurements import Outcome, ProfileCheck
from picbench.tables.page import page
from picbench.tables.table import NOTHING, table
from picbench.workloads.sample import Sample
from picbench.workloads.traffic.corpus import from_tokens
from picbench.workloads.traffic.draw import Stream, draw
from picbench.workloads.traffic.file import Header, write_requests
from picbench.workloads.traffic.settings import Traffic
from picbench.workloads.traffic.trace import Encode
from picbench.workloads.traffic.trace_file import read_trace_file

_SCHEMA = 1

#: What traces are drawn with where no other seed is asked for, or recorded.
SEED = 77

#: Errors up to this share are what is promised.
WITHIN = 0.15

#: The point of a control, and what an arm took there, or its traffic from an empty cache.
ControlCell = tuple[GridPoint, ArmCell]
GridControl = tuple[GridPoint, Sequence[Sample]]


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
        """Draw the requests."""
        tokens, length = self.chunk_tokens, self.output
        corpus = from_tokens(
            grid.IDS, seed, pool=self.corpus, chunk_tokens=tokens, max_tokens=length
        )
        wanted = Traffic(
            requests=self.requests, seed=seed, chunks=self.chunks, zipf=self.zipf, cached=self.reuse
        )
        return draw(wanted, corpus)


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
    """The repeats in a file, None without a file. Raises ConfigError for another file."""
    if not path.exists():
        return None
    return read_measured(path, CheckedRepeats, _SCHEMA, f"{path}", "name another `output`")


class RepeatsRecord(grid.FactsRecord):
    """The repeats of a file, of engines that serve `model` and traces that `seed` draws."""

    def __init__(
        self, path: Path, seed: int, model: str, facts: Callable[[runner.Described], GridFacts]
    ) -> None:
        super().__init__(path, facts)
        self._seed, self._model = seed, model
        self.found = read_repeats(path)
        if self.found:
            self.join(self.found.facts)

    def join(self, facts: GridFacts) -> None:
        """See `FactsRecord`.

        Raises ConfigError for another model, IncomparableRuns for traces of another seed, too.
        """
        if facts.model != self._model:
            raise ConfigError(
                f"the grid is of {self._model}, this is {facts.model}", hint="`model`"
            )
        found = read_repeats(self.path) or CheckedRepeats(facts, (), self._seed)
        grid.refuse_other_engines(self.path, found.facts, facts)
        if found.seed != self._seed:
            raise IncomparableRuns(
                f"{self.path}: its traces were drawn with seed {found.seed}, not {self._seed}",
                hint="name another `output`, or that `seed`",
            )
        self.found = found
        self.seconds = {_name(one.number): [0.0] for one in found.repeats} | {**self.seconds}

    def note(
        self,
        cell: runner.Cell,
        number: int,
        figures: Mapping[str, Mapping[str, CheckedServing]],
        seconds: float,
    ) -> None:
        """Add a repeat to the file; one that it has already stays."""
        assert self.found is not None
        with locked(self.path):
            self.join(self.found.facts)
            known = {one.number: one for one in self.found.repeats}
            known.setdefault(cell.rank, CheckedRepeat(cell.rank, figures))
            self.found = replace(self.found, repeats=[known[one] for one in sorted(known)])
            write_json(self.path, {"schema": _SCHEMA} | asdict(self.found))
        self.seconds = {**self.seconds, cell.name: [seconds]}


def _name(number: int) -> str:
    return f"repeat {number}"


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
    def error_at_speed(self) -> float:
        """Relative, to the median of what was measured, at the grid's speed."""
        each = zip(self.measured, self.slowness or [1.0] * len(self.measured), strict=True)
        at_speed = [value * slow if self.rate else value / slow for value, slow in each]
        return self.predicted / median(at_speed) - 1

    @property
    def verdict(self) -> str:
        """Whether the prediction is as good as promised, by the errors."""
        if abs(self.error) <= WITHIN:
            return "holds"
        return "at the grid's speed" if abs(self.error_at_speed) <= WITHIN else "fails"

    def columns(self) -> dict[str, str]:
        """The figure as a row of the page, by heading."""
        low, high = min(self.measured), max(self.measured)
        at_speed = f"{self.error_at_speed:+.0%}" if self.slowness else NOTHING
        within = f"{self.within[0]:.4g} - {self.within[1]:.4g}" if self.within else NOTHING
        return {
            "trace": self.trace,
            "arm": self.arm,
            "figure": self.figure,
            "measured": f"{median(self.measured):.4g} ({low:.4g} - {high:.4g})",
            "predicted": f"{self.predicted:.4g}",
            "error": f"{self.error:+.0%}",
            "spread": f"{high / low:.2f}",
            "error at the grid's speed": at_speed,
            "predicted range": within,
            "verdict": self.verdict,
            "in the grid's range": "yes" if self.inside else "no",
        }


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


def choose_control(
    measured: MeasuredGrid,
    settings: grid.GridSettings,
    profile: TraceProfile,
    arm: ArmProfile,
    load: str,
) -> GridControl:
    """The point of a load whose mean request is the most like the arm's on a trace.

    Raises ConfigError for a grid without such points.
    """
    traffic, links = profile.traffic, links_chunks(arm.algorithm)
    wanted = traffic.prompt / traffic.requests, arm.computed, traffic.output / traffic.requests
    points, planned = measured.points(), {}
    # Of each point the traffic of the first seed.
    for one in {t.point: t for t in reversed(grid.plan_grid(settings))}.values():
        arms = [cell.arms.items() for cell in points.get(one.point, ())]
        cells = [cell for each in arms for name, cell in each if links_chunks(name) is links]
        if one.point.load == load and cells:
            prompt, computed = fmean(c.prompt for c in cells), fmean(c.computed for c in cells)
            pairs = zip((prompt, computed, one.point.output), wanted, strict=True)
            planned[one] = sum(abs(log(size / other)) for size, other in pairs)
    if not planned:
        raise ConfigError(f"the grid has no cells of {load} requests", hint="measure it again")
    nearest = min(planned, key=planned.__getitem__)
    return nearest.point, grid.draw_traffic(nearest, settings).cold.samples


def slowness_by_kind(
    predictor: GridPredictor, served: Mapping[str, Sequence[ControlCell]]
) -> dict[bool, tuple[float, float]]:
    """How many times as long the machine took in one repeat as the grid says: TTFT, bursts.

    For arms that map chunks, and for those that do not, the median over arms. `served` are two
    controls of each arm: alone, and in a burst.
    """
    found: dict[bool, list[tuple[float, float]]] = {}
    for arm, (alone, burst) in served.items():
        ttft_s, _ = predictor.predict_cell(arm, *alone)
        _, requests_s = predictor.predict_cell(arm, *burst)
        if ttft_s and requests_s:
            one = alone[1].ttft_s / ttft_s, requests_s / burst[1].requests_s
            found.setdefault(links_chunks(arm), []).append(one)
    return {
        links: (median(one for one, _ in each), median(one for _, one in each))
        for links, each in found.items()
    }


@dataclass(frozen=True, slots=True)
class CheckedTrace:
    """A trace, what is predicted of it, and the two controls of each arm: alone, and in a burst."""

    samples: Sequence[Sample]
    profile: TraceProfile
    controls: Mapping[str, tuple[GridControl, GridControl]]

    def compare(
        self, predictor: GridPredictor, repeats: Sequence[CheckedRepeat]
    ) -> Iterator[CheckedFigure]:
        """The figures of all arms, predicted and measured."""
        gib = predictor.grid.facts.block_bytes / 2**30
        served = [repeat.traces[self.profile.name] for repeat in repeats]
        slow = [
            slowness_by_kind(predictor, {arm: one.controls for arm, one in each.items()})
            for each in served
        ]
        for arm in self.profile.arms:
            found = arm.predicted
            assert found is not None
            alone = [each[arm.spec].alone for each in served]
            together = [each[arm.spec].together for each in served]
            figure = partial(CheckedFigure, self.profile.name, arm.spec, inside=found.inside)
            yield figure("computed tokens", [c.computed for c in alone], arm.computed)
            if found.ttft_s and found.requests_s:
                speeds = [repeat[links_chunks(arm.algorithm)] for repeat in slow]
                yield figure(
                    "TTFT, s",
                    [cell.ttft_s for cell in alone],
                    found.ttft_s,
                    slowness=[speed for speed, _ in speeds],
                    within=found.ttft_s_range,
                )
                yield figure(
                    "requests/s",
                    [cell.requests_s for cell in together],
                    found.requests_s,
                    slowness=[speed for _, speed in speeds],
                    rate=True,
                    within=found.requests_s_range,
                )
            yield figure("KV, GiB", [c.peak_blocks * gib for c in together], found.kv_gib)


def draw_traces(
    settings: ProfileCheck, planned: grid.GridSettings, predictor: GridPredictor, seed: int
) -> Iterator[CheckedTrace]:
    """Draw the traces of the device, profile them, and choose controls."""
    found = yaml.safe_load(grid.DATA.read_text(encoding="utf-8"))["traces"][settings.device]
    arms, running = list(map(Registry().parse, ARMS)), predictor.grid.facts.running
    for trace in TypeAdapter(tuple[UnseenTrace, ...]).validate_python(found):
        stream = trace.draw(seed)
        path = settings.output / f"{trace.name}.jsonl"
        write_requests(path, Header(dataset="synthetic", synthetic=True), stream)
        opened = read_trace_file(path, _no_texts)
        profile = profile_trace(trace.name, opened, arms, predictor, running=running)
        choose = partial(choose_control, predictor.grid, planned, profile)
        controls = {arm.spec: (choose(arm, ALONE), choose(arm, BURST)) for arm in profile.arms}
        yield CheckedTrace(stream.samples, profile, controls)


def _no_texts() -> Encode:
    raise ConfigError("the trace has texts, and no tokenizer is loaded")


@dataclass(frozen=True, slots=True)
class ServedRepeat(runner.Cell):
    """A repeat of all traces as a cell of the runner; its rank is its number, from 0."""

    traces: Sequence[CheckedTrace] = field(kw_only=True)
    running: int = field(kw_only=True)
    serving: grid.GridEngines = field(kw_only=True)

    def serve(self, engines: runner.Engines, number: int) -> dict[str, dict[str, CheckedServing]]:
        """Serve each trace under all arms, in an order of its own."""
        found = {}
        for trace in self.traces:
            name = trace.profile.name
            order = Random(f"{name} {self.rank}").sample(ARMS, len(ARMS))
            found[name] = {arm: self._serve(engines, trace, arm) for arm in order}
        return found

    def _serve(self, engines: runner.Engines, trace: CheckedTrace, arm: str) -> CheckedServing:
        """Serve a control and the trace, alone without replies, and together."""
        cells: list[ArmCell] = []
        for (_, samples), at_once in zip(trace.controls[arm], (1, self.running), strict=True):
            for each in (samples, trace.samples):
                alone = [replace(sample, max_tokens=1) for sample in each]
                batch = grid.SampleBatch(alone if at_once == 1 else each)
                cells += self.serving.serve(engines, arm, [batch], at_once)
        one, other = (point for point, _ in trace.controls[arm])
        return CheckedServing(cells[1], cells[3], ((one, cells[0]), (other, cells[2])))


class RepeatsPlan(runner.ExperimentPlan):
    """A repeat takes as long as the longest of this call."""

    def expected(self, cell: runner.Cell, record: runner.CellRecord) -> float:
        """See `ExperimentPlan`."""
        return max((max(seconds) for seconds in record.seconds.values()), default=0.0)


class RepeatsBudget(runner.TimeBudget):
    """A budget in which the first repeat begins in any case."""

    _begun = False

    def fits(self, seconds: float) -> bool:
        """See `TimeBudget`."""
        begun, self._begun = self._begun, True
        return not begun or super().fits(seconds)


def measure(settings: ProfileCheck, launcher: runner.Launcher | None = None) -> Outcome:
    """Measure what is left, and write the page. Raises ConfigError as `check_profile` does."""
    predictor = choose_predictor(settings.grid, settings.calibration)
    if predictor is None:
        raise ConfigError(f"`grid` {settings.grid}: nothing to check", hint="name a grid.json")
    _, done = check_profile(settings, predictor, launcher)
    return Outcome(str(settings.output / "profile.md"), 0 if done else runner.UNFINISHED)


def check_profile(
    settings: ProfileCheck, predictor: GridPredictor, launcher: runner.Launcher | None = None
) -> tuple[list[CheckedFigure], bool]:
    """Measure the repeats that are left, as long as there is time.

    Returns the figures, and whether nothing of the settings' part is left. ``profile.json`` and
    ``profile.md`` are of all those in ``profile-cells.json``, whether or not any is measured here.
    If none is left, no engine is started.

    Raises ConfigError for a part without repeats, and for a grid of another model than is served,
    and IncomparableRuns for repeats of other engines, or of other traces, in the folder.
    """
    if not runner.share(range(settings.repeats), settings.part):
        part = f"{settings.part[0]}/{settings.part[1]}"
        raise ConfigError(f"`part` {part}: no repeat of {settings.repeats} is its own")
    planned, serving = grid.read_grids()[settings.device], grid.GridEngines(settings.device)

    def facts_of(described: runner.Described) -> GridFacts:
        facts = serving.facts(settings, planned, described)
        for warning in graph_warnings(facts, predictor):
            runner.say(f"warning: {warning}")
        return facts

    seed = SEED if settings.seed is None else settings.seed
    model, cells = predictor.grid.facts.model, settings.output / "profile-cells.json"
    record = RepeatsRecord(cells, seed, model, facts_of)
    with locked(settings.output):  # Processes that share a folder write and read them in turn.
        traces = list(draw_traces(settings, planned, predictor, seed))
    running = predictor.grid.facts.running
    plan = RepeatsPlan(
        name="profile",
        facts={},
        engines=serving.configs(settings, planned),
        cells=[
            ServedRepeat(_name(n), rank=n, traces=traces, running=running, serving=serving)
            for n in range(settings.repeats)
        ],
        rounds=1,
        part=settings.part,
    )
    figures: list[CheckedFigure] = []
    try:
        runner.run(plan, record, runner.say, RepeatsBudget(settings.seconds), launcher)
    finally:
        if record.found is not None and record.found.repeats:
            with locked(record.path):
                record.join(record.found.facts)
                done = record.found
                figures += [f for trace in traces for f in trace.compare(predictor, done.repeats)]
                write_figures(settings.output, done, predictor, figures)
            runner.say(summarise_figures(figures))
    return figures, plan.done(record)


def graph_warnings(facts: GridFacts, predictor: GridPredictor) -> list[str]:
    """What to know where the engines of `facts`, or a calibration's, had other CUDA graphs."""
    here = facts.graph_warning(predictor.grid.facts, "these engines")
    return [warning for warning in (predictor.warning, here) if warning]


def write_figures(
    output: Path, done: CheckedRepeats, predictor: GridPredictor, found: Sequence[CheckedFigure]
) -> None:
    """Write ``profile.json`` and ``profile.md``."""
    calibration = predictor.calibration
    write_whole(output / "profile.md", render_figures(done, predictor, found).encode())
    document = {
        "facts": asdict(done.facts),
        "grid": asdict(predictor.grid.facts),
        "calibration": asdict(calibration.facts) if calibration else None,
        "found": [asdict(one) for one in found],
    }
    write_json(output / "profile.json", document)


def render_figures(
    done: CheckedRepeats, predictor: GridPredictor, found: Sequence[CheckedFigure]
) -> str:
    """The page of all repeats, in Markdown."""
    measured, calibration, facts = predictor.grid, predictor.calibration, done.facts
    at_speed = f"At the speed of: {calibration.about()} " if calibration else ""
    arms = [each for repeat in done.repeats for each in repeat.traces.values()]
    shares = [serving.alone.quiet for each in arms for serving in each.values()]
    known, quiet = [share for share in shares if share is not None], ""
    if known and len(known) == len(shares):
        share = f"{fmean(known):.0%}"
        quiet = f" {share} of the requests alone began on a core that nothing else used."
    kinds: dict[str, list[float]] = {}
    for one in found:
        kinds.setdefault(f"{one.trace}, {one.figure}", []).extend(one.slowness)
    slowness = ", ".join(
        f"{kind}: {median(slow):.2f} ({min(slow):.2f} - {max(slow):.2f})"
        for kind, slow in kinds.items()
        if slow
    )
    return page(
        "What `picbench profile` predicts, against engines",
        f"Three traces that the grid has no point of, drawn with seed {done.seed}, served by "
        f"{facts.model}, {facts.dtype}, {facts.hardware}, commit {facts.versions['commit'][:7]}. "
        f"{facts.caveat and facts.caveat.rstrip('.') + '. '}"
        f"Median (lowest - highest) of {len(done.repeats)} repeats, arms in a new order in each; "
        f"spread is highest over lowest. Predicted from: {measured.about()} {at_speed}TTFT: "
        "median of requests alone, from an empty cache; "
        f"requests a second and KV: {measured.facts.running} at a time.{quiet}",
        "Between them each arm served points of the grid again that compute about as much: how "
        f"much longer they took than the {'calibrated ' if calibration else ''}grid says, in the "
        "median over the arms that map chunks "
        "and over the others, is how slow the machine was for them in that repeat "
        f"({slowness}). `at the grid's speed` has that divided out.",
        *graph_warnings(facts, predictor),
        f"{summarise_figures(found)}.",
        table(list(found[0].columns()), [[*one.columns().values()] for one in found]),
    )

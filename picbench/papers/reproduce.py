"""From a paper's figures to the experiments that they need, and from these to compact data."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from picbench.experiments import serve_arms
from picbench.experiments.arm_scores import ARMS_OF
from picbench.experiments.runner import TimeBudget
from picbench.files import locked
from picbench.papers.data import (
    QUESTION,
    START,
    ExperimentData,
    PointStore,
    StoredPoint,
    expected_arm,
    expected_load,
)
from picbench.papers.latency import LatencyRun, measure_attention, measure_latencies, measure_layers
from picbench.papers.load import (
    Display,
    LoadPlan,
    PlannedRun,
    identity_of,
    joined_conditions,
    without_series,
)
from picbench.papers.settings import (
    AttentionExperiment,
    AttentionSettings,
    Device,
    LatencySettings,
    Point,
    ScoreSettings,
    Settings,
    points,
    read_published,
)
from picbench.run.session import Services
from picbench.run.traffic_file import TrafficWriter, Written
from picbench.store.writer import MANIFEST
from picbench.workloads import models
from picbench.workloads.traffic.traffic_facts import TrafficFacts

#: Folders below the output: compact data, scores row by row, and points of loads as they are
#: measured, which are all that a command needs to go on elsewhere.
DATA, SCORES, POINTS = "data", "scores", "points"


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A paper's experiments on a device, for some of its figures (``all``: for all of them).

    `scores` says where scores were measured already; None has them measured below `output`.
    `commit` names the code where a checkout cannot. `seconds` are what may be spent (0: no limit);
    no part is begun that would take longer. Of `part` (k, n) every n-th point of loads is measured,
    and all else by the first; what the others have measured by then is in the data, too.
    """

    name: str
    settings: Settings
    figures: Sequence[str]
    device: Device
    output: Path
    scores: Path | None = None
    commit: str | None = None
    seconds: float = 0.0
    part: tuple[int, int] = (1, 1)

    @property
    def experiments(self) -> list[str]:
        """What is needed, in the order of the figures."""
        wanted = [
            figure.experiment
            for name, figure in self.settings.figures.items()
            if name in self.figures or "all" in self.figures
        ]
        return list(dict.fromkeys(wanted))

    @property
    def score_folder(self) -> Path:
        """Where scores row by row are, or will be."""
        return self.scores or self.output / SCORES

    @property
    def store(self) -> PointStore:
        """The points of loads that are measured."""
        return PointStore(self.output / POINTS)

    @property
    def is_first_part(self) -> bool:
        """Whether this is the part that measures what is no load."""
        return self.part[0] == 1

    @property
    def owned(self) -> frozenset[str]:
        """Names of the points of loads that this part measures, whatever the figures."""
        every = (point.name for name in self.settings.loads for point in self._points(name))
        first, parts = self.part
        return frozenset(list(dict.fromkeys(every))[first - 1 :: parts])

    def _points(self, experiment: str) -> list[Point]:
        return list(points(self.settings, experiment, self.device))

    def plan_loads(self, services: Services) -> dict[str, list[PlannedRun]]:
        """All runs of loads; those that are complete or another part's have no job."""
        plan, owned = self._load_plan(services), self.owned
        return {
            experiment: plan.plan(self._points(experiment), owned)
            for experiment in self.experiments
            if experiment in self.settings.loads
        }

    def latency(self, experiment: str) -> LatencyRun | None:
        """The state of a latency experiment; None where it has no sizes for the device."""
        found: LatencySettings | None = getattr(
            self.settings.latencies[experiment], self.device, None
        )
        if found is None:
            return None
        path = self.output / "latencies" / f"{self.device}-{experiment}.json"
        return LatencyRun(found, self.device, path)

    def latencies(self) -> dict[str, LatencyRun]:
        """The latency experiments that there are on this device."""
        wanted = [
            n for n in self.experiments if self.is_first_part and n in self.settings.latencies
        ]
        return {name: run for name in wanted if (run := self.latency(name)) is not None}

    def score_settings(self) -> ScoreSettings | None:
        """The scores that are to be measured; None if there are none, or they are given."""
        if (
            not self.is_first_part
            or self.scores
            or "scores" not in self.experiments
            or self.settings.scores is None
        ):
            return None
        found: ScoreSettings | None = getattr(self.settings.scores, self.device)
        return found

    def run(self, services: Services, display: Display) -> bool:
        """Measure what is missing, as long as there is time, and write compact data.

        Single requests come first, then loads, one seed of all points after another, then scores.
        Returns whether there was time for all. Raises ConfigError before an engine starts where
        something is wrong.
        """
        read_published(self.settings.published)
        loads, latencies = self.plan_loads(services), self.latencies()
        budget = TimeBudget(self.seconds)
        measure_latencies(latencies, self.device, self.commit, budget)
        self._keep_latencies(latencies)
        self._measure_attention(budget)
        self._count_layers()
        plan = self._load_plan(services)
        try:
            if not budget.stopped:
                plan.run([run for planned in loads.values() for run in planned], display, budget)
        finally:
            with locked(self.output / DATA):
                for experiment, planned in loads.items():
                    self._keep_loads(experiment, planned, plan)
        if not budget.stopped and (wanted := self.score_settings()) is not None:
            self._measure_scores(wanted)
        return not budget.stopped

    @property
    def missing_attention(self) -> dict[str, AttentionExperiment]:
        """Attention that is to be measured, on the CPU whatever the device."""
        folder = self.output / DATA
        return {
            name: found
            for name, found in self.settings.attentions.items()
            if self.is_first_part
            and name in self.experiments
            and not (folder / f"cpu-{name}.json").exists()
        }

    def _measure_attention(self, budget: TimeBudget) -> None:
        """One pass over the rows for all experiments with the same settings."""
        if self.device != "cpu":
            return
        left = self.missing_attention
        while left and budget.allows(_expected_attention(next(iter(left.values())).cpu)):
            settings = next(iter(left.values())).cpu
            alike = {name: one for name, one in left.items() if one.cpu == settings}
            for data in measure_attention(alike, settings, self.name, self.commit, print):
                data.write(self.output / DATA)
            left = {name: one for name, one in left.items() if name not in alike}

    @property
    def missing_layers(self) -> list[str]:
        """Counts by layer that there are not yet, which need no device."""
        folder = self.output / DATA
        wanted = [n for n in self.experiments if self.is_first_part and n in self.settings.layers]
        return [name for name in wanted if not (folder / f"cpu-{name}.json").exists()]

    def _count_layers(self) -> None:
        for name in self.missing_layers:
            found = self.settings.layers[name]
            measure_layers(self.name, name, found, self.commit).write(self.output / DATA)

    def _load_plan(self, services: Services) -> LoadPlan:
        logs = self.output / "logs"
        if self.part[1] > 1:
            logs /= f"part-{self.part[0]}"
        return LoadPlan(self.output, services, self.store, logs, self.commit)

    def _keep_latencies(self, latencies: Mapping[str, LatencyRun]) -> None:
        for experiment, latency in latencies.items():
            varies = self.settings.latencies[experiment].varies
            data = latency.data(self.name, experiment, varies)
            if data.points:
                data.write(self.output / DATA)

    def _keep_loads(self, experiment: str, planned: Sequence[PlannedRun], plan: LoadPlan) -> None:
        found = [stored for run in planned if (stored := plan.stored(run)) is not None]
        if not found:
            return
        points_of = [stored.point for stored in found]
        first = min(point.seed for point in points_of)
        # Occupancy over time is drawn of one seed.
        kept = [one if one.seed == first else without_series(one) for one in points_of]
        varies = self.settings.loads[experiment].varies
        facts = joined_conditions([stored.conditions for stored in found])
        data = ExperimentData(self.name, experiment, self.device, varies, facts, kept)
        data.write(self.output / DATA)

    def _measure_scores(self, wanted: ScoreSettings) -> None:
        for model in wanted.models:
            settings = serve_arms.ServeSettings(
                output=self.score_folder,
                commit=self.commit,
                model=model,
                dataset=tuple(wanted.datasets),
                rows=wanted.rows,
                device=self.device,
                dtype="bfloat16" if self.device == "cuda" else "float32",
            )
            serve_arms.measure(settings)


#: Prompt tokens of a row under an arm, tokens a second of all arms in one batch, and seconds of a
#: row's attention under an arm on a CPU.
_ROW, _BATCH, _ATTENTION = 1_500, {"cpu": 2_000, "cuda": 90_000}, 5.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is left of an experiment: units of work of all that there are, tokens, seconds."""

    experiment: str
    what: str
    left: int
    total: int
    tokens: int
    seconds: float


def estimate(plan: Reproduction) -> Iterator[Estimate]:
    """An estimate for each experiment that the figures need, in their order."""
    writer = TrafficWriter()
    for experiment in plan.experiments:
        settings = plan.settings
        if experiment in settings.loads:
            yield _load(experiment, plan, writer)
        elif not plan.is_first_part:
            continue
        elif experiment in settings.latencies:
            yield _latency(experiment, plan)
        elif experiment in settings.attentions:
            yield _attention(experiment, plan)
        elif experiment in settings.layers:
            rows = settings.layers[experiment].cpu.rows
            left = rows * (experiment in plan.missing_layers)
            yield Estimate(experiment, "rows", left, rows, 0, 0.0)
        else:
            yield _scores(plan.score_settings(), plan)


def _attention(experiment: str, plan: Reproduction) -> Estimate:
    wanted = plan.settings.attentions[experiment].cpu
    total = wanted.rows * (plan.device == "cpu")
    left = total * (experiment in plan.missing_attention)
    seconds = _expected_attention(wanted) if left else 0.0
    return Estimate(experiment, "rows", left, total, left * len(wanted.arms) * _ROW, seconds)


def _expected_attention(settings: AttentionSettings) -> float:
    return _ATTENTION * settings.rows * len(settings.arms)


def _load(experiment: str, plan: Reproduction, writer: TrafficWriter) -> Estimate:
    owned = plan.owned
    found = [p for p in points(plan.settings, experiment, plan.device) if p.name in owned]
    with TemporaryDirectory(prefix="picbench-") as folder:
        file = Path(folder, "requests.jsonl")
        left = [
            (point, _write(point, writer, file).facts)
            for point in found
            if not _complete(plan, point, writer, file)
        ]
    seconds = sum(expected_load(point, facts) for point, facts in left)
    tokens = sum(facts.mean_tokens * facts.requests * len(p.arms) for p, facts in left)
    # On a CPU each arm has an engine of its own, on a GPU arms take turns.
    engines = max((len(p.arms) for p, _ in left), default=0) if plan.device == "cpu" else bool(left)
    seconds = seconds * _factor(plan, experiment) + engines * START[plan.device]
    return Estimate(experiment, "runs", len(left), len(found), int(tokens), seconds)


def _factor(plan: Reproduction, experiment: str) -> float:
    """By how much the points of an experiment that are measured took longer than expected."""
    expected = took = 0.0
    for name in sorted(plan.store.folder.glob(f"{plan.device}-{experiment}-*.json")):
        stored = StoredPoint.read(name)
        served = TrafficFacts(**{"users": 1, **stored.point.facts})  # type: ignore[arg-type]
        for arm, found in stored.point.arms.items():
            expected += expected_arm(arm, served, plan.device)
            took += found.metrics["makespan_s"] or 0.0
    return took / expected if expected else 1.0


def _write(point: Point, writer: TrafficWriter, file: Path) -> Written:
    return writer.write(file, point.traffic, models.resolve(point.run["model"]))


def _complete(plan: Reproduction, point: Point, writer: TrafficWriter, file: Path) -> bool:
    """Whether the point is measured; ConfigError for one with other settings or requests."""
    if plan.store.has(point.name):
        written = _write(point, writer, file)
        return plan.store.find(point.name, identity_of(point, written)) is not None
    path = plan.output / "runs" / point.name / MANIFEST
    return path.exists() and json.loads(path.read_bytes())["status"] == "complete"


def _latency(experiment: str, plan: Reproduction) -> Estimate:
    run = plan.latency(experiment)
    if run is None:
        return Estimate(experiment, "points", 0, 0, 0, 0.0)
    missing, repeats = run.missing, run.settings.repeats + 1
    tokens = sum(point.chunks * point.tokens + QUESTION for point in missing.values())
    seconds = repeats * sum(map(run.expected, missing)) + START[plan.device] * bool(missing)
    served = 2 * tokens * repeats * len(run.settings.arms)
    return Estimate(experiment, "points", len(missing), len(run.settings.points), served, seconds)


def _scores(settings: ScoreSettings | None, plan: Reproduction) -> Estimate:
    if settings is None:
        return Estimate("scores", "rows", 0, 0, 0, 0.0)
    total = settings.rows * len(settings.datasets) * len(settings.models)
    done = sum(
        len(json.loads(path.read_bytes())["prompt"]) for path in plan.score_folder.glob("*.json")
    )
    left = max(0, total - done)
    arms = max(len(ARMS_OF.get(model, ())) for model in settings.models)
    tokens = left * arms * _ROW
    seconds = tokens / _BATCH[plan.device] + (START[plan.device] if left else 0)
    return Estimate("scores", "rows", left, total, tokens, seconds)

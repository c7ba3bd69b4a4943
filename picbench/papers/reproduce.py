"""From a paper's figures to the experiments that they need, and from these to compact data."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from picbench.files import locked
from picbench.papers import serve_arms
from picbench.papers.arm_scores import ARMS_OF
from picbench.papers.data import QUESTION, START, StoredPoint, expected_arm, expected_load
from picbench.papers.latency import LatencyRun, measure_attention, measure_latencies, measure_layers
from picbench.papers.load import (
    POINTS,
    Display,
    LoadPlan,
    PlannedRun,
    identity_of,
    joined,
    write_point,
)
from picbench.papers.settings import (
    Device,
    Point,
    RowExperiment,
    RowSettings,
    ScoreSettings,
    Settings,
    points,
    read_published,
)
from picbench.run.runner import TimeBudget, share
from picbench.run.session import Services
from picbench.run.traffic_file import TrafficWriter
from picbench.store.writer import MANIFEST
from picbench.workloads.traffic.traffic_facts import TrafficFacts

T = TypeVar("T")

#: Folders below the output: compact data, and scores row by row.
DATA, SCORES = "data", "scores"


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
    def scored(self) -> Path:
        """Where scores row by row are, or will be."""
        return self.scores or self.output / SCORES

    @property
    def owned(self) -> frozenset[str]:
        """Names of the points of loads that this part measures, whatever the figures."""
        every = (point.name for name in self.settings.loads for point in self.points(name))
        return frozenset(share(list(dict.fromkeys(every)), self.part))

    def points(self, experiment: str) -> list[Point]:
        """The runs of a load."""
        return list(points(self.settings, experiment, self.device))

    def plan_loads(self, plan: LoadPlan) -> dict[str, list[PlannedRun]]:
        """All runs of loads; those that are complete or another part's have no job."""
        owned = self.owned
        loads = [name for name in self.experiments if name in self.settings.loads]
        return {name: plan.plan(self.points(name), owned) for name in loads}

    def own(self, experiments: Mapping[str, T]) -> dict[str, T]:
        """Those of experiments other than loads that the figures need, measured by part 1."""
        wanted = self.experiments if self.part[0] == 1 else []
        return {name: experiments[name] for name in wanted if name in experiments}

    def latencies(self) -> dict[str, LatencyRun]:
        """The state of the latency experiments that there are on this device."""
        folder = self.output / "latencies"
        return {
            name: LatencyRun(sizes, self.device, folder / f"{self.device}-{name}.json")
            for name, found in self.own(self.settings.latencies).items()
            if (sizes := found.on(self.device)) is not None
        }

    def score_settings(self) -> ScoreSettings | None:
        """The scores that are to be measured; None if there are none, or they are given."""
        found = self.settings.scores
        if self.part[0] != 1 or self.scores or "scores" not in self.experiments or found is None:
            return None
        return found.on(self.device)

    def missing(self, experiments: Mapping[str, RowExperiment]) -> dict[str, RowExperiment]:
        """Of attention, or of counts by layer, what is to be made; on the CPU, whatever the device.

        Layers are counted, which needs no device.
        """
        folder = self.output / DATA
        return {
            name: found
            for name, found in self.own(experiments).items()
            if not (folder / f"cpu-{name}.json").exists()
        }

    def run(self, services: Services, display: Display) -> bool:
        """Measure what is missing, as long as there is time, and write compact data.

        Single requests come first, then loads, one seed of all points after another, then scores.
        Returns whether there was time for all. Raises ConfigError before an engine starts where
        something is wrong.
        """
        read_published(self.settings.published)
        logs = self.output / "logs"
        if self.part[1] > 1:
            logs /= f"part-{self.part[0]}"
        plan = LoadPlan(self.output, services, logs, self.commit)
        loads, latencies = self.plan_loads(plan), self.latencies()
        budget = TimeBudget(self.seconds)
        measure_latencies(latencies, self.device, self.commit, budget)
        for name, latency in latencies.items():
            data = latency.data(self.name, name, self.settings.latencies[name].varies)
            if data.points:
                data.write(self.output / DATA)
        self._measure_attention(budget)
        for name, found in self.missing(self.settings.layers).items():
            measure_layers(self.name, name, found, self.commit).write(self.output / DATA)
        try:
            if not budget.stopped:
                plan.run([run for planned in loads.values() for run in planned], display, budget)
        finally:
            with locked(self.output / DATA):
                for name, planned in loads.items():
                    kept = [stored for run in planned if (stored := plan.stored(run)) is not None]
                    if kept:
                        varies = self.settings.loads[name].varies
                        data = joined(self.name, name, self.device, varies, kept)
                        data.write(self.output / DATA)
        if not budget.stopped and (wanted := self.score_settings()) is not None:
            self._measure_scores(wanted)
        return not budget.stopped

    def _measure_attention(self, budget: TimeBudget) -> None:
        """One pass over the rows for all experiments with the same settings."""
        left = self.missing(self.settings.attentions) if self.device == "cpu" else {}
        while left and budget.allows(_expected_attention(next(iter(left.values())).cpu)):
            settings = next(iter(left.values())).cpu
            alike = {name: one for name, one in left.items() if one.cpu == settings}
            for data in measure_attention(alike, settings, self.name, self.commit, print):
                data.write(self.output / DATA)
            left = {name: one for name, one in left.items() if name not in alike}

    def _measure_scores(self, wanted: ScoreSettings) -> None:
        for model in wanted.models:
            settings = serve_arms.ServeSettings(
                output=self.scored,
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
    """What is left of an experiment or a model: `what` of all that there are, tokens, seconds."""

    name: str
    what: str
    left: int
    total: int
    tokens: int
    seconds: float


def estimate(plan: Reproduction) -> Iterator[Estimate]:
    """An estimate for each experiment that the figures need, in their order."""
    writer, settings = TrafficWriter(), plan.settings
    kinds: Sequence[tuple[Mapping[str, object], Callable[[str, Reproduction], Estimate]]] = (
        (settings.latencies, _latency),
        (settings.attentions, _attention),
        (settings.layers, _layers),
        (settings.experiments, _scores),
    )
    for experiment in plan.experiments:
        if experiment in settings.loads:
            yield _load(experiment, plan, writer)
        elif plan.part[0] == 1:
            measure = next(measure for known, measure in kinds if experiment in known)
            yield measure(experiment, plan)


def _layers(experiment: str, plan: Reproduction) -> Estimate:
    rows = plan.settings.layers[experiment].cpu.rows
    left = rows * (experiment in plan.missing(plan.settings.layers))
    return Estimate(experiment, "rows", left, rows, 0, 0.0)


def _attention(experiment: str, plan: Reproduction) -> Estimate:
    wanted = plan.settings.attentions[experiment].cpu
    total = wanted.rows * (plan.device == "cpu")
    left = total * (experiment in plan.missing(plan.settings.attentions))
    seconds = _expected_attention(wanted) if left else 0.0
    return Estimate(experiment, "rows", left, total, left * len(wanted.arms) * _ROW, seconds)


def _expected_attention(settings: RowSettings) -> float:
    return _ATTENTION * settings.rows * len(settings.arms)


def _load(experiment: str, plan: Reproduction, writer: TrafficWriter) -> Estimate:
    owned = plan.owned
    found = [point for point in plan.points(experiment) if point.name in owned]
    with TemporaryDirectory(prefix="picbench-") as folder:
        file = Path(folder, "requests.jsonl")
        left = [(p, facts) for p in found if (facts := _missing_load(plan, p, writer, file))]
    seconds = sum(expected_load(point, facts) for point, facts in left)
    tokens = sum(facts.mean_tokens * facts.requests * len(p.arms) for p, facts in left)
    # On a CPU each arm has an engine of its own, on a GPU arms take turns.
    engines = max((len(p.arms) for p, _ in left), default=0) if plan.device == "cpu" else bool(left)
    seconds = seconds * _factor(plan, experiment) + engines * START[plan.device]
    return Estimate(experiment, "runs", len(left), len(found), int(tokens), seconds)


def _missing_load(
    plan: Reproduction, point: Point, writer: TrafficWriter, file: Path
) -> TrafficFacts | None:
    """Facts about the requests of a point that is not measured.

    ConfigError for one with other settings or requests.
    """
    stored = plan.output / POINTS / f"{point.name}.json"
    path = plan.output / "runs" / point.name / MANIFEST
    if stored.exists():
        StoredPoint.find(stored, identity_of(point, write_point(point, writer, file)))
        return None
    if path.exists() and json.loads(path.read_bytes())["status"] == "complete":
        return None
    return write_point(point, writer, file).facts


def _factor(plan: Reproduction, experiment: str) -> float:
    """By how much the points of an experiment that are measured took longer than expected."""
    expected = took = 0.0
    for path in sorted((plan.output / POINTS).glob(f"{plan.device}-{experiment}-*.json")):
        stored = StoredPoint.find(path)
        assert stored is not None
        served = TrafficFacts(**{"users": 1, **stored.point.facts})  # type: ignore[arg-type]
        for arm, found in stored.point.arms.items():
            expected += expected_arm(arm, served, plan.device)
            took += found.metrics["makespan_s"] or 0.0
    return took / expected if expected else 1.0


def _latency(experiment: str, plan: Reproduction) -> Estimate:
    run = plan.latencies().get(experiment)
    if run is None:
        return Estimate(experiment, "points", 0, 0, 0, 0.0)
    missing, repeats = run.missing, run.settings.repeats + 1
    tokens = sum(point.chunks * point.tokens + QUESTION for point in missing.values())
    seconds = repeats * sum(map(run.expected, missing)) + START[plan.device] * bool(missing)
    served = 2 * tokens * repeats * len(run.settings.arms)
    return Estimate(experiment, "points", len(missing), len(run.settings.points), served, seconds)


def _scores(experiment: str, plan: Reproduction) -> Estimate:
    settings = plan.score_settings()
    if settings is None:
        return Estimate(experiment, "rows", 0, 0, 0, 0.0)
    total = settings.rows * len(settings.datasets) * len(settings.models)
    done = sum(len(json.loads(path.read_bytes())["prompt"]) for path in plan.scored.glob("*.json"))
    left = max(0, total - done)
    arms = max(len(ARMS_OF.get(model, ())) for model in settings.models)
    tokens = left * arms * _ROW
    seconds = tokens / _BATCH[plan.device] + (START[plan.device] if left else 0)
    return Estimate(experiment, "rows", left, total, tokens, seconds)

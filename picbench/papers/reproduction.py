"""From a paper's figures to the runs that they need, and from these to tables and figures."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError
from picbench.inputs.traffic_file import write_traffic
from picbench.output.run_directory import MANIFEST
from picbench.output.run_reader import read_run
from picbench.papers.measured_runs import MeasuredRun
from picbench.papers.paper_report import Report
from picbench.papers.paper_settings import FIGURES, Point, Settings, points
from picbench.papers.published import read_published
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
_DECISIVE = ("algo", "model", "kv_blocks", "context", "max_running")


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A point, the facts about its requests, and its run; None where that is already complete."""

    point: Point
    facts: TrafficFacts
    directory: Path
    job: Job | None


def reproduce(
    settings: Settings, figures: Sequence[str], output: Path, services: Services, display: Display
) -> Path:
    """Run what is missing for `figures` (or ``all``), and write tables, figures and a page.

    Returns the page. Raises ConfigError before an engine starts where something is wrong.
    """
    wanted = [name for name in FIGURES if name in figures or "all" in figures]
    report = Report(settings, read_published(settings.published), output)
    needed = dict.fromkeys(FIGURES[name] for name in wanted)
    planned = [
        run
        for experiment in needed
        for run in _plan_runs(settings, list(points(settings, experiment)), output, services)
    ]
    _run_missing(planned, output, services, display)
    runs = _by_experiment(planned)
    for name in wanted:
        getattr(report, name)(runs[FIGURES[name]])
    return report.close()


def _plan_runs(
    settings: Settings, points: Sequence[Point], output: Path, services: Services
) -> list[PlannedRun]:
    """Write every point's request file below `output` and prepare the runs that are missing.

    A complete run is kept, and one that was stopped goes on. ConfigError for one with other
    settings.
    """
    model = models.resolve(settings.model)
    return [_plan(settings, point, output, services, model) for point in points]


def _plan(
    settings: Settings, point: Point, output: Path, services: Services, model: models.ModelSpec
) -> PlannedRun:
    requests = output / "requests" / f"{point.name}.jsonl"
    written = write_traffic(requests, point.traffic, model)
    directory = output / "runs" / point.name
    wanted = _config(settings, requests, directory) | {"context": settings.context or model.context}
    if _is_complete(directory, wanted, written.fingerprint):
        return PlannedRun(point, written.facts, directory, None)
    job = prepare(parse_config(wanted), services.load, services.memory)
    return PlannedRun(point, written.facts, directory, job)


def _config(settings: Settings, requests: Path, directory: Path) -> dict[str, Any]:
    return {
        "algo": tuple(settings.arms),
        "requests": str(requests),
        "model": settings.model,
        "kv_blocks": settings.kv_blocks,
        "max_running": settings.max_running,
        "output": str(directory),
    }


def _is_complete(directory: Path, wanted: dict[str, Any], fingerprint: str) -> bool:
    """Whether the wanted run is there and complete.

    What cannot go on is removed: a run in which requests failed, or one of other code.
    """
    if not (directory / MANIFEST).exists():
        return False
    run = read_run(directory)
    manifest = run.manifest
    config = manifest["config"] | {"algo": tuple(manifest["config"]["algo"])}
    same = manifest["workload"]["request_file"] == fingerprint and all(
        config[name] == value for name, value in wanted.items() if name in _DECISIVE
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


def _run_missing(
    planned: Sequence[PlannedRun], output: Path, services: Services, display: Display
) -> None:
    jobs = [run.job for run in planned if run.job is not None]
    if not jobs:
        return
    with display(sum(job.requests for job in jobs)) as progress:
        for _ in execute_all(jobs, services.launch, progress, output / "logs"):
            pass


def _by_experiment(planned: Sequence[PlannedRun]) -> dict[str, list[MeasuredRun]]:
    found: dict[str, list[MeasuredRun]] = {}
    for run in planned:
        measured = MeasuredRun(run.point, run.facts, read_run(run.directory))
        found.setdefault(run.point.experiment, []).append(measured)
    return found

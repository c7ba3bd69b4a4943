"""From the figures that are wanted to the runs they need, and back."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from picbench.output.run_reader import read_run
from picbench.papers.measured_runs import MeasuredRun
from picbench.papers.paper_report import Report
from picbench.papers.paper_settings import FIGURES, Settings, points
from picbench.papers.planned_runs import PlannedRun, plan_runs
from picbench.papers.published import read_published
from picbench.run.progress import Progress
from picbench.run.session import Services
from picbench.run.sweep import sweep

#: Opens the display of so many requests.
Display = Callable[[int], AbstractContextManager[Progress]]


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
        for run in plan_runs(settings, list(points(settings, experiment)), output, services)
    ]
    _run_missing(planned, output, services, display)
    runs = _by_experiment(planned)
    for name in wanted:
        getattr(report, name)(runs[FIGURES[name]])
    return report.close()


def _run_missing(
    planned: Sequence[PlannedRun], output: Path, services: Services, display: Display
) -> None:
    jobs = [run.job for run in planned if run.job is not None]
    if not jobs:
        return
    with display(sum(job.facts.samples * len(job.arms) for job in jobs)) as progress:
        for _ in sweep(jobs, services.launch, progress, output / "logs"):
            pass


def _by_experiment(planned: Sequence[PlannedRun]) -> dict[str, list[MeasuredRun]]:
    found: dict[str, list[MeasuredRun]] = {}
    for run in planned:
        measured = MeasuredRun(run.point, run.facts, read_run(run.directory))
        found.setdefault(run.point.experiment, []).append(measured)
    return found

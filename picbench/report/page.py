"""The page: runs as one HTML file that needs no network."""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from picbench.compare.comparison import ComparisonSettings, compare_runs
from picbench.errors import ConfigError, IncomparableRuns
from picbench.files import write_whole
from picbench.report.answers import browse_answers
from picbench.report.contents import RunContents, cautions, headline, read_contents
from picbench.report.figures import run_figures
from picbench.report.sections import (
    arm_table,
    comparison_table,
    count_table,
    decay_table,
    decisions,
    memory_table,
    provenance_table,
    with_interval,
)
from picbench.store.reader import read_run
from picbench.store.summary import BASELINE
from picbench.tables.table import NOTHING, Column, Table, number_of

#: Characters for flipped answers, over all runs: with what else is there, a file below 5 MB.
_ROOM = 2_500_000

_TEMPLATES = Path(__file__).parent / "templates"

#: A table, and what stands beside all of its numbers.
Labelled = tuple[Table, Sequence[str]]


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """`margin` is the loss of score to judge, from 0 to 1."""

    margin: float = 0.02


def write_report(paths: Sequence[Path], output: Path, settings: ReportSettings) -> None:
    """Write one file about the runs in `paths`; readers find the old file or the new one.

    Raises ConfigError for what is no run and for an `output` that cannot be written, InvalidRun for
    runs of an unknown schema.
    """
    page = report_page(paths, settings)
    try:
        write_whole(output, page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ConfigError(
            f"`output` {output}: cannot be written: {error.strerror}", hint="name another file"
        ) from error


def report_page(paths: Sequence[Path], settings: ReportSettings) -> str:
    """The page; an overview comes first where there are several runs."""
    runs = [read_contents(read_run(path), settings.margin) for path in paths]
    sections = [_section(f"run-{n}", run, _ROOM // len(runs)) for n, run in enumerate(runs, 1)]
    browsers = [section["browser"] for section in sections if section["browser"] is not None]
    script = _asset("report.js")
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["number_of"] = number_of
    return environment.get_template("report.html").render(
        title=" and ".join(run.name for run in runs[:3]),
        sections=sections,
        overview=list(_overview(runs, settings)) if len(runs) > 1 else [],
        passages={key: text for found in browsers for key, text in found.passages.items()},
        style=_asset("report.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _section(name: str, contents: RunContents, room: int) -> Mapping[str, Any]:
    """A run as the page shows it; `name` is an id that no other has."""
    tables = [arm_table(contents)] if contents.arms else []
    if contents.comparison is not None:
        title, sides = f"Paired comparison with {BASELINE}", (BASELINE, "arm")
        tables.append(comparison_table(contents.comparison, title, sides))
    return {
        "id": name,
        "name": contents.name,
        "labels": contents.labels,
        "subtitle": _subtitle(contents.manifest),
        "headline": headline(contents),
        "cautions": cautions(contents),
        "tables": [*tables, *decay_table(contents), *memory_table(contents)],
        "counts": count_table(contents),
        "decisions": list(decisions(contents)),
        "figures": list(run_figures(contents, name)),
        "browser": browse_answers(contents, room),
        "provenance": provenance_table(contents),
        "fingerprint": contents.manifest["fingerprint"],
    }


def _subtitle(manifest: Mapping[str, Any]) -> str:
    """What was run, on what, when."""
    model, workload, provenance = manifest["model"], manifest["workload"], manifest["provenance"]
    machine = " and ".join(sorted({gpu["name"] for gpu in provenance.get("gpus") or ()}))
    return (
        f"{workload['dataset']}, {workload['samples']} requests an arm, "
        f"{model['name']} ({model['weights']} weights), "
        f"{machine or provenance.get('cpu', {}).get('model', 'unknown processor')}, "
        f"{manifest['status']}, begun {manifest['began']}"
    )


def _overview(runs: Sequence[RunContents], settings: ReportSettings) -> Iterator[Labelled]:
    head = ("run", "arm", "requests", "score", "TTFT p50 ms", "blocks peak", "caution")
    rows = [
        [
            run.name,
            name,
            arm.summary.requests,
            with_interval(arm.summary.score.mean, arm.score_interval, "{:.3f}"),
            with_interval(arm.ttft_at(0.5).value, arm.ttft_at(0.5).interval, "{:,.1f}"),
            arm.summary.blocks.peak_referenced or None,
            "; ".join(run.labels) or NOTHING,
        ]
        for run in runs
        for name, arm in run.arms.items()
    ]
    yield Table("All runs", [Column(title, 0) for title in head], rows), ()
    first, *others = runs
    for other in others:
        yield _against(first, other, settings), sorted({*first.labels, *other.labels})


def _against(first: RunContents, other: RunContents, settings: ReportSettings) -> Table:
    """Arms of one name in two runs, or why these are not compared."""
    title = f"{other.name} against {first.name}"
    try:
        found = compare_runs(first.run, other.run, ComparisonSettings(margin=settings.margin))
    except (IncomparableRuns, ConfigError) as error:
        return Table(title, (), (), [f"Not compared: {error.message}"])
    return comparison_table(found, title)


def _asset(name: str) -> Markup:
    """A file of this package that goes into the page as it is."""
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))

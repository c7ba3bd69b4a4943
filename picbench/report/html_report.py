"""From run directories to one HTML file that needs neither a network nor files beside it."""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from picbench.comparison.run_comparison import ComparisonSettings, compare_runs
from picbench.errors import ConfigError, IncomparableRuns
from picbench.output.run_reader import read_run
from picbench.output.summary import BASELINE
from picbench.report.answer_browser import AnswerBrowser, browse_answers
from picbench.report.arm_charts import pareto_figure, trend_figure, ttft_figure
from picbench.report.cautions import cautions
from picbench.report.headline import Headline, headline
from picbench.report.html_table import NOTHING, HtmlTable, number, text, with_interval
from picbench.report.memory_chart import memory_figure
from picbench.report.plot import HtmlFigure
from picbench.report.run_contents import RunContents, read_contents
from picbench.report.section_tables import (
    arm_table,
    comparison_table,
    count_table,
    decay_table,
    decisions,
    memory_table,
    provenance_table,
)
from picbench.whole_files import write_whole

#: Characters for flipped answers, over all runs: with what else is there, a file below 5 MB.
_ROOM = 2_500_000

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """`margin` is the loss of score to judge, from 0 to 1."""

    margin: float = 0.02


@dataclass(frozen=True, slots=True)
class RunSection:
    """A run as the page shows it; `id` is unique in the page."""

    id: str
    name: str
    subtitle: str
    headline: Headline
    cautions: Sequence[str]
    tables: Sequence[HtmlTable]
    counts: HtmlTable | None
    decisions: Sequence[str]
    figures: Sequence[HtmlFigure]
    browser: AnswerBrowser | None
    provenance: HtmlTable
    fingerprint: str


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
    room = _ROOM // len(runs)
    sections = [_section(place, run, room) for place, run in enumerate(runs, 1)]
    browsers = [section.browser for section in sections if section.browser is not None]
    passages = {key: value for b in browsers for key, value in b.passages.items()}
    script = _asset("report.js")
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        title=" and ".join(section.name for section in sections[:3]),
        sections=sections,
        overview=list(_overview(runs, settings)) if len(runs) > 1 else [],
        passages=passages,
        style=_asset("report.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _section(place: int, contents: RunContents, room: int) -> RunSection:
    tables = [arm_table(contents)] if contents.arms else []
    if contents.comparison is not None:
        title = f"Paired comparison with {BASELINE}"
        sides = (BASELINE, "arm")
        tables.append(comparison_table(contents.comparison, title, contents.labels, sides))
    figures = (
        pareto_figure(contents),
        ttft_figure(contents),
        memory_figure(contents),
        trend_figure(contents),
    )
    more = (decay_table(contents), memory_table(contents))
    tables += [table for table in more if table is not None]
    return RunSection(
        id=f"run-{place}",
        name=contents.run.path.resolve().name,
        subtitle=_subtitle(contents.manifest),
        headline=headline(contents),
        cautions=cautions(contents),
        tables=tables,
        counts=count_table(contents),
        decisions=decisions(contents),
        figures=[figure for figure in figures if figure is not None],
        browser=browse_answers(contents, room),
        provenance=provenance_table(contents),
        fingerprint=contents.manifest["fingerprint"],
    )


def _subtitle(manifest: Mapping[str, Any]) -> str:
    """What was run, on what, when."""
    model, workload, provenance = manifest["model"], manifest["workload"], manifest["provenance"]
    gpus = provenance.get("gpus") or ()
    machine = " and ".join(sorted({gpu["name"] for gpu in gpus}))
    return ", ".join(
        (
            f"{workload['dataset']}, {workload['samples']} requests an arm",
            f"{model['name']} ({model['weights']} weights)",
            machine or str(provenance.get("cpu", {}).get("model", "unknown processor")),
            f"{manifest['status']}, begun {manifest['began']}",
        )
    )


def _overview(runs: Sequence[RunContents], settings: ReportSettings) -> Iterator[HtmlTable]:
    yield HtmlTable(
        "All runs",
        ("run", "arm", "requests", "score", "TTFT p50 ms", "blocks peak", "caution"),
        [
            [
                text(run.run.path.resolve().name),
                text(arm.name),
                number(arm.summary.requests, "{:,}"),
                with_interval(arm.summary.score.mean, arm.score_interval, "{:.3f}"),
                with_interval(arm.ttft_at(0.5).value, arm.ttft_at(0.5).interval, "{:,.1f}"),
                number(arm.summary.blocks.peak_referenced or None, "{:,.0f}"),
                text("; ".join(run.labels) or NOTHING),
            ]
            for run in runs
            for arm in run.arms.values()
        ],
    )
    first, *others = runs
    for other in others:
        yield _against(first, other, settings)


def _against(first: RunContents, other: RunContents, settings: ReportSettings) -> HtmlTable:
    """Arms of one name in two runs, or why these are not compared."""
    title = f"{other.run.path.resolve().name} against {first.run.path.resolve().name}"
    labels = sorted({*first.labels, *other.labels})
    try:
        found = compare_runs(first.run, other.run, ComparisonSettings(margin=settings.margin))
    except (IncomparableRuns, ConfigError) as error:
        return HtmlTable(title, (), (), [f"Not compared: {error.message}"], labels)
    return comparison_table(found, title, labels)


def _asset(name: str) -> Markup:
    """A file of this package that goes into the page as it is."""
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))

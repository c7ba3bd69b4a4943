"""The verdict on a run: one sentence, and whether it is good news."""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from picbench.compare.arm import SCORE, SCORE_OF_ALL, ArmComparison, MetricChange
from picbench.compare.comparison import ComparisonSettings, compare_runs
from picbench.compare.formats import drift_words
from picbench.compare.intervals import values_needed
from picbench.compare.significance import Loss
from picbench.errors import ConfigError, IncomparableRuns
from picbench.files import write_whole
from picbench.report.answers import AnswerBrowser, browse_answers
from picbench.report.charts import (
    HtmlFigure,
    memory_figure,
    pareto_figure,
    trend_figure,
    ttft_figure,
)
from picbench.report.contents import ArmFacts, RunContents, read_contents, unseen_loss
from picbench.report.sections import (
    NOTHING,
    HtmlTable,
    arm_table,
    comparison_table,
    count_table,
    decay_table,
    decisions,
    memory_table,
    number,
    provenance_table,
    ratio_ends,
    text,
    with_interval,
)
from picbench.run.result import late_kernels, slow_tiers
from picbench.store.reader import read_run
from picbench.store.summary import BASELINE
from picbench.tables.run import stalled, subject_of

#: How the page colours a verdict.
Tone = Literal["good", "bad", "open"]

_TONES: dict[Loss, Tone] = {Loss.WITHIN: "good", Loss.BEYOND: "bad"}


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict in words; `detail` is what it means for the margin that was asked for."""

    text: str
    detail: str
    tone: Tone


def headline(contents: RunContents) -> Headline:
    """What the run's main arm gains and loses against full, or why that cannot be said."""
    status = contents.manifest["status"]
    if status == "invalid":
        return Headline("Invalid run", f"{contents.manifest['reason'] or 'no reason given'}", "bad")
    comparison, name = contents.comparison, subject_of(contents.reusing())
    found = comparison.arms if comparison is not None else ()
    arm = next((arm for arm in found if arm.after == name), None)
    if comparison is None or arm is None:
        detail = contents.notes[0] if contents.notes else f"no arm reuses chunks beside {BASELINE}"
        return Headline("No comparison", detail, "open")
    text = f"{arm.after} against {BASELINE}: {', '.join(_parts(contents, arm))}"
    margin = comparison.settings.margin
    score = _score(arm)
    if not contents.meaningful or score is None or margin is None:
        return Headline(f"{text} (n={arm.pairs})", "Scores mean nothing here.", "open")
    loss, unseen = score.loss or Loss.UNKNOWN, unseen_loss(score)
    detail = {
        Loss.WITHIN: f"It loses less than {margin:g}, with 95 % confidence.",
        Loss.BEYOND: f"It loses more than {margin:g}, with 95 % confidence.",
        Loss.UNKNOWN: f"Whether it loses more than {margin:g} is open"
        + (f": about {score.needed:,} samples would decide." if score.needed else "."),
    }[loss]
    if score.before == 0:
        detail = f"{BASELINE} scores 0 on all of them, so there is no score to lose."
        return Headline(f"{text} (n={arm.pairs})", detail, "open")
    if unseen is not None:
        detail = f"No score differs, but a loss in {unseen:.0%} of samples may go unseen."
    return Headline(f"{text} (n={arm.pairs})", detail, _TONES.get(loss, "open"))


def _parts(contents: RunContents, arm: ArmComparison) -> Iterator[str]:
    ttft, score = arm.metric("ttft_ms"), _score(arm)
    if ttft is not None:
        found = ttft.change.interval
        ends = "" if found is None else f" ({ratio_ends(found)}{drift_words(ttft)})"
        yield f"first token in {ttft.change.value:.2f}x the time{ends}"
    peaks = arm.counter("peak_blocks")
    if peaks is not None and peaks.before:
        yield f"{peaks.after / peaks.before:.2f}x the blocks at peak"
    if score is not None and contents.meaningful:
        found = score.change.interval
        ends = "" if found is None else f" ({found.low:+.2f} to {found.high:+.2f})"
        yield f"{contents.metric} {score.change.value:+.2f}{ends}"


def _score(arm: ArmComparison) -> MetricChange | None:
    """Over all samples where some replies are unparsed: leaving these out flatters an arm."""
    return arm.metric(SCORE_OF_ALL) or arm.metric(SCORE)


#: Fewer requests than this have wide intervals.
_FEW = 30


def cautions(contents: RunContents) -> list[str]:
    """Warnings, the gravest first; none for a run with nothing against it."""
    return [
        *_status(contents),
        *_workload(contents),
        *_arms(contents),
        *contents.notes,
        *_sizes(contents),
        *_provenance(contents),
    ]


def _status(contents: RunContents) -> Iterator[str]:
    status, reason = contents.manifest["status"], contents.manifest["reason"]
    because = f": {reason}" if reason else ""
    if status == "invalid":
        yield f"The run is invalid{because}. Its numbers mean nothing."
    elif status == "partial":
        yield f"Requests failed{because}; means are over those that were answered."
    elif status != "complete":
        yield f"The run is {status}{because}; this is what it has so far."
    for name in contents.missing:
        yield f"The run has no {name}; what is read from it is left out."


def _workload(contents: RunContents) -> Iterator[str]:
    model, workload = contents.manifest["model"], contents.manifest["workload"]
    if not contents.meaningful:
        yield f"The model has {model['weights']} weights: scores and replies mean nothing."
    if workload["synthetic"]:
        yield "The rows are synthetic, not the data set's own."
    if contents.manifest["config"].get("drop"):
        yield "Prompts lack passages on purpose: full does not know them either."
    if workload["skipped_rows"]:
        first = workload["first_skipped"]
        yield f"{workload['skipped_rows']} malformed rows were left out, the first: {first}."
    if workload["truncated"]:
        yield f"{workload['truncated']} prompts were cut to fit the context."


def _arms(contents: RunContents) -> Iterator[str]:
    for arm in contents.arms.values():
        yield from _rows(arm)
    summaries = {name: arm.summary for name, arm in contents.arms.items()}
    for name, summary in summaries.items():
        if summary.provenance == "simulated":
            yield f"{name} is simulated: no engine computed anything, its numbers are a model's."
    for line in (*stalled(summaries), *slow_tiers(summaries), *late_kernels(summaries)):
        yield line.replace("`", "")
    for name, document in contents.manifest["arms"].items():
        for note in document["engine"].get("notes", ()):
            yield f"{name}: {note}"


def _rows(arm: ArmFacts) -> Iterator[str]:
    failed = [row.error for row in arm.rows if row.error is not None]
    if failed:
        count = f"{len(failed)} of {len(arm.rows)} requests"
        yield f"{arm.name}: {count} failed, the first: {failed[0]}"
    untimed = sum(row.error is None and not row.timed for row in arm.rows)
    if untimed:
        yield f"{arm.name}: {untimed} requests were answered but not timed."
    unparsed = arm.summary.outcomes.get("unparsed", 0)
    if unparsed:
        yield f"{arm.name}: nothing to score in {unparsed} replies, which count as 0."


def _sizes(contents: RunContents) -> Iterator[str]:
    counts = [len(arm.ttft) for arm in contents.arms.values()]
    fewest = min(counts, default=0)
    if not counts:
        yield "No request was answered."
        return
    if fewest < _FEW:
        yield f"Only {fewest} timed requests an arm: intervals are wide."
    needed = values_needed(0.99)
    if fewest < needed:
        yield f"p99 is not given: it needs {needed} timed requests, an arm has {fewest}."


def _provenance(contents: RunContents) -> Iterator[str]:
    if (contents.manifest["provenance"].get("git") or {}).get("dirty"):
        yield "The code had changes that are in no commit."
    attempts = contents.manifest["attempts"]
    if len(attempts) > 1:
        changed = sum(attempt["changed_outputs"] for attempt in attempts)
        again = f"; {changed} replies were other ones when served again" if changed else ""
        yield f"The run was continued {len(attempts) - 1} times{again}."


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

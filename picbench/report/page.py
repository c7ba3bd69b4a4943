"""The page: runs as one HTML file that needs no network, with the figures of their directories."""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from picbench.compare.comparison import compare_runs
from picbench.engines.config import BLOCK_SIZE
from picbench.errors import ConfigError, IncomparableRuns
from picbench.files import whole_file
from picbench.report import sections as parts
from picbench.report.contents import RunContents, cautions, headline, read_contents
from picbench.settings import ComparisonSettings
from picbench.store.reader import Run, read_run
from picbench.store.summary import BASELINE
from picbench.store.writer import FINAL
from picbench.tables.metrics import METRICS, SCORE
from picbench.tables.table import NOTHING, Column, Table, number_of

#: Characters for flipped answers, over all runs: with what else is there, a file below 5 MB.
_ROOM = 2_500_000

_TEMPLATES = Path(__file__).parent / "templates"

#: Elements that a figure may have in a page, and attributes that it may not.
_ELEMENTS = {"svg", "g", "path", "use", "text", "tspan", "defs"}
_LEFT_OUT = re.compile("width|height|version|clip-path|on.*")

#: What a hatch becomes.
_TINT = "fill: #888888; fill-opacity: 0.3"


def write_report(paths: Sequence[Path], output: Path, margin: float) -> None:
    """Write one file about the runs in `paths`; readers find the old file or the new one.

    Raises ConfigError for what is no run and for an `output` that cannot be written, InvalidRun for
    runs of an unknown schema.
    """
    page = report_page(paths, margin)
    try:
        with whole_file(output) as file:
            file.write(page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ConfigError(
            f"`output` {output}: cannot be written: {error.strerror}", hint="name another file"
        ) from error


def report_page(paths: Sequence[Path], margin: float) -> str:
    """The page; an overview comes first where there are several runs.

    `margin` is the loss of score to judge, from 0 to 1.
    """
    runs = [read_contents(read_run(path), margin) for path in paths]
    sections = [_section(f"run-{n}", run, _ROOM // len(runs)) for n, run in enumerate(runs, 1)]
    browsers = [section["browser"] for section in sections if section["browser"] is not None]
    browsed = [sample for browser in browsers for sample in browser.samples]
    style, script = (
        Markup((_TEMPLATES / f"report.{kind}").read_text("utf-8")) for kind in ("css", "js")
    )
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
        overview=list(_overview(runs, margin)) if len(runs) > 1 else [],
        passages={key: text for sample in browsed for key, text in sample.passages.items()},
        style=style,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _section(name: str, contents: RunContents, room: int) -> Mapping[str, Any]:
    """A run as the page shows it; `name` is an id that no other has."""
    manifest, tables = contents.manifest, [parts.arm_table(contents)] if contents.arms else []
    if contents.comparison is not None:
        title, sides = f"Paired comparison with {BASELINE}", (BASELINE, "arm")
        tables.append(parts.comparison_table(contents.comparison, title, sides))
    model, workload, provenance = manifest["model"], manifest["workload"], manifest["provenance"]
    machine = " and ".join(sorted({gpu["name"] for gpu in provenance.get("gpus") or ()}))
    fields = [*parts.flattened(manifest)]
    return {
        "id": name,
        "name": contents.name,
        "labels": contents.labels,
        "subtitle": f"{workload['dataset']}, {workload['samples']} requests an arm, "
        f"{model['name']} ({model['weights']} weights), "
        f"{machine or provenance.get('cpu', {}).get('model', 'unknown processor')}, "
        f"{manifest['status']}, begun {manifest['began']}",
        "headline": headline(contents),
        "cautions": list(cautions(contents)),
        "tables": [*tables, *parts.decay_table(contents), *parts.memory_table(contents)],
        "counts": parts.count_table(contents),
        "decisions": list(parts.decisions(contents)),
        "figures": list(_figures(contents, name)),
        "browser": parts.browse_answers(contents, room),
        "provenance": Table("manifest.json", [Column("field"), Column("value")], fields),
        "fingerprint": manifest["fingerprint"],
    }


def _overview(runs: Sequence[RunContents], margin: float) -> Iterator[tuple[Table, Sequence[str]]]:
    """All arms, and the first run against the others, with what stands beside all numbers."""
    shown = [METRICS[name].title for name in (SCORE, "ttft_p50_ms", "peak_blocks")]
    head = ("run", "arm", "requests", *shown, "caution")
    rows = [
        [
            run.name,
            name,
            arm.summary.requests,
            parts.with_interval(arm.summary.score.mean, arm.score_interval(), "{:.3f}"),
            parts.with_interval(arm.ttft_at(0.5).value, arm.ttft_at(0.5).interval, "{:,.1f}"),
            arm.summary.blocks.peak_referenced or None,
            "; ".join(run.labels) or NOTHING,
        ]
        for run in runs
        for name, arm in run.arms.items()
    ]
    yield Table("All runs", [Column(title, 0) for title in head], rows), ()
    first, *others = runs
    for other in others:
        title = f"{other.name} against {first.name}"
        try:
            found = compare_runs(first.run, other.run, ComparisonSettings(margin=margin))
            table = parts.comparison_table(found, title)
        except (IncomparableRuns, ConfigError) as error:
            table = Table(title, (), (), [f"Not compared: {error.message}"])
        yield table, sorted({*first.labels, *other.labels})


def _figures(contents: RunContents, name: str) -> Iterator[Mapping[str, str]]:
    """The figures that a run has something for; ids in them begin with `name`."""
    counts = sorted({arm.timed for arm in contents.arms.values() if arm.timed})
    count = " to ".join(map(str, dict.fromkeys([*counts[:1], *counts[-1:]])))
    wait, score = METRICS["ttft_p50_ms"].value, METRICS[SCORE].value
    known = [(arm, wait(found), score(found)) for arm, found in contents.summaries.items()]
    best = frontier({arm: (x, y) for arm, x, y in known if x and y is not None})
    figures = {
        "accuracy": (
            "Score against time to the first token",
            f"Up and to the left is better. No other arm beats {', '.join(best)}.",
        ),
        "ttft": (
            "Distribution of time to the first token",
            f"Further left is faster; {count} requests an arm.",
        ),
        "memory": (
            "KV blocks over time",
            f"Blocks of {BLOCK_SIZE} tokens, on each arm's own clock. "
            "Of many steps, those with most in use are drawn.",
        ),
        "trend": (
            "Trend over requests",
            "Geometric means (TTFT) and means (reuse) of neighbouring requests.",
        ),
    }
    for file, (title, caption) in figures.items():
        svg = _drawn(contents.run, file)
        if svg is not None:
            element = _inlined(svg, f"{name}-{file}-", title)
            yield {"title": title, "svg": element, "caption": caption}


def _drawn(run: Run, name: str) -> bytes | None:
    """What a run that ended has drawn, or would draw by now; None if there is too little of it."""
    kept = run.path / f"{name}.svg"
    if run.manifest["status"] in FINAL and kept.exists():
        return kept.read_bytes()
    from picbench.figures.run import draw_run  # With matplotlib and pandas.

    with TemporaryDirectory() as folder:
        try:
            draw_run(run, name, Path(folder))
        except (ConfigError, ModuleNotFoundError):  # A page without pictures is a page.
            return None
        file = Path(folder, kept.name)
        return file.read_bytes() if file.exists() else None


def _inlined(svg: bytes, prefix: str, title: str) -> Markup:
    """A drawn SVG as an element of a page: it loads nothing, and its ids begin with `prefix`.

    Lines are drawn to a tenth of a point. Nothing is clipped or hatched, as that takes addresses.
    """
    root = ElementTree.fromstring(svg)
    for element in [*root.iter()]:
        for child in [*element]:
            if child.tag.rpartition("}")[2] not in _ELEMENTS:
                element.remove(child)
        element.tag = element.tag.rpartition("}")[2]
        given = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        for key, value in given.items():
            if key in ("id", "href"):
                element.set(key, "#"[key == "id" :] + prefix + value.removeprefix("#"))
            elif not _LEFT_OUT.fullmatch(key):
                rounded = re.sub(r"(\d\.\d)\d+", r"\1", value) if key == "d" else value
                element.set(key, re.sub(r"fill: url\([^)]*\)", _TINT, rounded))
    root.attrib |= {"class": "plot", "role": "img", "aria-label": title}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def frontier(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The arms that no other beats in time (less is better) and score, the fastest first.

    An arm beats another if it is as good in both and better in one; equal ones stay both.
    """
    kept = [
        arm
        for arm, (time, score) in points.items()
        if not any(t <= time and s >= score and (t, s) != (time, score) for t, s in points.values())
    ]
    return sorted(kept, key=lambda arm: points[arm])

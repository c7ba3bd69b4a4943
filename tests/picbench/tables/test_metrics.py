"""A metric is listed once; tables, status lines and documents take it from there."""

from dataclasses import replace
from pathlib import Path

import pytest
from harness_fakes import Harness, make_sample, run_fakes

from picbench.run.result import headline
from picbench.store.reader import Run, read_run
from picbench.tables import metrics
from picbench.tables.metrics import (
    METRICS,
    Metric,
    Pairing,
    metrics_paired,
    metrics_shown,
    metrics_table,
)
from picbench.tables.run import as_markdown

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    harness = Harness([make_sample(n) for n in range(3)])
    return read_run(run_fakes(harness, tmp_path_factory.mktemp("run") / "run", "full", "mepic"))


def test_the_document_has_every_metric() -> None:
    assert metrics_table() in DOCUMENT.read_text(), (
        "paste what python -m picbench.tables.metrics prints"
    )


def test_values_are_those_of_the_summary_and_of_rows(run: Run) -> None:
    arm, row = run.summary["mepic"], run.rows[0]
    assert arm.ttft_ms is not None and arm.ttft_vs_full is not None
    values = {name: metric.value(arm) for name, metric in METRICS.items()}
    assert values["ttft_p99_ms"] == arm.ttft_ms.p99
    assert values["ttft_vs_full"] == arm.ttft_vs_full.geomean
    assert values["peak_pct"] == 100 * arm.blocks.peak_referenced / arm.blocks.pool
    assert values["computed_pct"] == 100 * (arm.tokens.computed or 0) / arm.tokens.prompt
    parts = [values[name] for name in ("reused_pct", "compiled_pct", "computed_pct")]
    assert sum(part or 0 for part in parts) == pytest.approx(100)
    assert values["makespan_s"] is None
    rows = {name: metric.of_row(row) for name, metric in METRICS.items() if metric.of_row}
    assert (rows["ttft_ms"], rows["reused_tokens"]) == (row.ttft_ms, row.tokens.reused)
    assert rows["tier_blocks"] == sum(row.hits.tiers.values())


def test_a_metric_that_is_added_is_in_table_status_line_and_document(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = replace(METRICS["ttft_p99_ms"], shown=("closed", "open", "status"))
    monkeypatch.setattr(metrics, "METRICS", {**METRICS, added.name: added})
    assert "| TTFT p99 ms |" in as_markdown([run])
    arm = run.summary["mepic"]
    assert headline(arm)["ttft_p99_ms"] == added.value(arm)
    assert added in metrics_paired(Pairing.QUANTILE)
    assert f"| `{added.name}` | TTFT p99 ms | lower | quantile |" in metrics_table()


def test_what_no_arm_has_is_not_shown(run: Run) -> None:
    arm = replace(run.summary["mepic"], memory=None, outcomes={"abstained": 1})
    table = [metric.name for metric in metrics_shown([arm])]
    assert not {"makespan_s", "goodput_req_s", "peak_gib", "ttft_p95_ms"} & {*table}
    report = [metric.name for metric in metrics_shown([arm], "report")]
    assert "abstained" in report and "unparsed" not in report
    open_loop = replace(arm, makespan_s=2.0, goodput_req_s=0.0)
    table = [metric.name for metric in metrics_shown([open_loop])]
    assert {"makespan_s", "goodput_req_s", "ttft_p95_ms"} <= {*table}
    assert "ttft_p90_ms" not in table


def test_texts_say_what_a_number_does_not(run: Run) -> None:
    arm = replace(run.summary["mepic"], failed=1)
    assert METRICS["answered"].text(arm) == "2/3"
    assert METRICS["score"].text(arm) == "1.000*"
    assert METRICS["score"].known(arm) is None, "weights are random"
    assert METRICS["ttft_vs_full"].text(arm) == "0.25x"
    assert METRICS["goodput_req_s"].text(arm) is None


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_metrics_are_whole(metric: Metric) -> None:
    """What is shown has a value of arms; what is paired by samples has one of rows, or a base."""
    assert metric.of_arm or not metric.shown
    if metric.pairing in (Pairing.DIFFERENCE, Pairing.RATIO):
        assert metric.of_row or metric.over_full
    if metric.pairing in (Pairing.WHOLE, Pairing.QUANTILE):
        assert metric.of_arm and metric.better
    assert metric.base is None or METRICS[metric.base].of_row

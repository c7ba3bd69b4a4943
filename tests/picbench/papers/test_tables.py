"""Means over seeds, series over time, and tables as files."""

import json
from pathlib import Path

import numpy as np
import pytest
from harness_fakes import make_snapshot
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.ledger import KINDS, summarise
from picbench.papers.data import ExperimentData, PointData, SeedSpread, mean_value, report_table
from picbench.papers.page import workload_table
from picbench.papers.settings import Published
from picbench.store.reader import HELD, Series, read_series
from picbench.store.writer import RunDirectory
from picbench.tables.table import Shown

EXACT = st.integers(0, 16 * 50).map(lambda slots: slots / 16)


def test_spread_by_hand() -> None:
    assert SeedSpread.of([1.0, None, 3.0]).value() == Shown(
        "2.00 ± 1.41", 2.0, pytest.approx(2**0.5)
    )
    assert SeedSpread.of([5.0]).value(1) == Shown("5.0", 5.0)
    assert SeedSpread.of([None]).value() is None
    assert SeedSpread.of([]).mean is None


def test_means_are_numbers_in_files_and_text_for_readers(tmp_path: Path) -> None:
    cells = [mean_value(1234.5678, 0.25, 1), mean_value(2.0), None]
    report_table("t", "T", ("arm", "time s"), list(zip("abc", cells, strict=True))).write(tmp_path)
    assert (tmp_path / "t.csv").read_text().splitlines() == [
        "arm,time s,time s sd",
        "a,1234.5678,0.25",
        "b,2.0,",
        "c,,",
    ]
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert rows[0] == {"arm": "a", "time s": 1234.5678, "time s sd": 0.25}
    assert rows[2] == {"arm": "c", "time s": None, "time s sd": None}
    lines = (tmp_path / "t.md").read_text().splitlines()
    assert lines[4:7] == ["| a | 1,234.6 ± 0.2 |", "| b | 2.00 |", "| c | - |"]


@pytest.mark.parametrize(
    ("tokens", "reuse", "like"),
    [
        ((1000, 2100), 0.52, "of about the same length and reuse"),
        ((1000, 2100), 0.6, "of about the same length but with reuse up to 10 points from its"),
        ((1500, 3000), 0.5, "of about the same reuse, but of 1.5 times its length"),
        ((1000, 3000), 0.5, "of about the same reuse, but of 1.0 to 1.5 times its length"),
        ((500, 2000), 0.48, "of about the same reuse, but of 0.5 to 1.0 times its length"),
        (
            (500, 2000),
            0.4,
            "of 0.5 to 1.0 times its length and with reuse up to 10 points from its",
        ),
    ],
)
def test_workloads_that_are_unlike_the_papers_say_so(
    tokens: tuple[int, int], reuse: float, like: str
) -> None:
    rows = {
        "short": {"tokens": 1000, "reuse_pct": 50.0},
        "long": {"tokens": 2000, "reuse_pct": 50.0},
    }
    published = Published("a paper", "a machine", "a model", {"table1": {"rows": rows}})
    facts = {"requests": 3, "reuse": reuse, "fresh_tokens": 10}
    points = tuple(
        PointData(label, 1, facts | {"mean_tokens": size}, {})
        for label, size in zip(("short", "long", "ours"), (*tokens, 7), strict=True)
    )
    data = ExperimentData("mepic", "workloads", "cuda", "workload", {}, points)
    table = workload_table(data, published)
    assert table.name == "table1-cuda"
    assert f"synthetic rows {like}." in table.notes[0]


def test_series_are_what_the_run_wrote(tmp_path: Path) -> None:
    snapshots = [make_snapshot(0, 0.0, 10), make_snapshot(1, 0.5, 25), make_snapshot(2, 1.0, 5)]
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_memory({"mepic": snapshots, "full": snapshots[:1]})
    series = read_series(tmp_path / "run" / "memory.parquet")
    assert list(series) == ["mepic", "full"]
    assert list(series["mepic"].time) == [0.0, 0.5, 1.0]
    assert list(series["mepic"].referenced) == [10, 25, 5]
    assert max(series["mepic"].resident) == summarise(snapshots).peak_resident
    assert series["mepic"].at_peak() == dict.fromkeys(HELD, 0.0) | {"prompt": 25.0}


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(HELD, EXACT)), min_size=1, max_size=9))
def test_kinds_at_the_peak_sum_to_the_peak_exactly(steps: list[dict[str, float]]) -> None:
    pool = 16 * 50 * len(HELD)
    blocks = {kind: np.array([step.get(kind, 0.0) for step in steps]) for kind in KINDS}
    blocks["free"] = pool - sum(blocks[kind] for kind in HELD)
    series = Series(np.arange(len(steps), dtype=np.float64), blocks, pool)
    assert sum(series.at_peak().values()) == max(sum(step.values()) for step in steps)


def test_a_sheet_is_written_three_ways(tmp_path: Path) -> None:
    sheet = report_table("t", "A title", ("a", "b"), [["x", 1234.5], [None, 2.0]], ("A note.",))
    sheet.write(tmp_path / "new")
    assert (tmp_path / "new" / "t.md").read_text() == (
        "### A title\n\n| a | b |\n| --- | --- |\n| x | 1,234.50 |\n| - | 2 |\n\nA note.\n"
    )
    assert (tmp_path / "new" / "t.csv").read_text().splitlines() == ["a,b", "x,1234.5", ",2.0"]
    content = json.loads((tmp_path / "new" / "t.json").read_text())
    assert content["rows"] == [{"a": "x", "b": 1234.5}, {"a": None, "b": 2.0}]
    with pytest.raises(ValueError):
        report_table("t", "", ("a",), [["x", "y"]]).write(tmp_path)

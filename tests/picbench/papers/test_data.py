"""Data of experiments: means, tables as files, and what a load is expected to take."""

import json
from pathlib import Path

import pytest

from picbench.papers.data import (
    ExperimentData,
    PointArm,
    PointData,
    mean_value,
    report_table,
    spread,
)
from picbench.tables.table import Shown


@pytest.mark.parametrize(
    ("seeds", "expected"), [((3, 3), "3"), ((3, 2), "2 to 3"), ((1,), "1"), ((1, 3, 2), "1 to 3")]
)
def test_points_with_fewer_seeds_are_not_said_to_have_all(
    seeds: tuple[int, ...], expected: str
) -> None:
    points = [
        PointData(str(label), seed, {}, {"naive": PointArm({"x": 1.0})})
        for label, count in enumerate(seeds)
        for seed in range(count)
    ]
    assert ExperimentData("mepic", "e", "cpu", "x", {}, points).repeated == expected


def test_spread_by_hand() -> None:
    assert spread([1.0, None, 3.0]) == Shown("2.00 ± 1.41", 2.0, pytest.approx(2**0.5))
    assert spread([5.0], 1) == Shown("5.0", 5.0)
    assert spread([None]) is None


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

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


def test_tables_have_numbers_in_files_and_text_for_readers(tmp_path: Path) -> None:
    cells = [mean_value(1234.5678, 0.25, 1), 2.0, None]
    rows = list(zip("abc", cells, strict=True))
    report_table("t", "A title", ("arm", "time s"), rows, ["A note."]).write(tmp_path / "new")
    csv, markdown = ((tmp_path / "new" / f"t.{kind}").read_text() for kind in ("csv", "md"))
    assert csv.splitlines() == ["arm,time s,time s sd", "a,1234.5678,0.25", "b,2.0,", "c,,"]
    assert markdown == (
        "### A title\n\n| arm | time s |\n| --- | --- |\n| a | 1,234.6 ± 0.2 |\n| b | 2 |\n"
        "| c | - |\n\nA note.\n"
    )
    assert json.loads((tmp_path / "new" / "t.json").read_text())["rows"] == [
        {"arm": "a", "time s": 1234.5678, "time s sd": 0.25},
        {"arm": "b", "time s": 2.0, "time s sd": None},
        {"arm": "c", "time s": None, "time s sd": None},
    ]
    with pytest.raises(ValueError):
        report_table("t", "", ("a",), [["x", "y"]]).write(tmp_path)

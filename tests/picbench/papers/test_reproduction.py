"""A paper from its settings to its page; only the engines are fakes."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from paper_bench import LEDGERS, Bench

from picbench.cli import main


def reproduce(bench: Bench, settings: Path, output: Path, *flags: str) -> Result:
    where = ("--settings", str(settings), "--output", str(output))
    arguments = ("reproduce", "mepic", *where, *flags)
    return CliRunner().invoke(main, arguments, obj=bench.services())


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_one_command_makes_every_table_and_figure(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    result = reproduce(bench, settings_file, output)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(output / "README.md")
    for name in ("fig6", "fig6-kinds", "fig7", "fig8"):
        assert (output / f"{name}.svg").stat().st_size > 1000
        assert (output / f"{name}.png").stat().st_size > 1000
    for name in ("table1", "table2", "table2-ratio", "table2-difference", "fig7", "fig8-ratio"):
        for suffix in ("md", "csv", "json"):
            assert (output / f"{name}.{suffix}").exists()
    page = (output / "README.md").read_text()
    assert "testbed model, synthetic rows" in page
    assert "Ascend 910B" in page
    assert bench.order.count("launch mepic") == 1
    assert bench.runs == 3 * 2 * 2


def test_printed_values_stand_beside_ours(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    reproduce(bench, settings_file, tmp_path / "out", "--figure", "table2", "--figure", "table1")
    squad = [row for row in rows(tmp_path / "out" / "table2.csv") if row["workload"] == "squad"]
    mepic, epic = squad
    assert (mepic["peak % (paper)"], mepic["peak % (paper) sd"]) == ("27.67", "0.05")
    assert (epic["peak % (paper)"], epic["peak % (paper) sd"]) == ("54.13", "0.21")
    assert mepic["peak referenced % (ours)"] == "8.0"
    assert epic["peak referenced % (ours)"] == "40.0"
    assert "| 27.67 ± 0.05 |" in (tmp_path / "out" / "table2.md").read_text()
    ours = [row for row in rows(tmp_path / "out" / "table2.csv") if row["workload"] == "ours"]
    assert {row["peak % (paper)"] for row in ours} == {""}
    table1 = rows(tmp_path / "out" / "table1.csv")
    assert (table1[0]["tokens (paper)"], table1[0]["reuse % (paper)"]) == ("2224", "84.9")
    assert (table1[0]["tokens (ours)"], table1[0]["tokens (ours) sd"]) == ("88.0", "0.0")


def test_the_ledger_explains_the_difference(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    reproduce(bench, settings_file, tmp_path / "out", "--figure", "fig8")
    [first, *_] = rows(tmp_path / "out" / "fig8-ratio.csv")
    assert (first["mepic, blocks"], first["epic:k=16, blocks"]) == ("8.0", "40.0")
    assert (first["ratio"], first["lowest"], first["seeds"]) == ("5.0", "5.0", "2")
    [epic, mepic, less, *_] = rows(tmp_path / "out" / "fig8-difference.csv")
    assert less["arm"] == "difference"
    kinds = [name for name in less if name not in ("chunks per request", "seed", "arm", "sum")]
    for kind in [*kinds, "sum"]:
        assert float(less[kind]) == float(epic[kind]) - float(mepic[kind])
    assert sum(float(less[kind]) for kind in kinds) == float(less["sum"]) == 32


def test_complete_points_are_not_measured_again(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert reproduce(bench, settings_file, output, "--figure", "fig8").exit_code == 0
    again = Bench()
    assert reproduce(again, settings_file, output, "--figure", "fig8").exit_code == 0
    assert again.order == []


def test_a_point_that_was_stopped_goes_on(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    """The second arm of the last point is interrupted: the first one is not measured again."""
    output = tmp_path / "out"
    stopped = Bench(stops_at=7)
    assert reproduce(stopped, settings_file, output, "--figure", "fig8").exit_code == 130
    manifest = output / "runs" / "chunks-4-seed2" / "manifest.json"
    assert json.loads(manifest.read_text())["status"] == "interrupted"
    kept = (manifest.parent / "samples.jsonl").read_text()
    (served,) = {json.loads(line)["arm"] for line in kept.splitlines()}

    again = Bench()
    result = reproduce(again, settings_file, output, "--figure", "fig8")
    assert result.exit_code == 0, result.stderr
    assert "chunks-4-seed2: going on after 3 of 6 requests" in result.stderr
    assert {arm: again.order.count(arm) for arm in LEDGERS} == {
        arm: int(arm != served) for arm in LEDGERS
    }
    assert (manifest.parent / "samples.jsonl").read_text().startswith(kept)
    done = json.loads(manifest.read_text())
    assert [attempt["done"] for attempt in done["attempts"]] == [0, 3]
    assert done["status"] == "complete"

    whole = tmp_path / "whole"
    assert reproduce(bench, settings_file, whole, "--figure", "fig8").exit_code == 0
    assert rows(output / "fig8-ratio.csv") == rows(whole / "fig8-ratio.csv")


def test_a_point_that_began_with_other_code_is_measured_anew(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert reproduce(bench, settings_file, output, "--figure", "fig8").exit_code == 0
    path = output / "runs" / "chunks-4-seed2" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["provenance"]["packages"]["numpy"] = "0.1"
    path.write_text(json.dumps(manifest | {"status": "running"}))
    again = Bench()
    assert reproduce(again, settings_file, output, "--figure", "fig8").exit_code == 0
    assert again.runs == 1
    assert json.loads(path.read_text())["status"] == "complete"


def test_an_engine_that_dies_keeps_what_was_complete(settings_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    broken = Bench(dies_at=3)
    result = reproduce(broken, settings_file, output, "--figure", "fig8")
    assert result.exit_code == 4
    assert "requests failed" in result.stderr
    mended = Bench()
    assert reproduce(mended, settings_file, output, "--figure", "fig8").exit_code == 0
    assert mended.runs == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_blocks": 200}, "a run with other settings"),
        ({"seeds": []}, "seeds"),
        ({"subject": "naive"}, "the subject 'naive' is none of the arms"),
        ({"common": {"zipf": -1.0, "requests": 3}}, "zipf -1.0 is not possible"),
        ({"common": {"colour": 1}}, "colour 1: extra inputs are not permitted"),
        ({"published": "none.json"}, "none.json: cannot be read"),
    ],
)
def test_what_is_wrong_is_said_before_an_engine_starts(
    bench: Bench, settings_file: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    output = tmp_path / "out"
    assert (
        reproduce(bench, settings_file, output, "--figure", "fig8", "--seeds", "1").exit_code == 0
    )
    settings_file.write_text(yaml.safe_dump(yaml.safe_load(settings_file.read_text()) | change))
    again = Bench()
    result = reproduce(again, settings_file, output, "--figure", "fig8", "--seeds", "1")
    assert result.exit_code == 2
    assert said in result.stderr
    assert again.order == []

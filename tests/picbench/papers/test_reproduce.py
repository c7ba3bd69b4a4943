"""A paper from its settings to its page; only the engines are fakes."""

import csv
import json
import re
import shutil
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from paper_bench import LEDGERS, Bench

from picbench.cli import main
from picbench.papers.page import write_page
from picbench.papers.reproduce import expected_arm
from picbench.papers.settings import read_settings
from picbench.workloads.traffic.traffic_facts import TrafficFacts


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
    for name in ("table2-memory-cpu", "fig6-cpu", "fig8-cpu"):
        for suffix in ("svg", "png", "pdf"):
            assert (output / f"{name}.{suffix}").stat().st_size > 1000
    for name in ("table1-cpu", "table2-cpu", "cpu-workloads-kinds", "cpu-chunks", "places"):
        for suffix in ("md", "csv", "json"):
            assert (output / f"{name}.{suffix}").exists()
    page = (output / "README.md").read_text()
    assert "testbed weights, synthetic rows" in page
    assert "Ascend 910B" in page
    assert "squad-like" in page
    assert bench.order.count("launch mepic") == 1
    assert bench.runs == bench.order.count("reset mepic") == 2 * 2 * 2


def test_printed_values_stand_beside_ours(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    reproduce(bench, settings_file, tmp_path / "out", "--figure", "table2", "--figure", "table1")
    found = rows(tmp_path / "out" / "table2-cpu.csv")
    mepic, epic = (row for row in found if row["workload"] == "squad-like")
    assert (mepic["peak % (paper)"], mepic["peak % (paper) sd"]) == ("27.67", "0.05")
    assert (epic["peak % (paper)"], epic["peak % (paper) sd"]) == ("54.13", "0.21")
    assert mepic["peak referenced % (ours)"] == "8.0"
    assert epic["peak referenced % (ours)"] == "40.0"
    assert "| 27.67 ± 0.05 |" in (tmp_path / "out" / "table2-cpu.md").read_text()
    assert {row["peak % (paper)"] for row in found if row["workload"] == "ours-like"} == {""}
    table1 = rows(tmp_path / "out" / "table1-cpu.csv")
    assert (table1[0]["tokens (paper)"], table1[0]["reuse % (paper)"]) == ("2224", "84.9")
    assert (table1[0]["tokens (ours)"], table1[0]["tokens (ours) sd"]) == ("88.0", "0.0")


def test_claims_are_judged_by_what_was_measured(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    reproduce(bench, settings_file, output, "--figure", "fig8")
    verdicts = json.loads((output / "verdicts.json").read_text())
    assert [one["verdict"] for one in verdicts] == ["holds", "fails", "undecided", "undecided"]
    assert set(verdicts[0]) == {
        *("claim", "source", "published", "ours", "interval", "verdict", "why", "run")
    }
    assert verdicts[0]["ours"] == "5 (2: epic:k=16 over mepic)"
    assert verdicts[0]["interval"] == [5.0, 5.0]
    assert "data/cpu-chunks.json" in verdicts[0]["run"]
    assert verdicts[2]["ours"] is None
    assert "nothing draws them" in verdicts[3]["why"]


def test_kinds_of_blocks_sum_to_the_peak(bench: Bench, settings_file: Path, tmp_path: Path) -> None:
    reproduce(bench, settings_file, tmp_path / "out", "--figure", "table2")
    [mepic, epic, *_] = rows(tmp_path / "out" / "cpu-workloads-kinds.csv")
    kinds = [name for name in mepic if name not in ("workload", "seed", "arm", "sum")]
    assert sum(float(mepic[kind]) for kind in kinds) == float(mepic["sum"]) == 8
    assert sum(float(epic[kind]) for kind in kinds) == float(epic["sum"]) == 40


def test_redrawing_needs_no_run(bench: Bench, settings_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    reproduce(bench, settings_file, output)
    verdicts = (output / "verdicts.json").read_bytes()
    page = (output / "README.md").read_bytes()
    kept = tmp_path / "kept"
    shutil.copytree(output / "data", kept / "data")
    write_page("mepic", read_settings("mepic", settings_file), kept, None)
    assert (kept / "verdicts.json").read_bytes() == verdicts
    assert (kept / "README.md").read_bytes() == page


def test_a_dry_run_counts_what_is_left(bench: Bench, settings_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert reproduce(bench, settings_file, output, "--figure", "fig8").exit_code == 0
    again = Bench()
    result = reproduce(again, settings_file, output, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("dry run: no engine was started, nothing was written")
    assert "0 of 4 runs" in result.stdout
    assert "4 of 4 runs" in result.stdout
    assert again.order == []


def test_a_dry_run_says_what_the_run_would_refuse(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert reproduce(bench, settings_file, output, "--figure", "fig8").exit_code == 0
    settings_file.write_text(settings_file.read_text().replace("pool: 8", "pool: 9"))
    refused = [
        reproduce(Bench(), settings_file, output, "--figure", "fig8", *dry)
        for dry in ([], ["--dry-run"])
    ]
    assert [result.exit_code for result in refused] == [2, 2]
    assert "cpu-chunks-2-seed1.json: a run with other settings" in refused[1].stderr
    assert refused[0].stderr == refused[1].stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_recurs_takes_less_time_than_what_is_new(device: str) -> None:
    facts = TrafficFacts(
        requests=10,
        users=1,
        mean_tokens=1000.0,
        mean_chunks=10.0,
        mean_chunk_tokens=100.0,
        unique_chunks=10,
        reuse=0.0,
        fresh_tokens=100.0,
        cached=0.0,
        top_chunk=0.1,
        rate=None,
    )
    new, known = (replace(facts, fresh_tokens=fresh) for fresh in (1000.0, 100.0))
    for arm in ("mepic", "epic:k=16", "cacheblend:r=0.15", "naive"):
        assert expected_arm(arm, known, device) < expected_arm(arm, new, device)
    assert expected_arm("prefix", known, device) == expected_arm("prefix", new, device)
    late = replace(known, rate=0.1)
    assert expected_arm("naive", late, device) == 100.0


@pytest.mark.parametrize("removed", [(), ("runs",)])
def test_complete_points_are_not_measured_again(
    bench: Bench, settings_file: Path, tmp_path: Path, removed: tuple[str, ...]
) -> None:
    """Also where their run directories are gone."""
    output = tmp_path / "out"
    assert reproduce(bench, settings_file, output, "--figure", "fig8").exit_code == 0
    data = (output / "data" / "cpu-chunks.json").read_bytes()
    for folder in removed:
        shutil.rmtree(output / folder)
    again = Bench()
    assert reproduce(again, settings_file, output, "--figure", "fig8").exit_code == 0
    assert again.order == []
    assert (output / "data" / "cpu-chunks.json").read_bytes() == data


def test_nothing_is_begun_that_would_end_too_late(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    result = reproduce(bench, settings_file, output, "--figure", "fig8", "--seconds", "1")
    assert result.exit_code == 0, result.stderr
    assert bench.order == []
    assert "time is over" in result.stderr
    assert "4 of 4 runs" in result.stdout
    assert (output / "README.md").exists()


def test_on_a_gpu_arms_take_turns_on_one_engine(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    content = yaml.safe_load(settings_file.read_text())
    for load in content["loads"].values():
        load["cuda"] = load["cpu"]
        load["cuda"]["common"]["cached"] = 1.0
    settings_file.write_text(yaml.safe_dump(content, sort_keys=False))
    output = tmp_path / "out"
    result = reproduce(bench, settings_file, output, "--device", "cuda")
    assert result.exit_code == 0, result.stderr
    assert [call for call in bench.order if call.startswith("launch")] == ["launch picbench"]
    served = [call for call in bench.order if call in ("picbench", "reset picbench")]
    # Each of 8 runs: chunks are preloaded right before an arm's turn.
    turns = [part.count("picbench") for part in " ".join(served).split("reset picbench")]
    assert [turn for turn in turns if turn] == [2] * 8 * 2
    data = json.loads((output / "data" / "cuda-chunks.json").read_text())
    assert "turns" in data["conditions"]["caption"]
    [mepic, epic] = data["points"][0]["arms"].values()
    assert (mepic["metrics"]["peak_blocks"], epic["metrics"]["peak_blocks"]) == (8, 40)


def test_a_point_that_was_stopped_goes_on(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    """The second arm of the last point is interrupted: the first one is not measured again."""
    output = tmp_path / "out"
    stopped = Bench(stops_at=7)
    assert reproduce(stopped, settings_file, output, "--figure", "fig8").exit_code == 130
    manifest = output / "runs" / "cpu-chunks-4-seed2" / "manifest.json"
    assert json.loads(manifest.read_text())["status"] == "interrupted"
    kept = (manifest.parent / "samples.jsonl").read_text()
    (served,) = {json.loads(line)["arm"] for line in kept.splitlines()}

    again = Bench()
    result = reproduce(again, settings_file, output, "--figure", "fig8")
    assert result.exit_code == 0, result.stderr
    assert "cpu-chunks-4-seed2: resuming after 3 of 6 requests" in result.stderr
    assert {arm: again.order.count(arm) for arm in LEDGERS} == {
        arm: int(arm != served) for arm in LEDGERS
    }
    assert (manifest.parent / "samples.jsonl").read_text().startswith(kept)
    done = json.loads(manifest.read_text())
    assert [attempt["done"] for attempt in done["attempts"]] == [0, 3]
    assert done["status"] == "complete"

    whole = tmp_path / "whole"
    assert reproduce(bench, settings_file, whole, "--figure", "fig8").exit_code == 0
    assert rows(output / "cpu-chunks-kinds.csv") == rows(whole / "cpu-chunks-kinds.csv")


def test_a_point_that_began_with_other_code_is_measured_again(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert reproduce(bench, settings_file, output, "--figure", "fig8").exit_code == 0
    path = output / "runs" / "cpu-chunks-4-seed2" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["provenance"]["packages"]["numpy"] = "0.1"
    path.write_text(json.dumps(manifest | {"status": "running"}))
    (output / "points" / "cpu-chunks-4-seed2.json").unlink()
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


def test_a_figure_that_a_paper_lacks_is_named(settings_file: Path, tmp_path: Path) -> None:
    result = reproduce(Bench(), settings_file, tmp_path / "out", "--figure", "fig9")
    assert result.exit_code == 2
    assert "--figure fig9: mepic has none" in result.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loads.chunks.cpu.kv_blocks": 200}, "a run with other settings"),
        ({"loads.chunks.cpu.seeds": []}, "seeds"),
        ({"loads.chunks.cpu.common": {"zipf": -1.0, "requests": 3}}, "zipf -1.0 is not possible"),
        ({"loads.chunks.cpu.common": {"colour": 1}}, "colour 1: extra inputs are not permitted"),
        ({"figures.fig8.experiment": "chunk"}, "no experiment 'chunk'"),
        ({"published": "none.json"}, "none.json: No such file"),
    ],
)
def test_what_is_wrong_is_said_before_an_engine_starts(
    bench: Bench, settings_file: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    output = tmp_path / "out"
    assert (
        reproduce(bench, settings_file, output, "--figure", "fig8", "--seeds", "1").exit_code == 0
    )
    content = yaml.safe_load(settings_file.read_text())
    for place, value in change.items():
        *folders, name = place.split(".")
        reduce(getitem, folders, content)[name] = value
    settings_file.write_text(yaml.safe_dump(content, sort_keys=False))
    again = Bench()
    result = reproduce(again, settings_file, output, "--figure", "fig8", "--seeds", "1")
    assert result.exit_code == 2
    assert said in result.stderr
    assert again.order == []


@pytest.mark.parametrize("flag", ["--seeds", "--requests"])
def test_nothing_of_a_point_is_not_possible(
    bench: Bench, settings_file: Path, tmp_path: Path, flag: str
) -> None:
    result = reproduce(bench, settings_file, tmp_path / "out", flag, "0")
    assert result.exit_code == 2
    assert flag in result.stderr
    assert not (tmp_path / "out").exists()


def test_parts_measure_each_point_once_and_the_last_has_all(
    bench: Bench, settings_file: Path, tmp_path: Path
) -> None:
    output, whole = tmp_path / "out", tmp_path / "whole"
    measured = []
    for part in ("1/2", "2/2"):
        before = bench.runs
        result = reproduce(bench, settings_file, output, "--part", part)
        assert result.exit_code == 0, result.stderr
        measured.append(bench.runs - before)
    assert all(count > 0 for count in measured)
    assert reproduce(bench, settings_file, whole).exit_code == 0
    assert sum(measured) == bench.runs - sum(measured)
    for data in sorted((whole / "data").glob("*.json")):
        found, wanted = (
            [
                (point["label"], point["seed"])
                for point in json.loads((folder / "data" / data.name).read_bytes())["points"]
            ]
            for folder in (output, whole)
        )
        assert found == wanted
    again = reproduce(bench, settings_file, output, "--part", "2/2")
    assert again.exit_code == 0
    assert bench.runs == 2 * sum(measured)


def test_a_part_estimates_its_own_share(bench: Bench, settings_file: Path, tmp_path: Path) -> None:
    parts = [
        reproduce(bench, settings_file, tmp_path / "out", "--dry-run", "--part", part).stdout
        for part in ("1/1", "1/2", "2/2")
    ]
    assert all(text.startswith("dry run: no engine was started") for text in parts)
    left = [sum(map(int, re.findall(r"(\d+) of \d+ runs", text))) for text in parts]
    assert left[0] == left[1] + left[2]
    assert min(left) > 0


def test_accuracy_has_no_parts() -> None:
    result = CliRunner().invoke(main, ["reproduce", "accuracy", "--dry-run", "--part", "1/2"])
    assert result.exit_code == 2
    assert "--part" in result.stderr


def test_a_folder_without_the_paper_is_named_and_stays_empty(tmp_path: Path) -> None:
    for paper in ("mepic", "all"):
        result = CliRunner().invoke(main, ["figures", paper, "--data", str(tmp_path)])
        assert result.exit_code == 2
        assert f"--data {tmp_path}: no folder mepic in it" in result.stderr
    assert not list(tmp_path.iterdir())

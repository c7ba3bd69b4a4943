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


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


def reproduce(bench: Bench, settings: Path, output: Path, *flags: str, code: int = 0) -> Result:
    where = ("--settings", str(settings), "--output", str(output))
    arguments = ("reproduce", "mepic", *where, *flags)
    result = CliRunner().invoke(main, arguments, obj=bench.services())
    assert result.exit_code == code, result.stderr
    return result


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_one_command_makes_every_table_and_figure_and_data_alone_remake_them(
    bench: Bench, settings_file: Path, output: Path, tmp_path: Path
) -> None:
    result = reproduce(bench, settings_file, output)
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
    assert bench.order.count("launch mepic") == 1
    assert bench.runs == bench.order.count("reset mepic") == 2 * 2 * 2
    shutil.copytree(output / "data", tmp_path / "kept" / "data")
    write_page("mepic", read_settings("mepic", settings_file), tmp_path / "kept", None)
    for name in ("verdicts.json", "README.md"):
        assert (tmp_path / "kept" / name).read_bytes() == (output / name).read_bytes()


def test_printed_values_stand_beside_ours_and_kinds_sum_to_the_peak(
    bench: Bench, settings_file: Path, output: Path
) -> None:
    reproduce(bench, settings_file, output, "--figure", "table2", "--figure", "table1")
    found = rows(output / "table2-cpu.csv")
    mepic, epic = (row for row in found if row["workload"] == "squad-like")
    assert (mepic["peak % (paper)"], mepic["peak % (paper) sd"]) == ("27.67", "0.05")
    assert (epic["peak % (paper)"], epic["peak % (paper) sd"]) == ("54.13", "0.21")
    assert mepic["peak referenced % (ours)"] == "8.0"
    assert epic["peak referenced % (ours)"] == "40.0"
    assert "| 27.67 ± 0.05 |" in (output / "table2-cpu.md").read_text()
    assert {row["peak % (paper)"] for row in found if row["workload"] == "ours-like"} == {""}
    table1 = rows(output / "table1-cpu.csv")
    assert (table1[0]["tokens (paper)"], table1[0]["reuse % (paper)"]) == ("2224", "84.9")
    assert (table1[0]["tokens (ours)"], table1[0]["tokens (ours) sd"]) == ("88.0", "0.0")
    [mepic, epic, *_] = rows(output / "cpu-workloads-kinds.csv")
    kinds = [name for name in mepic if name not in ("workload", "seed", "arm", "sum")]
    assert sum(float(mepic[kind]) for kind in kinds) == float(mepic["sum"]) == 8
    assert sum(float(epic[kind]) for kind in kinds) == float(epic["sum"]) == 40


def test_claims_are_judged_by_what_was_measured(
    bench: Bench, settings_file: Path, output: Path
) -> None:
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_recurs_takes_less_time_than_what_is_new(device: str) -> None:
    new = TrafficFacts(10, 1, 1000.0, 10.0, 100.0, 10, 0.0, 1000.0, 0.0, 0.1, None)
    known = replace(new, fresh_tokens=100.0)
    for arm in ("mepic", "epic:k=16", "cacheblend:r=0.15", "naive"):
        assert expected_arm(arm, known, device) < expected_arm(arm, new, device)
    assert expected_arm("prefix", known, device) == expected_arm("prefix", new, device)
    assert expected_arm("naive", replace(known, rate=0.1), device) == 100.0


def test_complete_points_are_not_measured_again_also_where_their_runs_are_gone(
    bench: Bench, settings_file: Path, output: Path
) -> None:
    reproduce(bench, settings_file, output, "--figure", "fig8")
    data = (output / "data" / "cpu-chunks.json").read_bytes()
    shutil.rmtree(output / "runs")
    again = Bench()
    reproduce(again, settings_file, output, "--figure", "fig8")
    assert (output / "data" / "cpu-chunks.json").read_bytes() == data
    dry = reproduce(again, settings_file, output, "--dry-run")
    assert dry.stdout.startswith("dry run: no engine was started, nothing was written")
    assert "0 of 4 runs" in dry.stdout
    assert "4 of 4 runs" in dry.stdout
    settings_file.write_text(settings_file.read_text().replace("pool: 8", "pool: 9"))
    flags = ("--figure", "fig8")
    refused = [
        reproduce(again, settings_file, output, *flags, *dry, code=2).stderr
        for dry in ((), ("--dry-run",))
    ]
    assert "cpu-chunks-2-seed1.json: a run with other settings" in refused[0]
    assert refused[0] == refused[1]
    assert again.order == []


#: What papers have beside loads.
OTHERS = """
paper: A paper
published: epic.json
latencies:
  cost:
    varies: tokens
    cpu: {model: testbed, arms: [mepic, full], repeats: 2, points: {"64": {chunks: 2, tokens: 32}}}
layers:
  layers: {varies: layer, cpu: {dataset: musique, rows: 2, arms: [full, naive]}}
scores:
  cpu: {models: [testbed], rows: 11, datasets: [musique]}
figures:
  fig6: {title: Figure 6, experiment: cost}
  fig10: {title: Figure 10, experiment: layers}
  table1: {title: Scores, experiment: scores}
"""


def test_prompts_rows_and_scores_go_on_where_they_were_stopped(
    bench: Bench, settings_file: Path, output: Path
) -> None:
    settings_file.write_text(OTHERS)
    dry = reproduce(bench, settings_file, output, "--dry-run").stdout
    assert [left in dry for left in ("1 of 1 points", "2 of 2 rows", "11 of 11 rows")] == [True] * 3
    result = reproduce(bench, settings_file, output, "--commit", "abc")
    assert "cost: 64, round 2: done" in result.stderr
    cost, layers = (output / "data" / f"cpu-{name}.json" for name in ("cost", "layers"))
    kept = cost.read_bytes()
    points = json.loads(kept)["points"]
    assert [(point["seed"], set(point["arms"])) for point in points] == [
        (repeat, {"mepic", "full"}) for repeat in (1, 2)
    ]
    assert points[0]["facts"] == {"chunks": 2, "chunk_tokens": 32, "mean_tokens": 112}
    assert len(json.loads((output / "scores" / "testbed-musique.json").read_bytes())["chunk"]) == 11
    (output / "points" / "cpu-cost-64-seed2.json").unlink()
    layers.unlink()
    again = Bench()
    result = reproduce(again, settings_file, output, "--commit", "abc")
    assert "cost: 64, round 1" not in result.stderr
    assert cost.read_bytes() == kept
    assert layers.exists()
    assert [call for call in again.order if call.startswith("launch")] == [
        "launch picbench",
        "launch stock",
    ]


def test_nothing_is_begun_that_would_end_too_late(
    bench: Bench, settings_file: Path, output: Path
) -> None:
    result = reproduce(bench, settings_file, output, "--figure", "fig8", "--seconds", "1")
    assert bench.order == []
    assert "time is over" in result.stderr
    assert "4 of 4 runs" in result.stdout
    assert (output / "README.md").exists()


def test_on_a_gpu_arms_take_turns_on_one_engine(
    bench: Bench, settings_file: Path, output: Path
) -> None:
    content = yaml.safe_load(settings_file.read_text())
    for load in content["loads"].values():
        load["cuda"] = load["cpu"]
        load["cuda"]["common"]["cached"] = 1.0
    settings_file.write_text(yaml.safe_dump(content, sort_keys=False))
    reproduce(bench, settings_file, output, "--device", "cuda")
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
    bench: Bench, settings_file: Path, output: Path, tmp_path: Path
) -> None:
    """The second arm of the last point is interrupted: the first one is not measured again."""
    stopped = Bench(stops_at=7)
    reproduce(stopped, settings_file, output, "--figure", "fig8", code=130)
    manifest = output / "runs" / "cpu-chunks-4-seed2" / "manifest.json"
    assert json.loads(manifest.read_text())["status"] == "interrupted"
    kept = (manifest.parent / "samples.jsonl").read_text()
    (served,) = {json.loads(line)["arm"] for line in kept.splitlines()}

    again = Bench()
    result = reproduce(again, settings_file, output, "--figure", "fig8")
    assert "cpu-chunks-4-seed2: resuming after 3 of 6 requests" in result.stderr
    assert {arm: again.order.count(arm) for arm in LEDGERS} == {
        arm: int(arm != served) for arm in LEDGERS
    }
    assert (manifest.parent / "samples.jsonl").read_text().startswith(kept)
    done = json.loads(manifest.read_text())
    assert [attempt["done"] for attempt in done["attempts"]] == [0, 3]
    assert done["status"] == "complete"

    whole = tmp_path / "whole"
    reproduce(bench, settings_file, whole, "--figure", "fig8")
    assert rows(output / "cpu-chunks-kinds.csv") == rows(whole / "cpu-chunks-kinds.csv")


def test_a_point_that_began_with_other_code_is_measured_again(
    bench: Bench, settings_file: Path, output: Path
) -> None:
    reproduce(bench, settings_file, output, "--figure", "fig8")
    path = output / "runs" / "cpu-chunks-4-seed2" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["provenance"]["packages"]["numpy"] = "0.1"
    path.write_text(json.dumps(manifest | {"status": "running"}))
    (output / "points" / "cpu-chunks-4-seed2.json").unlink()
    again = Bench()
    reproduce(again, settings_file, output, "--figure", "fig8")
    assert again.runs == 1
    assert json.loads(path.read_text())["status"] == "complete"


def test_an_engine_that_dies_keeps_what_was_complete(settings_file: Path, output: Path) -> None:
    broken, mended = Bench(dies_at=3), Bench()
    result = reproduce(broken, settings_file, output, "--figure", "fig8", code=4)
    assert "requests failed" in result.stderr
    reproduce(mended, settings_file, output, "--figure", "fig8")
    assert mended.runs == 1


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
    bench: Bench, settings_file: Path, output: Path, change: dict[str, Any], said: str
) -> None:
    flags = ("--figure", "fig8", "--seeds", "1")
    reproduce(bench, settings_file, output, *flags)
    content = yaml.safe_load(settings_file.read_text())
    for place, value in change.items():
        *folders, name = place.split(".")
        reduce(getitem, folders, content)[name] = value
    settings_file.write_text(yaml.safe_dump(content, sort_keys=False))
    again = Bench()
    assert said in reproduce(again, settings_file, output, *flags, code=2).stderr
    assert again.order == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--seeds", "0"), "--seeds"),
        (("--requests", "0"), "--requests"),
        (("--figure", "fig9"), "--figure fig9: mepic has none"),
    ],
)
def test_flags_that_name_nothing_are_refused(
    bench: Bench, settings_file: Path, output: Path, flags: tuple[str, ...], said: str
) -> None:
    assert said in reproduce(bench, settings_file, output, *flags, code=2).stderr
    assert not output.exists()


def test_parts_measure_each_point_once_and_the_last_has_all(
    bench: Bench, settings_file: Path, output: Path, tmp_path: Path
) -> None:
    left, measured = [], []
    for part in ("1/1", "1/2", "2/2"):
        dry = reproduce(bench, settings_file, output, "--dry-run", "--part", part).stdout
        left.append(sum(map(int, re.findall(r"(\d+) of \d+ runs", dry))))
    for part in ("1/2", "2/2"):
        before = bench.runs
        reproduce(bench, settings_file, output, "--part", part)
        measured.append(bench.runs - before)
    assert min(measured) > 0
    assert left == [sum(measured), *measured]
    reproduce(bench, settings_file, output, "--part", "2/2")
    reproduce(bench, settings_file, tmp_path / "whole")
    assert bench.runs == 2 * sum(measured)
    for whole in (tmp_path / "whole" / "data").glob("*.json"):
        both = (json.loads(path.read_bytes()) for path in (whole, output / "data" / whole.name))
        found, wanted = ([(p["label"], p["seed"]) for p in data["points"]] for data in both)
        assert found == wanted


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

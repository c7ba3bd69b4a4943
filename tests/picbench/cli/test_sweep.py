"""`picbench sweep`, end to end over fake engines."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from harness_fakes import FakeEngine, FakeServer, InterruptedEngine
from sweep_fakes import SweepHarness

from picbench.cli import main
from picbench.engines.config import EngineConfig
from picbench.errors import EngineError

GRID = "base: {dataset: fake, algo: [full, mepic]}\ngrid: {kv_blocks: [40, 60], limit: [2, 4]}\n"
CELLS = [f"kv_blocks={blocks},limit={limit}" for blocks in (40, 60) for limit in (2, 4)]


class SimulatedEngine(FakeEngine):
    """Computes nothing, and says so."""

    def describe(self) -> Mapping[str, object]:
        return {**super().describe(), "provenance": "simulated"}


class SmallHarness(SweepHarness):
    """Engines with the smaller pool do not start."""

    def launch(self, name: str, config: EngineConfig, log: Path) -> FakeServer:
        if config.kv_blocks == 40:
            raise EngineError("no memory left", hint="lower `kv_blocks`")
        return super().launch(name, config, log)


@pytest.fixture
def harness(tmp_path: Path) -> SweepHarness:
    return SweepHarness(model=tmp_path)


def sweep(harness: SweepHarness, tmp_path: Path, *flags: str, text: str = GRID) -> Result:
    file = tmp_path / "pools.yaml"
    file.write_text(text)
    command = ("sweep", str(file), "--output", str(tmp_path / "out"), *flags)
    return CliRunner().invoke(main, command, obj=harness.services())


def last_line(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def table(tmp_path: Path) -> pd.DataFrame:
    return pd.read_csv(tmp_path / "out" / "sweep.csv")


def test_every_cell_is_a_run_directory(harness: SweepHarness, tmp_path: Path) -> None:
    result = sweep(harness, tmp_path)
    assert result.exit_code == 0, result.stderr
    for cell in CELLS:
        manifest = json.loads((tmp_path / "out" / cell / "manifest.json").read_text())
        assert manifest["status"] == "complete"
    assert harness.order.count("launch mepic") == 4
    assert harness.loads == 2  # The pool is no matter of requests.
    line = last_line(result)
    assert (line["sweep"], line["exit_code"]) == (str(tmp_path / "out"), 0)
    assert [cell["cell"] for cell in line["cells"]] == CELLS
    assert line["cells"][1]["arms"]["mepic"]["requests"] == 4


def test_the_table_has_a_row_for_each_cell_and_arm(harness: SweepHarness, tmp_path: Path) -> None:
    result = sweep(harness, tmp_path)
    frame = table(tmp_path)
    assert list(frame["cell"]) == [cell for cell in CELLS for _ in range(2)]
    assert list(frame["arm"]) == ["full", "mepic"] * 4
    assert list(frame["grid_kv_blocks"]) == [40] * 4 + [60] * 4
    assert list(frame["requests"]) == [2, 2, 4, 4] * 2
    assert frame.loc[frame["arm"] == "mepic", "ttft_ms_p50"].tolist() == pytest.approx([100] * 4)
    assert set(frame["status"]) == {"complete"}
    page = (tmp_path / "out" / "sweep.md").read_text()
    assert "Sweep pools: 4 cells, 4 complete." in page
    assert page.count("fake, model shape:fake (random weights), cpu: ") == 1
    assert "| 60 | 4 | mepic | 4 | 100.0 | 100.0 | 0.25 |" in page
    assert page in result.stdout


def test_simulated_arms_are_called_so(harness: SweepHarness, tmp_path: Path) -> None:
    harness.engines = {"mepic": SimulatedEngine("mepic")}
    sweep(harness, tmp_path)
    page = (tmp_path / "out" / "sweep.md").read_text()
    assert page.count("| mepic (simulated) |") == 4
    assert "Simulated arms: no engine computed anything" in page
    assert "full (simulated)" not in page


def test_complete_cells_are_kept_and_new_ones_run(harness: SweepHarness, tmp_path: Path) -> None:
    sweep(harness, tmp_path)
    before = (tmp_path / "out" / CELLS[0] / "manifest.json").read_bytes()
    harness.order.clear()
    result = sweep(harness, tmp_path, text=GRID.replace("[2, 4]", "[2, 4, 6]"))
    assert result.exit_code == 0, result.stderr
    assert harness.order.count("launch mepic") == 2
    assert (tmp_path / "out" / CELLS[0] / "manifest.json").read_bytes() == before
    assert set(table(tmp_path)["grid_limit"]) == {2, 4, 6}


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    harness = SmallHarness(model=tmp_path)
    result = sweep(harness, tmp_path)
    assert result.exit_code == 4
    assert "2 of 4 cells are not complete (failed)" in result.stderr.splitlines()[-1]
    cells = {cell["cell"]: cell for cell in last_line(result)["cells"]}
    assert [cells[name]["status"] for name in CELLS] == ["failed"] * 2 + ["complete"] * 2
    assert cells[CELLS[0]]["reason"] == "no memory left (lower grid.kv_blocks[0])"
    frame = table(tmp_path)
    failed = frame[frame["status"] == "failed"]
    assert list(failed["cell"]) == CELLS[:2]
    assert failed["requests"].isna().all()
    again = sweep(SweepHarness(model=tmp_path), tmp_path)
    assert again.exit_code == 0, again.stderr


def test_a_cell_with_failed_requests_is_not_complete(harness: SweepHarness, tmp_path: Path) -> None:
    harness.dies_at = {"mepic": 0}
    result = sweep(harness, tmp_path)
    assert result.exit_code == 4
    assert {cell["status"] for cell in last_line(result)["cells"]} == {"partial"}
    assert last_line(result)["cells"][0]["reason"] == "2 of 4 requests failed"
    harness.order.clear()
    assert sweep(harness, tmp_path).exit_code == 4
    assert harness.order == []


def test_a_sweep_that_was_stopped_goes_on(harness: SweepHarness, tmp_path: Path) -> None:
    text = GRID.replace("algo:", "concurrency: 1, algo:")
    harness.engines = {"mepic": InterruptedEngine("mepic")}
    stopped = sweep(harness, tmp_path, text=text)
    assert stopped.exit_code == 130
    line = last_line(stopped)
    assert line["exit_code"] == 130
    assert [cell["status"] for cell in line["cells"]] == ["interrupted", *["missing"] * 3]
    assert list(table(tmp_path)["status"]) == ["interrupted"] * 2 + ["missing"] * 3
    harness.engines = {"mepic": FakeEngine("mepic")}
    result = sweep(harness, tmp_path, text=text)
    assert result.exit_code == 0, result.stderr
    assert "resuming after 2 of 4 requests" in result.stderr
    assert {cell["status"] for cell in last_line(result)["cells"]} == {"complete"}


def test_a_dry_run_shows_cells_and_leaves_nothing(harness: SweepHarness, tmp_path: Path) -> None:
    result = sweep(harness, tmp_path, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert all(cell in result.stdout for cell in CELLS)
    assert "4 cells: 4 missing; those to run have 24 requests" in result.stdout
    assert "time left: not known before a cell is measured." in result.stdout
    assert harness.order == []
    assert not (tmp_path / "out").exists()


def test_a_dry_run_tells_what_is_kept(harness: SweepHarness, tmp_path: Path) -> None:
    sweep(harness, tmp_path)
    text = GRID.replace("[2, 4]", "[2, 4, 6]")
    result = sweep(harness, tmp_path, "--dry-run", text=text)
    assert "6 cells: 4 complete: kept, 2 missing; those to run have 24" in result.stdout
    assert "seconds a prompt token in 4 measured cells" in result.stdout


def test_quiet_prints_the_last_line_alone(harness: SweepHarness, tmp_path: Path) -> None:
    result = sweep(harness, tmp_path, "--quiet")
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr == ""


def test_a_folder_with_other_things_is_left_alone(harness: SweepHarness, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    result = sweep(harness, tmp_path)
    assert result.exit_code == 2
    assert f"--output {tmp_path / 'out'}: exists and is not a sweep's" in result.stderr


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_place_below_a_file_is_refused_at_once(
    harness: SweepHarness, tmp_path: Path, dry: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "sweep"
    result = sweep(harness, tmp_path, "--output", str(place), *dry)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"picbench: --output {place}: cannot be written: Not a dir")
    assert result.stderr.count("\n") == 1
    assert harness.order == []


def test_what_is_wrong_in_a_file_is_one_line(harness: SweepHarness, tmp_path: Path) -> None:
    text = "base: {dataset: fake}\ngrid: {algo: [full, naive, 'mepic:k=1.5']}"
    result = sweep(harness, tmp_path, text=text)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    place = f"{tmp_path / 'pools.yaml'}: grid.algo[2]: 'mepic:k=1.5': unknown option"
    assert line.startswith(f"picbench: {place}")
    assert result.stdout == ""
    assert harness.order == []

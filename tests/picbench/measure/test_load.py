"""A table of two runs under load, from runs over fake engines."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness_fakes import FakeEngine, Harness, make_sample, make_snapshot

from picbench.cli import main
from picbench.engines.ledger import Snapshot
from picbench.engines.request import Request, Result, Timings
from picbench.errors import ConfigError, IncomparableRuns
from picbench.measure.load import ratios, read_load, write
from picbench.output import provenance

SAMPLES = [make_sample(n) for n in range(4)]
TIMES = (0.0, 0.5, 0.75, 2.0)
GPUS = [{"name": "NVIDIA Fake", "driver": "1.2", "memory": "9 MiB"}]

#: Peak of referenced blocks, of 100, and seconds that each request takes, by arm.
ARMS = {"prefix": (40, 8.0), "epic:k=16": (95, 3.0), "mepic": (38, 0.5)}


@dataclass
class LoadedEngine(FakeEngine):
    """Holds so many blocks at its peak and takes so long for each request."""

    peak: float = 0.0
    seconds: float = 0.5

    @property
    def memory(self) -> Sequence[Snapshot]:
        return [make_snapshot(n, n / 2, held) for n, held in enumerate((0.0, self.peak, 0.0))]

    def _answer(self, request: Request) -> Result:
        timings = Timings(ttft=self.seconds / 2, prefill=0.05, tpot=0.01, e2e=self.seconds)
        return replace(super()._answer(request), timings=timings)


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "gpus", lambda: GPUS)


def run(
    folder: Path,
    arms: Sequence[str] = tuple(ARMS),
    arrivals: tuple[float, ...] | None = TIMES,
    **peaks: float,
) -> Path:
    """A run directory of these arms; `peaks` are other peaks than those above."""
    engines = {
        name: LoadedEngine(name, peak=peaks.get(name.partition(":")[0], peak), seconds=seconds)
        for name, (peak, seconds) in ARMS.items()
    }
    harness = Harness(SAMPLES, weights="dummy", engines=engines, arrivals=arrivals)
    flags = ("--dataset", "fake", "--algo", ",".join(arms), "--output", str(folder))
    result = CliRunner().invoke(main, ("run", *flags), obj=harness.services())
    assert result.exit_code == 0, result.stderr
    return folder


def table(page: str) -> dict[tuple[str, str], list[str]]:
    """The cells of a page's table by run and arm."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return {(name, arm): cells for name, arm, *cells in lines[2:]}


def test_ratios_by_hand(tmp_path: Path) -> None:
    load = read_load(run(tmp_path / "run"))
    assert load.requests == 4
    # The last request arrives at 2.0 s: 4 requests in 10.0 s, and in 2.5 s.
    assert load.requests_a_second("prefix") == pytest.approx(0.4)
    assert load.requests_a_second("mepic") == pytest.approx(1.6)
    assert (load.peak("epic:k=16"), load.pool("epic:k=16")) == (95, 100)
    assert ratios({"throughput": load, "memory": load}) == {
        "hbm_vs_private": pytest.approx(2.5),
        "throughput_vs_prefix": pytest.approx(4.0),
    }


def test_each_ratio_is_of_its_own_run(tmp_path: Path) -> None:
    full = read_load(run(tmp_path / "memory", mepic=19))
    roomy = read_load(run(tmp_path / "throughput", epic=50))
    found = ratios({"throughput": roomy, "memory": full})
    assert found["hbm_vs_private"] == pytest.approx(5.0)
    assert list(ratios({"throughput": roomy})) == ["throughput_vs_prefix"]
    assert list(ratios({"memory": full})) == ["hbm_vs_private"]


def test_the_page_has_a_row_for_each_run_and_arm(tmp_path: Path) -> None:
    output = tmp_path / "out"
    write(run(tmp_path / "a"), run(tmp_path / "b", epic=100), "abc", output)
    page = (output / "load.md").read_text()
    rows = table(page)
    assert list(rows) == [(name, arm) for name in ("throughput", "memory") for arm in ARMS]
    rate, _, p50, p95, tpot, *peak = rows["throughput", "epic:k=16"]
    assert (rate, p50, p95, tpot) == ("0.80", "1.50", "1.50", "10.0")
    assert peak == ["95", "95%", "2.50"]
    assert rows["memory", "epic:k=16"][-3:] == ["100", "100%", "2.63"]
    assert "epic:k=16 holds 2.63 times as many as mepic" in page
    assert "mepic 4.00 times prefix's" in page


def test_the_page_says_what_ran_and_where(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    write(None, folder, "abc", tmp_path / "out")
    page = (tmp_path / "out" / "load.md").read_text()
    assert "shape:fake, dummy weights (times and memory, not answers)" in page
    assert "NVIDIA Fake, driver 1.2, vLLM " in page
    assert "commit abc." in page
    sizes = json.loads((folder / "manifest.json").read_text())["sizes"]
    assert "- memory: 4 requests in 2.0 s, 36 tokens each on average, 5 distinct" in page
    assert f"pool of {sizes['pool']} blocks" in page
    assert "cache cold at start" in page


def test_without_a_name_the_commit_is_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "git_state", lambda _: {"commit": "f" * 40, "dirty": False})
    monkeypatch.setattr(provenance, "gpus", list)
    write(run(tmp_path / "run"), None, None, tmp_path / "out")
    page = (tmp_path / "out" / "load.md").read_text()
    assert f"commit {'f' * 40}." in page
    assert f"{provenance.cpu_model()}, vLLM " in page


def test_a_figure_and_the_summarys_ratios_are_written_too(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "summary.json").write_text('{"other": 1, "hbm_vs_private": 9}')
    folder = run(tmp_path / "run")
    write(folder, folder, None, output)
    assert json.loads((output / "summary.json").read_text()) == {
        "other": 1,
        "hbm_vs_private": pytest.approx(2.5),
        "throughput_vs_prefix": pytest.approx(4.0),
    }
    figure = (output / "load.svg").read_text()
    assert all(words in figure for words in ("throughput", "memory", *ARMS, "NVIDIA Fake"))
    assert (output / "load.png").exists()


def test_one_run_makes_its_half_of_the_page(tmp_path: Path) -> None:
    write(run(tmp_path / "run", epic=50), None, "abc", tmp_path / "out")
    page = (tmp_path / "out" / "load.md").read_text()
    assert "mepic 4.00 times prefix's" in page
    assert "times as many" not in page
    assert {name for name, _ in table(page)} == {"throughput"}


@pytest.mark.parametrize(("peak", "saturated"), [(89, False), (90, True)])
def test_a_pool_that_was_not_full_says_nothing(
    tmp_path: Path, peak: float, saturated: bool
) -> None:
    folder, output = run(tmp_path / "run", epic=peak), tmp_path / "out"
    if saturated:
        write(None, folder, None, output)
        assert (output / "load.md").exists()
        return
    with pytest.raises(IncomparableRuns, match="filled the pool for 0% of the time") as error:
        write(None, folder, None, output)
    assert error.value.exit_code == 3
    assert not output.exists()


def test_no_run_at_all_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is given"):
        write(None, None, None, tmp_path / "out")


def test_runs_of_other_arms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IncomparableRuns, match="not a complete run of mepic, epic:k=16 and prefix"):
        read_load(run(tmp_path / "run", arms=("prefix", "mepic")))


def test_a_run_that_did_not_end_is_refused(tmp_path: Path) -> None:
    manifest = run(tmp_path / "run") / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"status": "interrupted"}))
    with pytest.raises(IncomparableRuns, match="not a complete run"):
        read_load(tmp_path / "run")


def test_a_closed_loop_is_no_load(tmp_path: Path) -> None:
    with pytest.raises(IncomparableRuns, match="which is no load"):
        read_load(run(tmp_path / "run", arrivals=None))


@pytest.mark.parametrize("file", ["manifest.json", "summary.json", "memory.parquet"])
@pytest.mark.parametrize("text", [None, "", "[]", "{}"])
def test_what_is_no_run_directory_is_a_plain_error(
    tmp_path: Path, file: str, text: str | None
) -> None:
    folder = run(tmp_path / "run")
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(ConfigError, match=r"run: not a run directory .picbench run --requests"):
        read_load(folder)

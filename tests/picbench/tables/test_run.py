"""Frames, tables and figures of a run of fake engines, and the lines below its table."""

import io
import json
import shutil
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from harness_fakes import POOL, Harness, make_sample, run_fakes
from PIL import Image

from picbench.cli import main
from picbench.engines.ledger import KINDS, MemoryUse, Occupancy
from picbench.engines.request import Hits, TokenCounts
from picbench.figures.run import longest_steps, peaks, write_run_files
from picbench.store.reader import Run, read_run
from picbench.store.summary import ArmSummary, Ratio, ScoreSummary, summarise_memory
from picbench.tables.metrics import METRICS, metrics_shown
from picbench.tables.run import (
    arms_frame,
    as_csv,
    as_latex,
    as_markdown,
    memory_lines,
    samples_frame,
    verdict,
)

ARMS = ["full", "mepic"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    harness = Harness([make_sample(n) for n in range(3)])
    path = run_fakes(harness, tmp_path_factory.mktemp("run") / "first", *ARMS)
    return read_run(path)


def test_the_ledger_is_a_row_for_each_step(run: Run) -> None:
    frame = run.ledger
    assert (frame[list(KINDS)].sum(axis=1) == POOL).all()
    for arm, steps in frame.groupby("arm"):
        assert list(steps["step"]) == list(range(len(steps)))
        assert steps["referenced"].max() == run.summary[str(arm)].blocks.peak_referenced


def test_frames_and_csv_have_numbers(run: Run) -> None:
    frame = samples_frame(run)
    assert len(frame) == len(run.rows) == 6
    assert [frame["ttft_ms"].dtype.kind, frame["tokens_prompt"].dtype.kind] == ["f", "i"]
    assert not any(isinstance(value, dict | list) for value in frame.to_numpy().ravel())
    read, written = pd.read_csv(io.StringIO(as_csv([run]))), arms_frame(run)
    assert list(read.columns) == list(written.columns)
    names = written.select_dtypes("number").columns
    assert len(names) > 20
    for name in names:
        expected = written[name].astype(float).tolist()
        assert read[name].tolist() == pytest.approx(expected, nan_ok=True)
    assert list(pd.read_csv(io.StringIO(as_csv([run, run])))["run"]) == ["first"] * 4
    assert "| first | mepic |" in as_markdown([run, run])


def test_markdown_has_the_printed_columns_without_ornaments(run: Run) -> None:
    title, table, note = as_markdown([run]).split("\n\n")
    assert title.startswith("fake, 3 requests an arm, model shape:fake (random weights), pool of")
    assert note == "Random or dummy weights: accuracy is not meaningful.\n"
    head, rule, *lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    metrics = metrics_shown(run.summary.values())
    assert head == ["arm", *(metric.title for metric in metrics)]
    assert rule[:2] == ["---", "---:"]
    for line, (name, arm) in zip(lines, run.summary.items(), strict=True):
        assert line[0] == name
        for cell, metric in zip(line[1:], metrics, strict=True):
            value = metric.value(arm)
            half = 0.5 * 10**-metric.digits
            assert value is not None
            assert float(cell) == pytest.approx(value, abs=half * 1.001)


def test_latex_is_a_tabular_with_escaped_names(run: Run) -> None:
    text = as_latex([run])
    caption, warning, begin, *_ = text.splitlines()
    assert caption.startswith("% fake, 3 requests an arm, model shape:fake (random weights)")
    assert warning == "% Random or dummy weights: accuracy is not meaningful."
    assert begin.startswith("\\begin{tabular}")
    assert r"tokens reused \%" in text
    assert text.count("mepic &") == 1


def test_the_command_prints_what_was_asked_for(run: Run, tmp_path: Path) -> None:
    path = str(run.path)
    for style, text in (("markdown", as_markdown), ("latex", as_latex), ("csv", as_csv)):
        done = CliRunner().invoke(main, ["table", path, "--format", style])
        assert (done.exit_code, done.stdout) == (0, text([run]))
    done = CliRunner().invoke(main, ["table", str(tmp_path)])
    assert done.exit_code == 2
    assert "not a run directory" in done.stderr


def test_numbers_of_untrained_weights_say_so_in_every_file(run: Run) -> None:
    assert list(write_run_files(run.path)) == []
    assert all(f">{arm}<" in (run.path / "memory.svg").read_text() for arm in ARMS)
    assert "not meaningful" in (run.path / "accuracy.svg").read_text()
    for name in ("ttft", "memory", "accuracy"):
        assert "shape:fake (random weights)" in (run.path / f"{name}.svg").read_text()
        with Image.open(run.path / f"{name}.png") as image:
            assert "(random weights)" in image.info["Description"]
    frame = pd.read_csv(run.path / "table.csv")
    assert list(frame["weights"]) == ["random"] * 2
    assert list(frame["score_meaningful"]) == [False] * 2


def test_a_stalled_arm_is_said_in_table_and_figures(run: Run, tmp_path: Path) -> None:
    path = Path(shutil.copytree(run.path, tmp_path / "stalled"))
    summary = json.loads((path / "summary.json").read_text())
    summary["arms"]["mepic"]["stalls"] = {"steps": 1, "allowed_s": 5.0, "longest_s": 30.0}
    (path / "summary.json").write_text(json.dumps(summary))
    assert list(write_run_files(path)) == []
    for name in ("ttft", "memory", "accuracy"):
        figure = (path / f"{name}.svg").read_text()
        assert figure.count("mepic (stalled: 1 steps)") >= 1 and ">full<" in figure
    assert "hatch" not in (run.path / "memory.svg").read_text().lower()
    assert (path / "memory.svg").read_text().count("<pattern ") == 1
    assert "mepic: stalled in 1 steps, the longest of 30.0 s" in (path / "table.md").read_text()
    shown = CliRunner().invoke(main, ["show", str(path)])
    assert "mepic: stalled in 1 steps" in shown.stdout


def test_the_longest_steps_are_those_that_are_hatched() -> None:
    times, held = [0.0, 1.0, 31.0, 32.0, 99.0], [5, 5, 5, 0, 5]
    steps = pd.DataFrame({"time": times, "referenced": held})
    assert longest_steps(steps, 1) == [(1.0, 31.0)]
    assert longest_steps(steps, 0) == []


def test_what_cannot_be_drawn_is_said_and_the_rest_is_made(tmp_path: Path) -> None:
    path = run_fakes(Harness([make_sample(0)]), tmp_path / "run", *ARMS)
    (path / "memory.parquet").write_bytes(b"torn")
    (line,) = write_run_files(path)
    assert line.startswith("memory was not made: ")
    assert (path / "ttft.svg").exists()
    harness = Harness([make_sample(0)], file_faults=[line])
    flags = [
        "run",
        "--only",
        "--algo",
        "full",
        "--dataset",
        "fake",
        "--output",
        str(tmp_path / "other"),
    ]
    done = CliRunner().invoke(main, flags, obj=harness.services())
    assert done.exit_code == 0
    assert line in done.stderr


def test_a_full_disk_ends_a_run_that_is_drawn_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(ENOSPC, "No space left on device", str(path))

    services = replace(Harness([make_sample(0)]).services(), files=write_run_files)
    path = tmp_path / "run"
    flags = ["run", "--only", "--algo", "full,mepic", "--dataset", "fake", "--output", str(path)]
    monkeypatch.setattr("picbench.figures.canvas.write_whole", refuse)
    full = CliRunner().invoke(main, flags, obj=services)
    assert full.exit_code == 4
    said = f"picbench: {path / 'ttft.svg'}: No space left on device (make room"
    assert full.stderr.splitlines()[-1].startswith(said)
    assert full.stderr.count("No space") == 1
    assert json.loads(full.stdout.splitlines()[-1])["exit_code"] == 4
    assert not list(path.glob("*.svg"))
    monkeypatch.undo()
    assert CliRunner().invoke(main, flags, obj=services).exit_code == 0
    assert len(list(path.glob("*.svg"))) == 3


def test_thinned_steps_keep_the_peaks() -> None:
    steps = pd.DataFrame({"time": range(1000), "referenced": [n % 97 for n in range(1000)]})
    shown = peaks(steps, points=50)
    assert len(shown) == 50
    assert shown["referenced"].max() == steps["referenced"].max()
    assert shown["time"].is_monotonic_increasing
    assert peaks(steps, points=1000) is steps


GIB = 1 << 30


def test_what_is_held_beside_known_tensors_is_the_residual() -> None:
    cpu = MemoryUse("cpu", 4, 3, 2, process_bytes=10)
    assert (cpu.known_bytes, cpu.held_bytes, cpu.residual_bytes) == (9, 10, 1)
    gpu = MemoryUse("cuda", 4, 3, 2, process_bytes=99, allocated_bytes=12, reserved_bytes=16)
    assert (gpu.held_bytes, gpu.residual_bytes) == (12, 3)
    assert MemoryUse("cpu", 4, 3, 2).residual_bytes is None


def test_a_run_says_bytes_beside_blocks(tmp_path: Path) -> None:
    run_fakes(Harness([make_sample(0)]), tmp_path, "full", "mepic")
    run = read_run(tmp_path)
    memory = run.summary["mepic"].memory
    assert memory is not None
    assert memory.peak_referenced_bytes == 20 << 20
    assert memory.residual_bytes == (3 << 20,)
    assert METRICS["peak_gib"] in metrics_shown(run.summary.values())
    assert METRICS["peak_gib"].value(run.summary["mepic"]) == pytest.approx(20 / 1024)
    blocks = run.summary["mepic"].blocks
    assert summarise_memory(blocks, None, memory.workers).mean_referenced_bytes is None
    assert memory.mean_referenced_bytes == round(blocks.mean_referenced * (1 << 20))
    lines = list(memory_lines(run.summary))
    assert "a block has 1,048,576 bytes" in lines[0]
    assert lines[2] == (
        "mepic: weights 0.004, KV pool 0.002, workspaces 0.001, residual 0.003: "
        "0.010 GiB resident on the CPU"
    )


def summary(score: float | None, ttft: float, blocks: float, metric: str = "f1") -> ArmSummary:
    return ArmSummary(
        requests=60,
        failed=0,
        ttft_ms=None,
        prefill_ms=None,
        e2e_ms=None,
        tpot_ms=None,
        throughput_tok_s=None,
        output_tok_s=None,
        busy_s=1.0,
        ttft_vs_full=Ratio(ttft, 60),
        score=ScoreSummary(metric, score, meaningful=True),
        blocks=Occupancy(1000, blocks, blocks, blocks, blocks),
        tokens=TokenCounts(),
        output_tokens=0,
        hits=Hits(),
    )


FULL = summary(0.98, 1.0, 400)
NAIVE = summary(0.61, 0.31, 160)
MEPIC = summary(0.93, 0.52, 164)


RANDOM = replace(MEPIC, score=ScoreSummary("f1", 0.1, meaningful=False))
GAINS = "mepic against full: first token in 0.52x the time, 0.41x the blocks at peak"


@pytest.mark.parametrize(
    ("arms", "line"),
    [
        ({"mepic": MEPIC}, f"{GAINS}, f1 -0.05 (n=60)"),
        ({"naive": NAIVE, "mepic": MEPIC}, f"{GAINS}, f1 -0.05 (naive -0.37) (n=60)"),
        (
            {"mepic": summary(0.995, 1.3, 500)},
            "mepic against full: first token in 1.30x the time, 1.25x the blocks at peak, f1 +0.02 "
            "(n=60)",
        ),
        ({"naive": NAIVE, "mepic": RANDOM}, f"{GAINS} (n=60)"),
        ({"naive": NAIVE, "mepic": replace(MEPIC, failed=1)}, f"{GAINS} (n=60)"),
        ({"mepic": summary(None, 0.52, 164)}, f"{GAINS} (n=60)"),
    ],
)
def test_a_line_says_what_reuse_gains_and_loses(arms: dict[str, ArmSummary], line: str) -> None:
    assert list(verdict({"full": FULL, **arms}, list(arms))) == [line]


def test_there_is_no_line_without_both_arms() -> None:
    assert not list(verdict({"mepic": MEPIC}, ["mepic"]))
    assert not list(verdict({"full": FULL, "prefix": MEPIC}, []))
    assert not list(verdict({"full": FULL, "mepic": replace(MEPIC, ttft_vs_full=None)}, ["mepic"]))
    [line] = verdict({"full": summary(0.98, 1.0, 0), "mepic": MEPIC}, ["mepic"])
    assert "blocks" not in line, "they were not counted"
    for reusing, subject in ((["mepic:pad=paper", "naive"], "mepic:pad=paper"), ("ab", "b")):
        [line] = verdict({"full": FULL} | dict.fromkeys(reusing, MEPIC), [*reusing])
        assert line.startswith(f"{subject} against full: ")

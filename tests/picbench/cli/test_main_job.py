"""The main job as a person gives it: baselines beside it, a picture after it."""

import io
import json
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from harness_fakes import ForgetfulEngine, Harness, make_sample, no_gpu

from picbench.cli import main
from picbench.cli.run import with_baselines
from picbench.run.job import prepare
from picbench.run.workload import load_workload
from picbench.settings import parse_config
from picbench.store.reader import read_run
from picbench.tables.run import bar_lines, reference_of
from picbench.workloads.sample import Sample, SampleSegment


class Terminal(io.StringIO):
    """Standard output that a person reads."""

    def isatty(self) -> bool:
        return True


def alone(number: int) -> Sample:
    """A sample that has nothing in common with others."""
    segments = (
        SampleSegment("chunk", "c", (1000 + number,) * 32),
        SampleSegment("text", "q", (3,)),
    )
    return Sample(f"s{number}", "fake", segments, ("yes",), 2)


def flags(output: Path, *more: str) -> Sequence[str]:
    return ("run", "--dataset", "fake", "--data", "d", "--output", str(output), *more)


def run(harness: Harness, output: Path, *more: str) -> Result:
    return CliRunner().invoke(main, flags(output, *more), obj=harness.services())


def told(harness: Harness, monkeypatch: pytest.MonkeyPatch, *command: str) -> str:
    """What a terminal of 80 columns shows."""
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    with redirect_stdout(terminal), pytest.raises(SystemExit) as ended:
        main(command, obj=harness.services())
    assert ended.value.code == 0
    return re.sub("\x1b\\[[0-9;]*m", "", terminal.getvalue())


@pytest.fixture
def harness() -> Harness:
    return Harness([make_sample(n) for n in range(8)])


@pytest.mark.parametrize(
    ("algo", "alone", "remote", "arms"),
    [
        (["mepic"], False, False, ("full", "prefix", "mepic")),
        ([], False, False, ("full", "prefix", "mepic")),
        (["mepic,prefix", "naive"], False, False, ("full", "mepic,prefix", "naive")),
        (["mepic"], True, False, ("mepic",)),
        ([], True, False, ("mepic",)),
        ([], False, True, ()),
        (["mepic"], False, True, ("mepic",)),
    ],
)
def test_baselines_are_beside_what_is_named(
    algo: list[str], alone: bool, remote: bool, arms: tuple[str, ...]
) -> None:
    assert with_baselines(algo, alone=alone, remote=remote) == arms


def test_a_run_has_both_baselines_unless_it_is_told_otherwise(
    harness: Harness, tmp_path: Path
) -> None:
    assert run(harness, tmp_path / "run", "--algo", "mepic").exit_code == 0
    assert list(read_run(tmp_path / "run").summary) == ["full", "prefix", "mepic"]
    assert run(harness, tmp_path / "only", "--algo", "mepic", "--only").exit_code == 0
    assert list(read_run(tmp_path / "only").summary) == ["mepic"]


def test_a_terminal_gets_bars_a_sentence_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = {"mepic": ForgetfulEngine()}
    made = Harness([make_sample(n) for n in range(8)], engines=engines, weights="real")
    monkeypatch.chdir(tmp_path)
    output = Path("runs/one")
    text = told(made, monkeypatch, *flags(output, "--algo", "mepic"))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "first token, against prefix" in lines
    said = "mepic: first token 2.0 times sooner, as much memory; 1 answer in 8 changes"
    assert said in text
    assert "(f1 0.88 for 1.00)" in " ".join(text.split())
    assert lines[-2:] == ["runs/one", "next: picbench report runs/one"]
    assert "{" not in text, "JSON is for programs"
    assert "TTFT vs full: geometric mean" not in text
    # What stands below tables elsewhere is one command away.
    assert "KV: a block has" not in text
    assert "KV: a block has" in told(made, monkeypatch, "show", str(output))


def test_a_summary_alone_can_be_shown(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(harness, tmp_path / "run", "--algo", "mepic")
    (tmp_path / "run" / "samples.jsonl").unlink()
    shown = told(harness, monkeypatch, "show", str(tmp_path / "run"))
    assert "mepic: first token 2.0 times sooner" in shown


def test_programs_get_json_and_no_picture(harness: Harness, tmp_path: Path) -> None:
    shown = run(harness, tmp_path / "run", "--algo", "mepic").stdout.splitlines()
    assert json.loads(shown[-1])["exit_code"] == 0
    assert "█" not in "".join(shown)


def test_a_quiet_run_on_a_terminal_is_one_line_of_json(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [line] = told(harness, monkeypatch, *flags(tmp_path / "run", "--quiet")).splitlines()
    assert json.loads(line)["status"] == "complete"


def test_bars_are_as_long_as_their_ratios(harness: Harness, tmp_path: Path) -> None:
    run(harness, tmp_path / "run", "--algo", "mepic")
    arms = read_run(tmp_path / "run").summary
    assert reference_of(arms) == "prefix"
    found = [line for line in bar_lines(arms, 80) if "█" in line]
    full, prefix, mepic = (line.split()[-1] for line in found[:3])
    assert (len(full), prefix, mepic) == (49, "█" * 24 + "▌", "█" * 12 + "▎")
    assert reference_of({"mepic": arms["mepic"]}) is None
    assert list(bar_lines({"mepic": arms["mepic"]}, 80)) == []


def test_a_run_with_nothing_to_reuse_says_so_and_what_to_do(tmp_path: Path) -> None:
    made = Harness([alone(n) for n in range(4)])
    said = run(made, tmp_path / "run", "--algo", "mepic")
    line = "only 0.0% of the prompts' tokens can be reused: --reuse 0.9 draws requests"
    assert line in said.stderr and line in said.stdout
    planned = run(made, tmp_path / "planned", "--algo", "mepic", "--dry-run").stdout
    assert "--reuse 0.9 draws" in planned
    assert line not in run(made, tmp_path / "only", "--only", "--algo", "full").stdout
    shared = Harness([make_sample(n) for n in range(4)])
    assert "can be reused" not in run(shared, tmp_path / "shared", "--algo", "mepic").stdout


def test_settings_may_be_in_a_file_and_flags_take_precedence(
    harness: Harness, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("algo: [naive, mepic]\nconcurrency: 2\nchat: off\nlimit: 3\n")
    given = ("--config", str(file), "--limit", "4")
    assert run(harness, tmp_path / "run", *given).exit_code == 0
    config = read_run(tmp_path / "run").manifest["config"]
    assert config["algo"] == ["full", "prefix", "naive", "mepic"]
    assert (config["concurrency"], config["chat"], config["limit"]) == (2, "off", 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limt: 3", "mine.yaml: limt: no such field (did you mean 'limit'?)"),
        ("limit: 3\nlimit: 4", "limit is there twice"),
        ("- limit", "mine.yaml: no mapping"),
        ("limit: x", "--limit 'x'"),
    ],
)
def test_a_file_of_settings_is_checked(
    harness: Harness, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    done = run(harness, tmp_path / "run", "--config", str(file))
    assert done.exit_code == 2
    assert said in done.stderr
    assert not (tmp_path / "run").exists()


def test_rows_can_be_drawn_so_that_their_chunks_recur() -> None:
    flags = {"algo": ("mepic",), "dataset": "musique", "limit": 12, "reuse": 0.75}
    job = prepare(parse_config(flags), load_workload, no_gpu)
    known = {chunk.tokens for sample in job.workload.preload for chunk in sample.chunks}
    chunks = [chunk.tokens for sample in job.workload.samples for chunk in sample.chunks]
    found = sum(len(tokens) for tokens in chunks if tokens in known)
    assert found / sum(map(len, chunks)) == pytest.approx(0.75, abs=0.02)
    assert len(job.workload.samples) == 12
    assert job.workload.synthetic and job.workload.metric == "f1"
    assert len({sample.chunks[0].tokens for sample in job.workload.samples}) > 6
    again = prepare(parse_config(flags), load_workload, no_gpu)
    other = prepare(parse_config(flags | {"reuse": 0.5}), load_workload, no_gpu)
    assert job.fingerprint == again.fingerprint != other.fingerprint

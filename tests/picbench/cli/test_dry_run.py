"""`picbench run --dry-run`: what it estimates, from what, and that it needs nothing for that."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sweep_fakes import BLOCK_BYTES, SweepHarness

from picbench.cli import main
from picbench.store.reader import read_run


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepHarness:
    (tmp_path / "model").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return SweepHarness(model=tmp_path / "model")


def run(harness: SweepHarness, *flags: str) -> Result:
    command = ("run", "--only", "--algo", "full,mepic", "--dataset", "fake", *flags)
    result = CliRunner().invoke(main, command, obj=harness.services())
    assert result.exit_code == 0, result.stderr
    return result


def line(result: Result, name: str) -> str:
    """What a dry run says of something."""
    text = re.sub(r"\s*\n {2,}", " ", result.stdout)
    found = re.search(rf"^ *{name}  +(.*)$", text, re.M)
    assert found, result.stdout
    return found[1].strip()


def test_tokens_and_memory_are_those_of_all_arms(harness: SweepHarness) -> None:
    told = run(harness, "--dry-run", "--kv-blocks", "4096", "--repeats", "2")
    assert line(told, "all tokens").startswith("864 of prompts, 48 of replies at most")
    assert line(told, "KV memory") == f"{2 * 4096 * BLOCK_BYTES / 2**30:.3f} GiB, all pools"
    assert harness.order == [] and list(Path().iterdir()) == []
    # The engine of full serves this arm, too.
    told = run(harness, "--dry-run", "--kv-blocks", "4096", "--algo", "nocontext")
    assert line(told, "KV memory") == f"{2 * 4096 * BLOCK_BYTES / 2**30:.3f} GiB, all pools"


def test_settings_that_were_not_given_are_what_the_help_says(harness: SweepHarness) -> None:
    told = run(harness, "--dry-run")
    shown = {name: line(told, f"--{name}") for name in ("columns", "prompts", "drop", "eager")}
    assert shown == {
        "columns": "LongBench's",
        "prompts": "picbench's own",
        "drop": "none",
        "eager": "off",
    }


@pytest.mark.parametrize("dry", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--output", "file/run"), "--output file/run: cannot be written: Not a directory"),
        (("--output", "file/a/run"), "--output file/a/run: cannot be written: Not a directory"),
        (("--tiers", "host:nanGiB"), "--tiers host:nanGiB: 'nanGiB' is not a size"),
        (("--tiers", "host:infGiB"), "--tiers host:infGiB: 'infGiB' is not a size"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    harness: SweepHarness, dry: list[str], flags: tuple[str, str], said: str
) -> None:
    Path("file").write_text("")
    command = ["run", "--only", "--algo", "full,mepic", "--dataset", "fake", *flags, *dry]
    result = CliRunner().invoke(main, command, obj=harness.services())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"picbench: {said} (")
    assert result.stderr.count("\n") == 1
    assert harness.order == [] and list(Path().iterdir()) == [Path("file")]


def test_time_is_not_known_before_there_is_a_run(harness: SweepHarness) -> None:
    assert line(run(harness, "--dry-run"), "time").startswith("not known: no run of this model")


def test_time_is_what_arms_took_in_earlier_runs(harness: SweepHarness) -> None:
    run(harness, "--limit", "3")
    (path,) = Path("runs").iterdir()
    arms = read_run(path).summary
    slow = {name: replace(arm, busy_s=108.0) for name, arm in arms.items()}
    text = (path / "summary.json").read_text()
    for arm in arms.values():
        text = text.replace(f'"busy_s": {arm.busy_s}', '"busy_s": 108.0')
    (path / "summary.json").write_text(text)
    assert read_run(path).summary == slow
    # Three requests took 108 s in each of two arms, so that six take twice as long.
    assert line(run(harness, "--dry-run"), "time").startswith("7:12 (minutes:seconds), as arms")
    other = run(harness, "--dry-run", "--dtype", "bfloat16")
    assert line(other, "time").startswith("not known")


def test_the_model_may_not_tell_its_memory(
    harness: SweepHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sweep_fakes.MODEL", {"hidden_size": 32})
    assert line(run(harness, "--dry-run"), "KV memory") == "not known"

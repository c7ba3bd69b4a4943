"""`picbench selftest`, over fake engines."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from click.testing import Result as Done
from harness_fakes import FakeEngine, ForgetfulEngine, Harness, make_sample

from picbench.cli import main
from picbench.store.reader import read_run

COUNT = 40


class BrokenReuseEngine(ForgetfulEngine):
    forgotten = COUNT


class LossyEngine(ForgetfulEngine):
    forgotten = COUNT // 2


def selftest(output: Path, *flags: str, wrong: FakeEngine | None = None) -> tuple[Done, Harness]:
    samples = [make_sample(n) for n in range(COUNT)]
    engines = {
        "full#2": FakeEngine("full"),
        "naive": LossyEngine("naive"),
        "shuffled": wrong or BrokenReuseEngine("shuffled"),
    }
    harness = Harness(samples, weights="real", engines=engines)
    arguments = ("selftest", "--output", str(output), *flags)
    return CliRunner().invoke(main, arguments, obj=harness.services()), harness


def test_a_sound_harness_is_exit_0(tmp_path: Path) -> None:
    done, harness = selftest(tmp_path / "run")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok"] * 5
    assert lines[-1] == str(tmp_path / "run")
    assert list(harness.servers) == ["full", "full#2", "naive", "shuffled"]


def test_engines_that_answer_well_from_wrong_kv_are_exit_3(tmp_path: Path) -> None:
    done, _ = selftest(tmp_path / "run", "--json", wrong=FakeEngine("shuffled"))
    assert done.exit_code == 3
    document = json.loads(done.stdout)
    assert document["passed"] is False
    failed = [c["name"] for c in document["controls"] if not c["passed"]]
    assert failed == ["the KV of other chunks"]


def test_its_run_can_be_compared_like_any_other(tmp_path: Path) -> None:
    selftest(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert {row.arm for row in run.rows} == {"full", "full#2", "naive", "shuffled"}
    done = CliRunner().invoke(main, ["compare", str(tmp_path / "run"), "--arms", "full,full#2"])
    assert done.exit_code == 0
    assert "full#2 against full: 40 samples" in done.stdout


@pytest.mark.parametrize("flags", [("--limit", "1"), ("--device", "tpu")])
def test_wrong_usage_is_exit_2(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done, _ = selftest(tmp_path / "run", *flags)
    assert done.exit_code == 2

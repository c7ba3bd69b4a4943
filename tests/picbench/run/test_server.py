"""The process of an arm's engine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness_fakes import (
    DEADLY,
    REFUSED,
    BrokenEngine,
    DyingEngine,
    FakeEngine,
    RefusingEngine,
    StuckEngine,
    make_sample,
)

from picbench.engines.request import Result
from picbench.errors import ConfigError, EngineError
from picbench.run.schedule import to_request
from picbench.run.server import Server, log_tail, run_group
from picbench.store.provenance import arm_environment, collect
from picbench.store.records import Failure, Group

Start = Callable[[type[FakeEngine]], Server]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    # The child process must find the fakes.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    with ExitStack() as stack:

        def begin(engine: type[FakeEngine]) -> Server:
            server = Server("mepic", engine, tmp_path / "mepic.log")
            stack.callback(server.kill)
            return server

        yield begin


def test_groups_cross_and_come_back(start: Start) -> None:
    server = start(FakeEngine)
    assert server.ready()["pid"] != os.getpid()
    samples = [make_sample(1), make_sample(2)]
    batch = server.run([to_request(sample) for sample in samples], 2)
    assert batch.clean
    prompts = [o.prompt_tokens for o in batch.outcomes if isinstance(o, Result)]
    assert prompts == [sample.tokens for sample in samples]
    assert batch.snapshots[1].blocks["prompt"] == 20
    server.close()


def test_arrival_times_and_resets_cross(start: Start) -> None:
    server = start(FakeEngine)
    server.ready()
    batch = server.run([to_request(make_sample(1))], None, [0.25])
    assert batch.clean
    server.reset()
    assert server.run([to_request(make_sample(2))], 1).clean
    server.close()


def test_a_reset_that_fails_raises_here(start: Start) -> None:
    server = start(StuckEngine)
    server.ready()
    server.run([to_request(make_sample(1))], 1)
    with pytest.raises(EngineError, match="arm mepic: requests hold blocks"):
        server.reset()


def test_an_error_of_picbench_crosses_with_its_hint(start: Start) -> None:
    with pytest.raises(ConfigError) as caught:
        start(RefusingEngine).ready()
    assert caught.value.message == "arm mepic: sliding window is not supported"
    assert caught.value.hint == "`model`"


def test_a_foreign_error_becomes_an_engine_error_with_the_log(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineError, match="RuntimeError: no memory left") as caught:
        start(BrokenEngine).ready()
    assert "loading weights" in caught.value.__notes__[0]
    assert capfd.readouterr() == ("", "")


def test_a_process_that_ends_is_an_engine_error_with_its_last_words(start: Start) -> None:
    with pytest.raises(EngineError, match="ended with exit code 9: last words"):
        start(DyingEngine).ready()


def test_an_engine_that_dies_at_work_says_so_every_time(start: Start) -> None:
    server = start(FakeEngine)
    server.ready()
    for _ in range(2):
        with pytest.raises(EngineError, match="ended with exit code 7"):
            server.run([to_request(make_sample(1, first=DEADLY))], 1)


def test_killing_twice_is_harmless(start: Start) -> None:
    server = start(FakeEngine)
    server.kill()
    server.kill()


def test_a_group_says_what_moved_while_it_ran() -> None:
    engine = FakeEngine()
    for _ in range(2):
        batch = run_group(engine, Group((to_request(make_sample(1)),), 1))
        assert batch.moved == {"host": (100, 10)}


def test_a_failing_request_is_found_in_its_group() -> None:
    engine = FakeEngine()
    firsts = [1, REFUSED, 1]
    requests = [to_request(make_sample(n, first=first)) for n, first in enumerate(firsts)]
    batch = run_group(engine, Group(tuple(requests), 3))
    assert [isinstance(o, Failure) for o in batch.outcomes] == [False, True, False]
    assert not batch.clean
    assert engine.calls == [
        "measure",
        "watch_compilations",
        "generate 3 at 3",
        *["generate 1 at 1"] * 3,
    ]


def test_log_tail_drops_colours_and_blank_lines(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert log_tail(log, lines=3) == ""
    log.write_text("a\n\n\x1b[1;31mb\x1b[0m  \n\nc\n\n")
    assert log_tail(log, lines=2) == "b\nc"


def is_running(process: int) -> bool:
    """Whether a process is there and not merely waiting to be noticed."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_a_busy_engine_ends_with_a_killed_parent(tmp_path: Path) -> None:
    """It would hold the memory and the cores that the next engine needs."""
    script = Path(__file__).parents[1] / "busy_engine.py"
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.kill()
    parent.communicate()
    while is_running(child):
        time.sleep(0.01)


def test_threads_wait_asleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert arm_environment()["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert arm_environment()["OMP_WAIT_POLICY"] == "active"


@pytest.mark.parametrize(("count", "found"), [(1, "0"), (2, "0"), (3, None), (64, None)])
def test_threads_do_not_spin_for_each_other_on_few_cores(
    monkeypatch: pytest.MonkeyPatch, count: int, found: str | None
):
    monkeypatch.delenv("VLLM_CPU_ATTN_SPLIT_KV", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)
    assert arm_environment().get("VLLM_CPU_ATTN_SPLIT_KV") == found
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "1")
    assert arm_environment()["VLLM_CPU_ATTN_SPLIT_KV"] == "1"


def test_files_are_utf_8_in_every_locale(monkeypatch: pytest.MonkeyPatch):
    """torch reads its own files as the locale says, and has some that are no EUC-JP."""
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    assert arm_environment()["PYTHONUTF8"] == "1"
    monkeypatch.setenv("PYTHONUTF8", "0")
    assert arm_environment()["PYTHONUTF8"] == "0"


def test_what_arms_get_is_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert collect()["environment"]["OMP_WAIT_POLICY"] == "passive"

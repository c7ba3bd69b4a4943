"""The process of an arm's engine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from operator import methodcaller
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
    UncountedEngine,
    make_sample,
)

from picbench.engines.config import EngineConfig
from picbench.engines.request import Result
from picbench.errors import ConfigError, EngineError, PicBenchError
from picbench.run.schedule import to_request
from picbench.run.server import Server, log_tail, run_group
from picbench.store.provenance import arm_environment, collect
from picbench.store.records import Failure

Start = Callable[[type[FakeEngine]], Server]


@pytest.fixture(autouse=True)
def find_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of engines must find them."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    servers: list[Server] = []

    def begin(engine: type[FakeEngine]) -> Server:
        monkeypatch.setattr(Server, "engine", engine)
        servers.append(Server("mepic", EngineConfig("m"), tmp_path / "mepic.log"))
        return servers[-1]

    yield begin
    for server in servers:
        server.kill()
        server.kill()  # Twice is harmless.


def test_groups_cross_and_come_back(start: Start) -> None:
    server = start(FakeEngine)
    assert server.ready()["pid"] != os.getpid()
    samples = [make_sample(1), make_sample(2)]
    batch = server.run([to_request(sample) for sample in samples], 2)
    assert batch.clean
    prompts = [o.prompt_tokens for o in batch.outcomes if isinstance(o, Result)]
    assert prompts == [sample.tokens for sample in samples]
    assert batch.snapshots[1].blocks["prompt"] == 20
    server.reset()
    assert server.run([to_request(make_sample(1))], None, [0.25]).clean
    server.close()


@pytest.mark.parametrize(
    ("engine", "said"),
    [(StuckEngine, "requests hold blocks"), (UncountedEngine, "RuntimeError: device lost")],
)
def test_an_engine_that_cannot_measure_or_reset_serves_no_more(
    start: Start, engine: type[FakeEngine], said: str
) -> None:
    """It may have dropped KV or not, and count what others served: nothing is known of it."""
    server = start(engine)
    server.ready()
    with pytest.raises(EngineError, match=f"arm mepic: {said}"):
        for _ in range(2):
            server.run([to_request(make_sample(1))], 1)
            server.reset()
    for call in (server.reset, lambda: server.run([to_request(make_sample(1))], 1)):
        with pytest.raises(EngineError, match="the engine's process ended"):
            call()


def test_an_error_of_a_function_that_is_called_leaves_the_engine(start: Start) -> None:
    server = start(FakeEngine)
    server.ready()
    with pytest.raises(EngineError, match=r"arm mepic: AttributeError: .*unknown"):
        server.call(methodcaller("unknown"))
    assert server.run([to_request(make_sample(1))], 1).clean


@pytest.mark.parametrize(
    ("engine", "kind", "said", "hint", "logged"),
    [
        (RefusingEngine, ConfigError, "sliding window is not supported", "`model`", ""),
        (BrokenEngine, EngineError, "RuntimeError: no memory left", "", "loading weights"),
        (DyingEngine, EngineError, "the engine's process ended with exit code 9: last", "if", ""),
    ],
)
def test_an_engine_that_cannot_start_says_why_with_the_end_of_its_log(
    start: Start,
    capfd: pytest.CaptureFixture[str],
    engine: type[FakeEngine],
    kind: type[PicBenchError],
    said: str,
    hint: str,
    logged: str,
) -> None:
    with pytest.raises(kind, match=f"arm mepic: {said}") as caught:
        start(engine).ready()
    assert caught.value.hint.startswith(hint)
    assert logged in caught.value.__notes__[0]
    assert capfd.readouterr() == ("", "")


def test_an_engine_that_dies_at_work_says_so_every_time(start: Start) -> None:
    server = start(FakeEngine)
    server.ready()
    for _ in range(2):
        with pytest.raises(EngineError, match="ended with exit code 7"):
            server.run([to_request(make_sample(1, first=DEADLY))], 1)


def test_a_group_says_what_moved_and_which_of_its_requests_fail() -> None:
    engine = FakeEngine()
    for _ in range(2):
        batch = run_group([to_request(make_sample(1))], 1, None, engine)
        assert batch.moved == {"host": (100, 10)}
    engine.calls.clear()
    firsts = [1, REFUSED, 1]
    requests = [to_request(make_sample(n, first=first)) for n, first in enumerate(firsts)]
    batch = run_group(requests, 3, None, engine)
    assert [isinstance(o, Failure) for o in batch.outcomes] == [False, True, False]
    assert not batch.clean
    alone = ["generate 1 at 1"] * 3
    assert engine.calls == ["measure", "watch_compilations", "generate 3 at 3", *alone]


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


@pytest.mark.parametrize(
    ("name", "cores", "value"),
    [
        ("OMP_WAIT_POLICY", 64, "passive"),  # Threads wait asleep.
        ("PYTHONUTF8", 64, "1"),  # torch reads its own files as the locale says.
        ("VLLM_CPU_ATTN_SPLIT_KV", 2, "0"),  # On few cores threads do not spin for each other.
        ("VLLM_CPU_ATTN_SPLIT_KV", 3, None),
    ],
)
def test_engines_get_an_environment_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str, cores: int, value: str | None
) -> None:
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert arm_environment().get(name) == value
    if name == "OMP_WAIT_POLICY":
        assert collect()["environment"][name] == value
    monkeypatch.setenv(name, "own")
    assert arm_environment()[name] == "own"

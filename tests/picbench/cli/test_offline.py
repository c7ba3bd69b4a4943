"""Without a network everything works on the rows and the model that come with picbench."""

import json
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner, Result
from harness_fakes import FakeEngine, FakeServer, no_gpu

from picbench.cli import main
from picbench.engines.config import EngineConfig
from picbench.run.session import Services


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*address: Any) -> NoReturn:
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def launch(name: str, config: EngineConfig, log: Path) -> FakeServer:
    return FakeServer(name, config, [], FakeEngine(name))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, obj=Services(launch=launch, memory=no_gpu))


def test_every_command_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled rows, the testbed's tokenizer, and engines that are fakes."""
    monkeypatch.chdir(tmp_path)
    flags = ("--only", "--dataset", "musique", "--limit", "4", "--algo", "full,mepic")
    for folder in ("one", "two"):
        done = invoke("run", *flags, "--offline", "--output", folder)
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["status"] == "complete"
    for command in (
        ("run", *flags, "--dry-run"),
        ("compare", "one", "two"),
        ("baseline", "save", "one", "mine"),
        ("gate", "two", "--baseline", "mine"),
        ("report", "one", "--output", "report.html"),
        ("table", "one"),
        ("show", "one"),
        ("rescore", "one"),
        ("list", "datasets"),
    ):
        done = invoke(*command)
        assert done.exit_code == 0, (command, done.stderr)
    (tmp_path / "grid.yaml").write_text(
        "base: {dataset: musique, limit: 2, algo: [full]}\ngrid: {seed: [1]}\n"
    )
    assert invoke("sweep", "grid.yaml", "--offline", "--output", "grid").exit_code == 0

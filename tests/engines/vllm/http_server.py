"""vLLM's own server, started in a process of its own as `docs/serving.md` says.

Its engine and worker are forked (`prefork`), but where a test gives a command of its own.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from serving_document import arguments

from picbench.engines.vllm.serve import TEMPLATE
from picbench.engines.vllm.settings import KEY, PicSettings

PREFORK = Path(__file__).with_name("prefork.py")

#: What the model is called in requests.
MODEL = "testbed"

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "picbench",
    # Logprobs would compile a function on first use (20 s).
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A running server; requests to it are JSON, and so are answers. Its log is in `folder`."""

    client: httpx.Client
    folder: Path

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and answer of a request to the model."""
        answer = self.client.post(path, json={"model": MODEL, **body})
        return answer.status_code, answer.json()

    def stream(self, path: str, **body: Any) -> Iterator[Any]:
        """The events of a streamed answer; leaving the iteration disconnects."""
        asked = {"model": MODEL, "stream": True, **body}
        with self.client.stream("POST", path, json=asked) as answer:
            for line in answer.iter_lines():
                content = line.removeprefix("data: ")
                if content and content != "[DONE]":
                    yield json.loads(content)

    def metric(self, name: str) -> float:
        """The value of one of vLLM's metrics."""
        lines = self.client.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


@contextmanager
def http_server(
    model: Path,
    folder: Path,
    settings: PicSettings,
    environment: Mapping[str, str] = MappingProxyType({}),
    **limits: Any,
) -> Iterator[HttpServer]:
    """A server for a model, from when it is ready; its output is in ``server.log``."""
    port = free_port()
    command = _command(model, settings, port=port, **limits)
    with running(command, folder, port, environment) as (server, _):
        yield server


def series(server: HttpServer) -> dict[str, float]:
    """picbench's series, by name and label; the model's and the engine's left out."""
    found = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            labels = [v for k, v in sample.labels.items() if k not in ("engine", "model_name")]
            if sample.name.startswith("pic_") and not sample.name.endswith("_created"):
                found["|".join([sample.name, *labels])] = sample.value
    return found


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def running(
    command: list[str],
    folder: Path,
    port: int,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[HttpServer, "subprocess.Popen[bytes]"]]:
    """The server that a command starts, and its process; the output is in ``server.log``.

    An empty variable of its `environment` is not set.
    """
    log = folder / "server.log"
    with log.open("wb") as output:
        variables = {**os.environ, **ENVIRONMENT, **environment}
        variables = {name: value for name, value in variables.items() if value}
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            _wait(process, client, log)
            yield HttpServer(client, folder), process
    finally:
        process.terminate()
        process.wait(60)


def refused_start(
    command: list[str], environment: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, list[str]]:
    """The exit code and the output, line by line, of a server that does not start.

    Raises TimeoutExpired if it runs all the same.
    """
    done = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout.splitlines()


def plain_command(model: Path, port: int, *flags: str) -> list[str]:
    """vLLM's own command, with what a small model needs on a CPU."""
    (_, *launcher), _ = arguments("cpu")
    given = ("--model", str(model), "--served-model-name", MODEL, "--dtype", "float32")
    host = ("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512")
    return [sys.executable, *_forking(launcher), *given, *host, *flags]


def _command(model: Path, settings: PicSettings, **limits: Any) -> list[str]:
    (_, *launcher), documented = arguments("cpu")
    given: dict[str, Any] = documented | {
        "model": str(model),
        "served-model-name": MODEL,
        "host": "127.0.0.1",
        "dtype": "float32",
        "additional-config": json.dumps({KEY: asdict(settings)}),
        "chat-template": TEMPLATE,
        "middleware": settings.middleware,
        **limits,
    }
    flags = [
        (f"--{name}", str(value))
        for name, values in given.items()
        for value in (values if isinstance(values, tuple) else (values,))
    ]
    words = [word for flag in flags for word in flag]
    return [sys.executable, *_forking(launcher), *filter(None, words)]


def _forking(launcher: list[str]) -> tuple[str, str]:
    """The documented ``-m MODULE``, with processes that are forked."""
    minus_m, module = launcher
    assert minus_m == "-m"
    return str(PREFORK), module


def _wait(process: "subprocess.Popen[bytes]", client: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-6000:]}")

"""vLLM's own server with picbench's scheduler and workers, in a process of its own."""

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

from picbench.engines.vllm.settings import (
    CONNECTOR,
    CONNECTOR_MODULE,
    CPU_WORKER,
    KEY,
    SCHEDULER,
    PicSettings,
)

#: vLLM's `python -m vllm.entrypoints.openai.api_server` is a deprecated name of it.
SERVER = "vllm.entrypoints.launchers.api_server.entry"

#: What the model is called in requests.
MODEL = "tiny"

#: A chat template that puts messages one after another.
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"

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
    """A running server; requests to it are JSON, and so are answers."""

    client: httpx.Client

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

    def gauge(self, name: str) -> float:
        """The value of one of vLLM's metrics."""
        lines = self.client.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


@contextmanager
def http_server(
    model: Path,
    folder: Path,
    settings: PicSettings,
    environment: Mapping[str, str] = MappingProxyType({}),
    **arguments: Any,
) -> Iterator[HttpServer]:
    """A server for a model, from when it is ready; its output is in ``server.log``."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    given: Mapping[str, Any] = {
        "model": str(model),
        "served-model-name": MODEL,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "block-size": 16,
        "scheduler-cls": SCHEDULER,
        "worker-cls": CPU_WORKER,
        "additional-config": json.dumps({KEY: asdict(settings)}),
        "kv-transfer-config": json.dumps(
            {
                "kv_connector": CONNECTOR,
                "kv_connector_module_path": CONNECTOR_MODULE,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
            }
        ),
        "chat-template": str(template),
        **arguments,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", SERVER, *words, "--enforce-eager"]
    command += ["--enable-prompt-tokens-details", "--no-async-scheduling"]
    log = folder / "server.log"
    with log.open("wb") as output:
        variables = {**os.environ, **ENVIRONMENT, **environment}
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            _wait(process, client, log)
            yield HttpServer(client)
    finally:
        process.terminate()
        process.wait(60)


def _wait(process: "subprocess.Popen[bytes]", client: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-6000:]}")

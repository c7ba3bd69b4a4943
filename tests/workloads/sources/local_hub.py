"""A hub on this machine, for tests: an HTTP server, and processes that know no other hub.

huggingface_hub reads its environment when it is imported, so every case is a process.
"""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"

#: Status, body and headers.
Answer = tuple[int, bytes, dict[str, str]]


@dataclass
class Hub:
    """What a hub has is for subclasses to say; `seen` are the requests that it saw."""

    endpoint: str = ""
    seen: list[str] = field(default_factory=list)

    def answer(self, path: str, posted: bytes) -> Answer:
        """The answer to a request for `path`."""
        raise NotImplementedError


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._reply(send=False)

    def do_GET(self) -> None:
        self._reply(send=True)

    def do_POST(self) -> None:
        self._reply(send=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _reply(self, *, send: bool) -> None:
        self.hub.seen.append(f"{self.command} {self.path}")
        posted = b""
        if self.command == "POST":
            posted = self.rfile.read(int(self.headers["Content-Length"]))
        status, body, headers = self.hub.answer(self.path, posted)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and status == 200:
            first, last = int(wanted[1]), int(wanted[2] or len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            status, body = 206, body[first : last + 1]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if send:
            self.wfile.write(body)


@contextmanager
def served(hub: Hub) -> Iterator[None]:
    """The hub answers at its `endpoint`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def python(
    home: Path, endpoint: str, arguments: Sequence[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python on a machine with a cache of its own, whose hub is at `endpoint`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HTTP"))} | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home / "hf"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **variables,
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)

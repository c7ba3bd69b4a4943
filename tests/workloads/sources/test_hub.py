"""The hub's rows, from a hub on this machine.

huggingface_hub reads its environment when it is imported, so every case is a process.
"""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROW = {
    "input": "Where?",
    "context": "Passage 1:\nAda lived in Oslo.\nPassage 2:\nOslo lies in Norway.",
    "answers": ["Norway"],
    "dataset": "musique",
    "_id": "one",
}


def archive(**files: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as made:
        for name, text in files.items():
            made.writestr(f"data/{name}.jsonl", text)
    return content.getvalue()


GOOD = archive(musique=json.dumps(ROW) + "\n", musique_e="other rows\n")


@dataclass
class Hub:
    """A repository ``me/copy`` with one file at one commit, and the requests that it saw."""

    content: bytes = GOOD
    endpoint: str = ""
    seen: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(self.hub.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, body: bytes) -> None:
        self.hub.seen.append(f"{self.command} {self.path}")
        repository, _, rest = self.path.removeprefix("/datasets/").partition("/resolve/")
        if repository not in ("me/copy", "zai-org/LongBench"):
            self._refuse("RepoNotFound")
        elif repository == "me/copy" and rest.split("/")[0] not in ("main", COMMIT):
            self._refuse("RevisionNotFound")
        else:
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT if repository == "me/copy" else rest[:40])
            self.send_header("ETag", f'"{hashlib.sha256(self.hub.content).hexdigest()}"')
            self.send_header("Content-Length", str(len(self.hub.content)))
            self.end_headers()
            self.wfile.write(body)

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": made}))
    made.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Machine:
    """A machine with a cache of its own, whose hub is at `endpoint`."""

    home: Path
    endpoint: str

    def python(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HTTP"))} | {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.home / "hf"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **variables,
        }
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    def locate(self, data: str, dataset: str = "musique", **variables: str) -> Any:
        done = self.python("-c", _LOCATE, data, dataset, **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def refusal(self, data: str, *flags: str, **variables: str) -> str:
        """The one line that `picbench run` prints."""
        done = self.python("-c", _RUN, "--data", data, *flags, **variables)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        return line


_LOCATE = """
import json, sys
from dataclasses import asdict
from picbench.workloads.sources.source import locate
data, dataset = sys.argv[1:]
found = locate(data, dataset)
print(json.dumps({"rows": found.path.read_text(), "origin": asdict(found.origin)}))
"""

_RUN = """
import sys
from picbench.cli import main
main(["run", "--dataset", "musique", "--dry-run", *sys.argv[1:]])
"""

_SUMMARY = """
import json, sys
from dataclasses import asdict
from picbench.run.session import make_summary
from picbench.settings import parse_config
from picbench.run.job import prepare
from picbench.run.workload import load_workload
config = parse_config({"algo": ("full",), "dataset": "musique", "data": sys.argv[1]})
job = prepare(config, load_workload, lambda _: None)
print(json.dumps(asdict(make_summary(job, {}, {}, "complete").workload)))
"""


@pytest.fixture
def machine(tmp_path: Path, hub: Hub) -> Machine:
    return Machine(tmp_path, hub.endpoint)


def test_rows_come_with_their_origin(machine: Machine) -> None:
    found = machine.locate("hub:me/copy")
    assert json.loads(found["rows"]) == ROW
    assert found["origin"] == {
        "repository": "me/copy",
        "revision": COMMIT,
        "file": "data.zip",
        "sha256": hashlib.sha256(GOOD).hexdigest(),
        "pinned": False,
    }


def test_the_origin_is_kept_with_a_run(machine: Machine) -> None:
    done = machine.python("-c", _SUMMARY, "hub:me/copy")
    assert done.returncode == 0, done.stderr
    workload = json.loads(done.stdout.splitlines()[-1])
    assert workload["samples"] == 1
    assert workload["origin"]["revision"] == COMMIT
    assert workload["origin"]["sha256"] == hashlib.sha256(GOOD).hexdigest()


def test_what_was_fetched_once_is_there_offline(machine: Machine, hub: Hub) -> None:
    online = machine.locate("hub:me/copy")
    asked = len(hub.seen)
    assert machine.locate("hub:me/copy", HF_HUB_OFFLINE="1") == online
    assert len(hub.seen) == asked


@pytest.mark.parametrize("how", [("--offline", {}), ("", {"HF_HUB_OFFLINE": "1"})])
def test_offline_without_a_cache_names_the_flags(
    how: tuple[str, dict[str, str]], machine: Machine, hub: Hub
) -> None:
    flag, variables = how
    line = machine.refusal("hub", *filter(None, [flag]), **variables)
    assert "zai-org/LongBench at 5e628be450b7 is not in the hub's cache" in line
    assert "--offline" in line
    assert "--data bundled" in line
    assert "--data DIR" in line
    assert hub.seen == []


def test_without_a_network_one_line_names_the_flags(tmp_path: Path) -> None:
    line = Machine(tmp_path, "http://127.0.0.1:9").refusal("hub")
    assert "the hub cannot be reached" in line
    assert "--data bundled" in line
    assert "--data DIR" in line


@pytest.mark.parametrize(
    ("data", "named"),
    [("hub:me/nothing", "me/nothing"), ("hub:me/copy@v9", "me/copy at v9")],
)
def test_what_the_hub_does_not_have_is_named(data: str, named: str, machine: Machine) -> None:
    line = machine.refusal(data)
    assert named in line
    assert "404" in line


def test_content_that_is_not_the_pinned_one_is_refused(machine: Machine) -> None:
    line = machine.refusal("hub")
    assert hashlib.sha256(GOOD).hexdigest() in line
    assert "pinned to cb45b11a4133" in line


@pytest.mark.parametrize(
    ("content", "named"),
    [(archive(samsum="x"), "has no musique.jsonl"), (b"no archive", "not a zip file")],
)
def test_an_archive_without_the_rows_is_refused(
    content: bytes, named: str, machine: Machine, hub: Hub
) -> None:
    hub.content = content
    assert named in machine.refusal("hub:me/copy")


def test_a_malformed_row_is_named_by_file_and_line(machine: Machine, hub: Hub) -> None:
    hub.content = archive(musique=json.dumps(ROW) + "\n{}\n")
    assert "musique.jsonl:2: field 'input'" in machine.refusal("hub:me/copy")

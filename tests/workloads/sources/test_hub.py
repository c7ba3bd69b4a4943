"""The hub's rows, from a hub on this machine."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local_hub import COMMIT, Answer, Hub, python, served

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
class ArchiveHub(Hub):
    """A repository ``me/copy`` with one file at one commit, and LongBench's with the same file."""

    content: bytes = GOOD

    def answer(self, path: str, posted: bytes) -> Answer:
        repository, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
        if repository not in ("me/copy", "zai-org/LongBench"):
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        if repository == "me/copy" and rest.split("/")[0] not in ("main", COMMIT):
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        commit = COMMIT if repository == "me/copy" else rest[:40]
        etag = hashlib.sha256(self.content).hexdigest()
        return 200, self.content, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}


@pytest.fixture
def hub() -> Iterator[ArchiveHub]:
    made = ArchiveHub()
    with served(made):
        yield made


@dataclass
class Machine:
    """A machine with a cache of its own, whose hub is at `endpoint`."""

    home: Path
    endpoint: str

    def locate(self, data: str, dataset: str = "musique", **variables: str) -> Any:
        done = python(self.home, self.endpoint, ["-c", _LOCATE, data, dataset], **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def refusal(self, data: str, *flags: str, **variables: str) -> str:
        """The one line that `picbench run` prints."""
        arguments = ["-c", _RUN, "--data", data, *flags]
        done = python(self.home, self.endpoint, arguments, **variables)
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
from picbench.run.session import about
from picbench.settings import parse_config
from picbench.run.job import prepare
from picbench.run.workload import load_workload
config = parse_config({"algo": ("full",), "dataset": "musique", "data": sys.argv[1]})
job = prepare(config, load_workload, lambda _: None)
print(json.dumps(asdict(about(job, {})["workload"])))
"""


@pytest.fixture
def machine(tmp_path: Path, hub: ArchiveHub) -> Machine:
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
    done = python(machine.home, machine.endpoint, ["-c", _SUMMARY, "hub:me/copy"])
    assert done.returncode == 0, done.stderr
    workload = json.loads(done.stdout.splitlines()[-1])
    assert workload["samples"] == 1
    assert workload["origin"]["revision"] == COMMIT
    assert workload["origin"]["sha256"] == hashlib.sha256(GOOD).hexdigest()


def test_what_was_fetched_once_is_there_offline(machine: Machine, hub: ArchiveHub) -> None:
    online = machine.locate("hub:me/copy")
    asked = len(hub.seen)
    assert machine.locate("hub:me/copy", HF_HUB_OFFLINE="1") == online
    assert len(hub.seen) == asked


@pytest.mark.parametrize("how", [("--offline", {}), ("", {"HF_HUB_OFFLINE": "1"})])
def test_offline_without_a_cache_names_the_flags(
    how: tuple[str, dict[str, str]], machine: Machine, hub: ArchiveHub
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
    content: bytes, named: str, machine: Machine, hub: ArchiveHub
) -> None:
    hub.content = content
    assert named in machine.refusal("hub:me/copy")


def test_a_malformed_row_is_named_by_file_and_line(machine: Machine, hub: ArchiveHub) -> None:
    hub.content = archive(musique=json.dumps(ROW) + "\n{}\n")
    assert "musique.jsonl:2: field 'input'" in machine.refusal("hub:me/copy")

"""Splits of data sets on the hub, from a hub and a cache on this machine."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from local_hub import COMMIT, Answer, Hub, python, served

from picbench.errors import ConfigError
from picbench.workloads.sources.hub import Origin
from picbench.workloads.sources.hub_split import HubSplit, OpenedSplit, open_split, parse_split

CARD = """---
configs:
- config_name: default
  data_files:
  - split: validation
    path: data/validation-*.parquet
  - split: train
    path: data/train-*.parquet
---
"""


def rows(split: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{split}{n}",
            "context": "Oslo is the capital of Norway.",
            "question": "Where is Oslo?",
            "answers": {"text": ["Norway"], "answer_start": [23]},
        }
        for n in range(4)
    ]


def parquet(split: str) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows(split)), out)
    return bytes(out.getvalue())


def content(card: str = CARD, **more: bytes) -> dict[str, bytes]:
    return {
        "README.md": card.encode(),
        "data/train-00000-of-00001.parquet": parquet("train"),
        "data/validation-00000-of-00001.parquet": parquet("validation"),
        **more,
    }


def cached(cache: Path, files: dict[str, bytes], repository: str = "me/qa") -> Path:
    """A repository in a hub cache, as a download leaves it."""
    folder = cache / f"datasets--{repository.replace('/', '--')}"
    for name, data in files.items():
        file = folder / "snapshots" / COMMIT / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache of this process."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def opened(text: str) -> OpenedSplit:
    return open_split(parse_split(text), offline=True, stream=False)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("hf:me/qa", HubSplit("me/qa")),
        ("hf:me/qa:test", HubSplit("me/qa", split="test")),
        ("hf:me/qa@v2:test", HubSplit("me/qa", "v2", split="test")),
        ("hf:me/qa@refs/convert/parquet", HubSplit("me/qa", "refs/convert/parquet")),
        ("hf:me/qa:distractor/test", HubSplit("me/qa", "main", "distractor", "test")),
    ],
)
def test_forms(text: str, parsed: HubSplit) -> None:
    assert parse_split(text) == parsed


@pytest.mark.parametrize(
    "text", ["hf:", "hf:qa", "hf:me/qa@", "hf:me/qa:", "hf:a/b/c", "hf:a/b:c/d/e"]
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        parse_split(text)


def test_rows_come_with_their_origin(cache: Path) -> None:
    cached(cache, content())
    found = opened("hf:me/qa:validation")
    records = list(found.records())
    assert [record.values() for record in records] == rows("validation")
    assert records[1].source == "hf:me/qa@0123456789ab:default/validation row 2"
    assert found.origin == Origin("me/qa", COMMIT, "default/validation", None, pinned=False)
    assert opened(f"hf:me/qa@{COMMIT}:train").origin.pinned


def test_data_files_beside_a_loading_script_are_read(cache: Path) -> None:
    cached(cache, content("") | {"qa.py": b"raise SystemExit"})
    assert [r.values() for r in opened("hf:me/qa:train").records()] == rows("train")


def test_the_only_split_needs_no_name(cache: Path) -> None:
    files = content("")
    cached(cache, {name: files[name] for name in files if "train" not in name})
    assert len(list(opened("hf:me/qa").records())) == 4


CONFIGS = """---
configs:
- config_name: plain
  data_files: data/train-*.parquet
- config_name: hard
  data_files: data/validation-*.parquet
---
"""


@pytest.mark.parametrize(
    ("text", "card", "line"),
    [
        ("hf:me/qa", CARD, "which split? there are: validation, train"),
        ("hf:me/qa:test", CARD, "no split 'test'; there are: validation, train"),
        ("hf:me/qa", CONFIGS, "which subset? there are: plain, hard"),
        ("hf:me/qa:plane/train", CONFIGS, "no subset 'plane'; there are: plain, hard"),
        (
            "hf:me/qa@v9",
            CARD,
            "revision 'v9' is not in the hub's cache on this machine; there are: main",
        ),
        ("hf:me/none", CARD, "revision 'main' is not in the hub's cache on this machine, and"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(
    text: str, card: str, line: str, cache: Path
) -> None:
    cached(cache, content(card))
    with pytest.raises(ConfigError) as caught:
        opened(text)
    assert line in caught.value.message
    assert caught.value.message.startswith("`data=hf:me/")
    assert caught.value.hint


def test_a_copy_without_its_data_is_refused(cache: Path) -> None:
    cached(cache, {"README.md": CARD.encode()})
    with pytest.raises(ConfigError, match="`data=hf:me/qa`: ") as caught:
        opened("hf:me/qa:train")
    assert "\n" not in str(caught.value)


@dataclass
class DataHub(Hub):
    """A hub with the data set ``me/qa``."""

    files: dict[str, bytes] = field(default_factory=dict)

    def answer(self, path: str, posted: bytes) -> Answer:
        if posted:
            # What paths are: the files that are asked for.
            known = {entry["path"]: entry for entry in self.tree()}
            return 200, _json([known[p] for p in json.loads(posted)["paths"] if p in known]), {}
        found = re.match(rf"/datasets/me/qa/resolve/(main|{COMMIT})/(.+)", path)
        if found and found[2] in self.files:
            data = self.files[found[2]]
            return 200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{_sha(data)}"'}
        if found or path.startswith("/datasets/me/qa/resolve/"):
            return 404, b"", {"X-Error-Code": "EntryNotFound" if found else "RevisionNotFound"}
        if re.match(rf"/api/datasets/me/qa(/revision/(main|{COMMIT}))?(\?|$)", path):
            files = [{"rfilename": name} for name in self.files]
            return 200, _json({"id": "me/qa", "sha": COMMIT, "siblings": files}), {}
        if path.startswith("/api/datasets/me/qa/tree/"):
            below = path.partition(COMMIT)[2].partition("?")[0].strip("/")
            return 200, _json(list(self.tree(below, deep="recursive=true" in path.lower()))), {}
        if path.startswith("/api/datasets/me/qa/refs"):
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": COMMIT}
            return 200, _json({"branches": [main], "tags": [], "converts": []}), {}
        code = "RevisionNotFound" if "/me/qa/" in path else "RepoNotFound"
        return 404, b"", {"X-Error-Code": code}

    def tree(self, below: str = "", *, deep: bool = True) -> Iterator[dict[str, Any]]:
        """What the hub lists below a folder: files, and folders where it does not go deeper."""
        folders = set()
        for name, data in self.files.items():
            inside = name.removeprefix(below).strip("/")
            if name.startswith(below) and (deep or "/" not in inside):
                yield {"type": "file", "path": name, "size": len(data), "oid": _sha(data)[:40]}
            elif name.startswith(below):
                folders.add(f"{below}/{inside.partition('/')[0]}".strip("/"))
        for folder in folders:
            yield {"type": "directory", "path": folder, "oid": _sha(folder.encode())[:40]}


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.fixture
def hub() -> Iterator[DataHub]:
    made = DataHub(files=content())
    with served(made):
        yield made


_OPEN = """
import json, sys
from picbench.errors import ConfigError
from picbench.workloads.sources.hub_split import open_split, parse_split
for case in sys.argv[1:]:
    data, how, count = case.split()
    try:
        found = open_split(parse_split(data), offline=how == "offline", stream=how == "stream")
    except ConfigError as error:
        print(json.dumps(str(error)))
        continue
    records = found.records()
    ids = [next(records).values()["id"] for _ in range(int(count))]
    print(json.dumps([ids, found.origin.revision]))
"""


def ask(hub: DataHub, home: Path, *cases: str) -> list[Any]:
    """The ids of rows and their commit, or the error, of each of ``data stream|fetch count``."""
    done = python(home, hub.endpoint, ["-c", _OPEN, *cases])
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_split_is_streamed_or_fetched(hub: DataHub, tmp_path: Path) -> None:
    """A stream keeps nothing; what was fetched is there offline, at the commit it was."""
    streamed, absent, fetched, offline, *refused = ask(
        hub,
        tmp_path,
        "hf:me/qa:train stream 2",
        "hf:me/qa:train offline 1",
        "hf:me/qa:validation fetch 4",
        f"hf:me/qa@{COMMIT}:train offline 1",
        "hf:me/qa@v9:train fetch 1",
        "hf:me/none:train fetch 1",
        "hf:me/none:train stream 1",
    )
    assert streamed == [["train0", "train1"], COMMIT]
    assert "`data=hf:me/qa`" in absent
    assert fetched == [[f"validation{n}" for n in range(4)], COMMIT]
    assert offline == [["train0"], COMMIT]
    assert refused[0].startswith("`data=hf:me/qa`: no revision 'v9'; there are: main")
    assert refused[1].startswith("`data=hf:me/none`: no such data set on the hub")
    assert refused[1] == refused[2]


def test_a_run_takes_a_cached_split_offline(tmp_path: Path) -> None:
    cached(tmp_path / "hf" / "hub", content())
    flags = ["--dataset", "qa", "--data", "hf:me/qa:train", "--columns", "squad", "--limit", "3"]
    code = "import sys; from picbench.cli import main; main(sys.argv[1:])"
    nowhere, arguments = "http://127.0.0.1:9", ["-c", code, "run", "--dry-run", *flags]
    done = python(tmp_path, nowhere, arguments, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"requests +3 to each", done.stdout)
    assert re.search(r"--columns +squad", done.stdout)

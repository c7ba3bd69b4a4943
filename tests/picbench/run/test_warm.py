"""`picbench warm`: chunk files, and chunks that a second engine finds."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from picbench.cli import main
from picbench.errors import ConfigError, DataError
from picbench.run.traffic_file import read_chunks
from picbench.store.provenance import arm_environment


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def warm(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own, as users run it: its chunks outlive it."""
    command = [sys.executable, "-c", "from picbench.cli import main; main()", "warm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def warm_here(*arguments: str) -> Result:
    """The command in this process, which has loaded vLLM; what it sets there is undone."""
    return CliRunner(env=arm_environment()).invoke(main, ["warm", *arguments])


def test_chunks_are_texts_or_tokens_and_may_name_documents_as_such(tmp_path: Path) -> None:
    lines = [{"text": "a b"}, "", {"tokens": [1, 2, 3]}]
    lines += [{"text": "b", "document": "a b c"}, {"tokens": [2], "document": [1, 2]}]
    found = read_chunks(write(tmp_path / "c.jsonl", *lines))
    assert [(chunk.text, chunk.tokens, chunk.document) for chunk in found] == [
        ("a b", None, None),
        (None, (1, 2, 3), None),
        ("b", None, "a b c"),
        (None, (2,), (1, 2)),
    ]
    pq.write_table(pa.table({"text": ["a b", "c"]}), tmp_path / "c.parquet")
    assert [chunk.text for chunk in read_chunks(tmp_path / "c.parquet")] == ["a b", "c"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "EOF while parsing"),
        ('{"text": ""}', "text: string should have at least 1"),
        ('{"tokens": []}', "tokens: tuple should have at least 1"),
        ('{"tokens": ["a"]}', "tokens.0: input should be a valid integer"),
        ('{"txt": "a"}', "txt: extra inputs"),
        ("{}", "needs text or tokens"),
        ('{"text": "a", "tokens": [1]}', "not both"),
        ('{"text": "a", "document": [1]}', "its document must be text for text"),
        ('{"tokens": [1], "document": "a"}', "its document must be text for text"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    file = write(tmp_path / "c.jsonl", {"text": "a"}, line)
    with pytest.raises(DataError, match=problem) as caught:
        read_chunks(file)
    assert f"{file}:2: " in str(caught.value)


def test_no_file_and_no_chunks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`chunks`"):
        read_chunks(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="no chunks"):
        read_chunks(write(tmp_path / "c.jsonl", ""))


@pytest.mark.engine
def test_a_second_run_finds_everything_stored(tmp_path: Path) -> None:
    lines: list[object] = [{"tokens": list(range(10, 90))}, {"tokens": [7, 8, 9]}]
    lines.append({"tokens": list(range(10, 90)), "document": list(range(90))})
    text = "She lived in a small house by the river and read the news every morning. " * 3
    lines.append({"text": text, "document": f"Ada was a writer. {text}She wrote a lot."})
    file = write(tmp_path / "c.jsonl", *lines)
    arguments = ["--chunks", str(file), "--tiers", f"disk:{tmp_path / 'kv'}:64MiB"]
    arguments += ["--dtype", "float32", "--algo", "mepic:context=document"]
    first, second = warm(*arguments), warm_here(*arguments)
    assert first.returncode == second.exit_code == 0, first.stderr + second.stderr
    cells = [
        [cell.strip() for cell in line.split("│")[2:-1]]
        for result in (first, second)
        for line in result.stdout.splitlines()
        if "│" in line
    ]
    (stored, *_), (stored_again, *_) = cells
    assert (stored, stored_again) == ("3", "0")
    assert len(list((tmp_path / "kv").glob("values/*/*"))) == 3
    assert all("\n3 of 4 chunks are in tiers\n" in result.stdout for result in (first, second))
    assert "1 of 4 chunks have nothing to store: requests recompute all" in first.stdout


@pytest.mark.engine
def test_a_tier_without_room_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "c.jsonl", {"tokens": list(range(10, 90))})
    arguments = ["--chunks", str(file), "--tiers", "host:4KiB", "--dtype", "float32"]
    result = warm_here(*arguments)
    assert result.exit_code == 4
    assert "1 of 1 chunks were not stored" in result.stderr

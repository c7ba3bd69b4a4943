import bz2
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from picbench.errors import DataError
from picbench.workloads.load import load_samples
from picbench.workloads.sources.records import file_records
from picbench.workloads.sources.source import locate, row_files

ROWS: list[dict[str, Any]] = [
    {
        "input": f"Question {n}?",
        "context": "Passage 1:\nAda lived in Oslo.\nPassage 2:\nOslo lies in Norway.",
        "answers": ["Norway", "in Norway"],
        "_id": f"row{n}",
        "gold_passages": [1],
    }
    for n in range(3)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write(path: Path) -> Path:
    """ROWS in the format that the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(ROWS)
    match path.suffix:
        case ".parquet":
            pq.write_table(table, path, row_group_size=2)
        case ".arrow":
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        case ".json":
            path.write_text(json.dumps({"version": "1", "data": ROWS}))
        case ".gz":
            path.write_bytes(gzip.compress(LINES))
        case ".bz2":
            path.write_bytes(bz2.compress(LINES))
        case _:
            path.write_bytes(LINES)
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


NAMES = ["a.jsonl", "a.json", "a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.bz2", "rows"]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_rows_come_from_every_format(name: str, tmp_path: Path) -> None:
    found = list(file_records(write(tmp_path / "of [mine]" / name)))
    assert [record.values() for record in found] == ROWS
    assert len({record.source for record in found}) == 3
    assert all(str(tmp_path) in record.source for record in found)


@pytest.mark.parametrize("name", ["musique.parquet", "musique/part.arrow", "musique/a.json"])
def test_a_folder_may_have_any_format(name: str, tmp_path: Path, word_tokenizer: Any) -> None:
    write(tmp_path / name)
    samples = load_samples("musique", tmp_path, word_tokenizer)
    assert [sample.id for sample in samples] == ["row0", "row1", "row2"]
    assert [len(sample.chunks) for sample in samples] == [2, 2, 2]


def test_a_data_set_that_was_saved_to_disk_is_read(tmp_path: Path) -> None:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "musique")
    (file,) = row_files(tmp_path, "musique")
    assert [record.values() for record in file_records(file)] == ROWS


def test_lines_of_json_are_named_by_number(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"n": "\xe2\x80\xa8"}\n\n \n{"n": 2}\r\n[3]\n')
    found = list(file_records(file))
    assert [record.source for record in found] == [f"{file}:{n}" for n in (1, 4, 5)]
    assert [record.values()["n"] for record in found[:2]] == ["\u2028", 2]
    with pytest.raises(DataError, match=r"a\.jsonl:5: not a JSON object"):
        found[2].values()


def test_only_the_first_rows_are_read(tmp_path: Path) -> None:
    """A file whose last row group is broken gives its first ones."""
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"input": [f"row {n}" for n in range(200)]}), file, row_group_size=1)
    content = bytearray(file.read_bytes())
    last = pq.ParquetFile(file).metadata.row_group(199).column(0)
    start, length = last.dictionary_page_offset or last.data_page_offset, last.total_compressed_size
    content[start : start + length] = b"\xff" * length
    file.write_bytes(content)
    records = file_records(file)
    assert [next(records).values()["input"] for _ in range(20)] == [f"row {n}" for n in range(20)]
    with pytest.raises(DataError, match=r"cannot read .*a\.parquet"):
        list(records)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.parquet", b"no parquet", "cannot read"),
        ("a.arrow", b"no arrow", "cannot read"),
        ("a.jsonl.gz", b"no gzip", "cannot read"),
        ("a.json", b'{"data": 3}', "neither a list of rows nor an object"),
        ("a.json", b"{", "EOF"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    name: str, content: bytes, named: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DataError, match=named) as caught:
        list(file_records(file))
    assert str(file) in caught.value.message
    assert "\n" not in str(caught.value)


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.touch()
    assert list(file_records(file)) == []


def test_files_are_found_by_name(tmp_path: Path) -> None:
    assert row_files(tmp_path, "musique") == []
    (tmp_path / "musique").mkdir()
    for name in ("b.parquet", "a.jsonl.gz", "notes.md", "state.json"):
        (tmp_path / "musique" / name).touch()
    assert [file.name for file in row_files(tmp_path, "musique")] == ["a.jsonl.gz", "b.parquet"]


def test_listings_load_neither_datasets_nor_pandas() -> None:
    code = (
        "import sys\nfrom picbench.cli import main\n"
        "try:\n main(['list', 'columns'])\nexcept SystemExit: pass\n"
        "import picbench.workloads.load, picbench.run.traffic_file\n"
        "assert not {'datasets', 'pandas', 'pyarrow', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "squad" in done.stdout


def test_locate_takes_columns(tmp_path: Path) -> None:
    found = locate(str(tmp_path), "musique", columns="input=query")
    assert found.columns.of["input"] == "query"

import json
from pathlib import Path
from typing import Any

import pytest

from picbench.errors import DataError
from picbench.workloads.sources.records import file_records
from picbench.workloads.sources.row import BadRows, content_id, read_rows

GOOD: dict[str, Any] = {
    "input": "Who?",
    "context": "Passage 1:\nAda.",
    "answers": ["Ada"],
    "length": 3,
    "dataset": "musique",
    "language": "en",
    "all_classes": None,
    "_id": "one",
}


def write(path: Path, *lines: str | dict[str, Any]) -> Path:
    file = path / "rows.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text(text + "\n", encoding="utf-8")
    return file


def test_reads_a_row(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    (row,) = read_rows(file_records(file), "musique", BadRows())
    assert (row.id, row.dataset, row.input) == ("one", "musique", "Who?")
    assert (row.context, row.answers) == ("Passage 1:\nAda.", ("Ada",))
    assert row.source == f"{file}:1"


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    file = write(tmp_path, "\ufeff" + json.dumps(GOOD), "", "  ", GOOD)
    assert [row.source for row in read_rows(file_records(file), "musique", BadRows())] == [
        f"{file}:1",
        f"{file}:4",
    ]


def test_number_ids_become_text(tmp_path: Path) -> None:
    assert [
        row.id
        for row in read_rows(file_records(write(tmp_path, GOOD | {"_id": 0})), "musique", BadRows())
    ] == ["0"]


@pytest.mark.parametrize("nameless", [{"_id": ""}, {"_id": None}])
def test_rows_without_id_are_named_by_content(tmp_path: Path, nameless: dict[str, Any]) -> None:
    rows = [GOOD | nameless, GOOD | nameless | {"input": "Whose?"}]
    first, second = read_rows(file_records(write(tmp_path, *rows)), "musique", BadRows())
    assert first.id == content_id("Who?", "Passage 1:\nAda.", "Ada")
    assert first.id != second.id


def test_content_ids_tell_where_a_text_ends() -> None:
    assert content_id("ab", "c") != content_id("a", "bc")


BAD = [
    ("{", "EOF"),
    ("[1, 2]", "object"),
    ('{"input": "\udcff"}'.encode("utf-8", "surrogateescape"), ""),
    ({key: value for key, value in GOOD.items() if key != "answers"}, "'answers'"),
    (GOOD | {"answers": []}, "'answers'"),
    (GOOD | {"answers": "Ada"}, "'answers'"),
    (GOOD | {"answers": ["Ada", 3]}, "'answers.1'"),
    (GOOD | {"context": None}, "'context'"),
    (GOOD | {"input": 7}, "'input'"),
    (GOOD | {"dataset": "samsum"}, "'samsum'"),
]


@pytest.mark.parametrize(("bad", "named"), BAD)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, bad: Any, named: str) -> None:
    file = tmp_path / "rows.jsonl"
    line = bad if isinstance(bad, bytes) else (bad if isinstance(bad, str) else json.dumps(bad))
    raw = line if isinstance(line, bytes) else line.encode()
    file.write_bytes(json.dumps(GOOD).encode() + b"\n" + raw + b"\n")
    with pytest.raises(DataError) as caught:
        list(read_rows(file_records(file), "musique", BadRows()))
    assert caught.value.message.startswith(f"{file}:2: ")
    assert named in caught.value.message
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_malformed_rows_can_be_skipped_and_are_remembered(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD, "{", GOOD | {"_id": "two"}, {"input": "no context"})
    bad = BadRows(skip=True)
    assert [row.id for row in read_rows(file_records(file), "musique", bad)] == ["one", "two"]
    assert [message.split(": ")[0] for message in bad.skipped] == [f"{file}:2", f"{file}:4"]


def test_a_missing_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl"):
        list(file_records(tmp_path / "none.jsonl"))

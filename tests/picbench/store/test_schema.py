"""The published schemas are those of what is written, and files keep to them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import REFUSED, Harness, make_sample, run_fakes
from jsonschema import Draft202012Validator

from picbench.store.manifest import SCHEMA
from picbench.store.schema import json_schemas, schema_name
from picbench.store.writer import LEDGER, RunDirectory

PUBLISHED = Path(__file__).parents[3] / "docs" / "schema"
GOLDEN = Path(__file__).parent / "golden" / str(SCHEMA)
FILES = tuple(json_schemas())


def contents(path: Path) -> Iterator[Any]:
    """The file, or its lines."""
    text = path.read_text("utf-8")
    yield from map(json.loads, text.splitlines() if path.suffix == ".jsonl" else [text])


def complaints(folder: Path, file: str) -> list[str]:
    validator = Draft202012Validator(json_schemas()[file])
    found = (error for value in contents(folder / file) for error in validator.iter_errors(value))
    return [f"{error.json_path}: {error.message}" for error in found]


@pytest.mark.parametrize("file", FILES)
def test_published_schemas_are_current(file: str) -> None:
    published = json.loads((PUBLISHED / schema_name(file)).read_text("utf-8"))
    assert published == json_schemas()[file], "run make schemas"


@pytest.mark.parametrize("file", sorted({*FILES} - {LEDGER}))
def test_golden_files_keep_to_the_schema(file: str) -> None:
    assert complaints(GOLDEN, file) == []


@pytest.mark.parametrize("arrivals", [None, (0.0, 0.5, 1.0)])
def test_what_a_run_writes_keeps_to_the_schemas(
    tmp_path: Path, arrivals: tuple[float, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunDirectory, "compact", lambda _: None)
    samples = [make_sample(n, first=REFUSED if n == 1 else 1) for n in range(3)]
    folder = run_fakes(Harness(samples, arrivals=arrivals), tmp_path / "run", "full", "mepic")
    assert {file: complaints(folder, file) for file in FILES} == {file: [] for file in FILES}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"colour": 1}, "colour"), ({"outcome": "lost"}, "lost"), ({"tokens": {}}, "prompt")],
)
def test_other_rows_do_not(change: dict[str, Any], complaint: str) -> None:
    row = next(contents(GOLDEN / "samples.jsonl"))
    validator = Draft202012Validator(json_schemas()["samples.jsonl"])
    assert any(complaint in error.message for error in validator.iter_errors(row | change))

"""JSON Schemas of the files of a run directory, made from the dataclasses that are written.

python -m picbench.store.schema FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from picbench.files import write_whole
from picbench.store.manifest import SCHEMA, Manifest, Summary
from picbench.store.records import SampleRow
from picbench.store.writer import BatchLine, ChunkLine, LedgerLine, SampleLine

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

#: What a file is, or a line of one that ends in .jsonl.
_WHOLE: dict[str, Any] = {
    "manifest.json": Manifest,
    "summary.json": Summary,
    "samples.jsonl": SampleRow,
    "batches.jsonl": BatchLine,
    "ledger.jsonl": LedgerLine,
}
#: The same where fields may be left out.
_VARIED: dict[str, Any] = {"workload.jsonl": ChunkLine | SampleLine}


def json_schemas() -> dict[str, dict[str, Any]]:
    """The schemas by file of the run directory; of a .jsonl file the schema of its lines."""
    made = {name: _schema(name, TypeAdapter(kind), whole=True) for name, kind in _WHOLE.items()}
    return made | {
        name: _schema(name, TypeAdapter(kind), whole=False) for name, kind in _VARIED.items()
    }


def write_schemas(folder: Path) -> None:
    """Write each schema to a file such as ``manifest-2.schema.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in json_schemas().items():
        text = json.dumps(schema, indent=2) + "\n"
        write_whole(folder / schema_name(name), text.encode())


def schema_name(file: str) -> str:
    """The name of the schema's file."""
    return f"{Path(file).stem}-{SCHEMA}.schema.json"


def _schema(name: str, adapter: TypeAdapter[Any], *, whole: bool) -> dict[str, Any]:
    schema = adapter.json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" in part:
            part["additionalProperties"] = False
            if whole:
                part["required"] = list(part["properties"])
    title = f"{name} of a picbench run, schema {SCHEMA}"
    return {"$schema": _DIALECT} | schema | {"title": title}


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))

"""Files of older runs, as they would be written today: of the version before, and no older.

A reader knows two versions, so that results outlive one change of format. All functions take and
return JSON values.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picbench.errors import InvalidRun
from picbench.output.store.documents import SCHEMA

Json = dict[str, Any]


def version_of(path: Path, document: Mapping[str, Any]) -> int:
    """The version of a manifest or a summary in `path`.

    InvalidRun for one that this picbench does not read, KeyError where none is given.
    """
    version: int = document["schema"]
    if version not in (SCHEMA - 1, SCHEMA):
        raise InvalidRun(
            f"{path}: written in schema {version}; this picbench reads {SCHEMA - 1} and {SCHEMA}",
            hint="repeat the run, or read it with the picbench version that its manifest names",
        )
    return version


def migrate_manifest(path: Path, document: Json) -> Json:
    """A manifest in today's schema."""
    if version_of(path, document) == SCHEMA:
        return document
    attempt = {"began": document["began"], "ended": document["ended"], "status": document["status"]}
    counts = {"done": 0, "replayed": 0, "changed_outputs": 0}
    new = {"schema": SCHEMA, "reason": None, "attempts": [attempt | counts]}
    return document | new | _named(document)


def migrate_summary(path: Path, document: Json) -> Json:
    """A summary in today's schema; what older runs did not count is missing in it."""
    if version_of(path, document) == SCHEMA:
        return document
    return document | {"schema": SCHEMA} | _named(document)


def migrate_row(version: int, row: Json) -> Json:
    """A row in today's schema; nothing is known of abstentions and of shared chunks."""
    if version == SCHEMA:
        return row
    return {"outcome": "answered" if row["error"] is None else "error"} | row


def _named(document: Json) -> Json:
    """What both files have of the model and the workload."""
    restates = document["model"]["name"].startswith("testbed")
    return {
        "model": document["model"] | {"restates": restates},
        "workload": document["workload"] | {"metric": None},
    }

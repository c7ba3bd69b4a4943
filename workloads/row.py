"""Rows of LongBench's schema, read from JSON lines."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from picbench.errors import DataError

BadRows = Literal["stop", "skip"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One question with its context and the replies that count as right.

    `input` is the question (or the dialogue to summarise; empty where the task needs none),
    `context` the text that is cut into chunks, `source` where the row stands (``file:line``).
    """

    id: str
    dataset: str
    input: str
    context: str
    answers: tuple[str, ...]
    source: str


def read_rows(path: Path, dataset: str, on_bad: BadRows = "stop") -> Iterator[Row]:
    """Read the rows of one JSON lines file; blank lines are passed over.

    A malformed row, or one that says it is of another data set than `dataset`, raises DataError
    with file and line; under ``on_bad="skip"`` it is logged and left out.
    """
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            yield _parse(line, f"{path}:{number}", dataset)
        except DataError as error:
            if on_bad == "stop":
                raise
            _log.warning("skipped a row: %s", error.message)


def content_id(*texts: str) -> str:
    """Name a row by what it says: 16 hex digits, the same on every machine."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            yield from enumerate(file, start=1)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", hint="--data names a folder or a file"
        ) from error


def _parse(line: bytes, source: str, dataset: str) -> Row:
    # pydantic costs a tenth of a second to import, which `picbench list` must not pay.
    from picbench.workloads.schema import RowSchema, first_problem

    try:
        found = RowSchema.model_validate_json(line.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        raise DataError(
            f"{source}: {first_problem(error)}",
            hint="a row needs input, context and answers; --on-bad-row skip leaves it out",
        ) from error
    if found.dataset and not found.dataset.startswith(dataset):
        raise DataError(
            f"{source}: a row of {found.dataset!r}, not of {dataset!r}",
            hint=f"--dataset {found.dataset}, or other --data",
        )
    named = found.id is not None and found.id != ""
    return Row(
        id=str(found.id) if named else content_id(found.input, found.context, *found.answers),
        dataset=dataset,
        input=found.input,
        context=found.context,
        answers=tuple(found.answers),
        source=source,
    )

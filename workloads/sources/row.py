"""Rows of LongBench's schema, read from JSON lines."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from picbench.errors import DataError


@dataclass(slots=True)
class BadRows:
    """How malformed rows are handled: the first one raises, or `skip` leaves them out.

    `skipped` has the file, line and problem of each row that was left out.
    """

    skip: bool = False
    skipped: list[str] = field(default_factory=list)

    def reject(self, error: DataError) -> None:
        """Record a malformed row, or raise `error`."""
        if not self.skip:
            raise error
        self.skipped.append(error.message)


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One question with its context and the replies that count as right.

    `input` is the question (or the dialogue to summarise; empty where the task needs none),
    `context` the text that is cut into chunks, `source` the row's ``file:line``. Where the row says
    so, `gold` are the passages (from 0) that the answer needs, and `documents` the numbers of the
    documents that the passages are from.
    """

    id: str
    dataset: str
    input: str
    context: str
    answers: tuple[str, ...]
    source: str
    gold: tuple[int, ...] = ()
    documents: tuple[int, ...] = ()


def read_rows(path: Path, dataset: str, bad: BadRows) -> Iterator[DatasetRow]:
    """Read the rows of one JSON lines file; blank lines are skipped.

    Malformed rows, and rows of other data sets than `dataset`, go to `bad` as a DataError with
    file and line.
    """
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            yield _parse(line, f"{path}:{number}", dataset)
        except DataError as error:
            bad.reject(error)


def content_id(*texts: str) -> str:
    """An id from a row's content: 16 hex digits, the same on every machine."""
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
            f"cannot read {path}: {error.strerror}", hint="`data` names a folder or a file"
        ) from error


def _parse(line: bytes, source: str, dataset: str) -> DatasetRow:
    # pydantic costs a tenth of a second to import, which `picbench list` must not pay.
    from picbench.workloads.sources.row_schema import RowSchema, first_problem

    try:
        found = RowSchema.model_validate_json(line.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        raise DataError(
            f"{source}: {first_problem(error)}",
            hint="a row needs input, context and answers; `on_bad_row=skip` leaves it out",
        ) from error
    if found.dataset and not found.dataset.startswith(dataset):
        raise DataError(
            f"{source}: a row of {found.dataset!r}, not of {dataset!r}",
            hint=f"`dataset={found.dataset}`, or other `data`",
        )
    named = found.id is not None and found.id != ""
    return DatasetRow(
        id=str(found.id) if named else content_id(found.input, found.context, *found.answers),
        dataset=dataset,
        input=found.input,
        context=found.context,
        answers=tuple(found.answers),
        source=source,
        gold=tuple(found.gold_passages or ()),
        documents=tuple(found.documents or ()),
    )

"""Rows of LongBench's schema."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from picbench.errors import DataError
from picbench.workloads.sources.columns import LONGBENCH_COLUMNS, Columns, Scope
from picbench.workloads.sources.nested import find
from picbench.workloads.sources.records import Record
from picbench.workloads.yaml_data import read_data


@dataclass(slots=True)
class BadRows:
    """How malformed rows are handled: the first one raises, or `skip` leaves them out.

    `skipped` has the place and the problem of each row that was left out.
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
    `context` the text that is cut into chunks, `source` the row's place, such as ``file:line``.
    Where the row says so, `passages` are the context's, in which nothing is cut, `gold` those (from
    0) that the answer needs, `documents` the numbers of the documents that they are from, and
    `places` their places in these.
    """

    id: str
    dataset: str
    input: str
    context: str
    answers: tuple[str, ...]
    source: str
    gold: tuple[int, ...] = ()
    documents: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    passages: tuple[str, ...] = ()


def read_rows(
    records: Iterable[Record], dataset: str, bad: BadRows, columns: Columns = LONGBENCH_COLUMNS
) -> Iterator[DatasetRow]:
    """Make rows of what was read, with the fields in `columns`.

    Malformed rows, and rows of other data sets than `dataset`, go to `bad` as a DataError that
    names their place.
    """
    for record in records:
        try:
            scopes = list(columns.scopes(record.values()))
        except DataError as error:
            bad.reject(placed(record.source, error))
            continue
        for number, scope in enumerate(scopes, start=1):
            source = record.source if "each" not in columns.of else f"{record.source}.{number}"
            try:
                _check_answerable(scope)
                yield _parse(columns.row(scope), source, dataset)
            except DataError as error:
                bad.reject(placed(source, error))


def content_id(*texts: str) -> str:
    """An id from a row's content: 16 hex digits, the same on every machine."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def placed(source: str, error: DataError) -> DataError:
    """The error, with the row's place in front, and what to do about such rows."""
    found = error.message
    skip = "`on_bad_row=skip` leaves the row out"
    return DataError(
        found if found.startswith(source) else f"{source}: {found}",
        hint=error.hint if skip in error.hint else f"{error.hint}; {skip}",
    )


def _check_answerable(scope: Scope) -> None:
    for column, value in read_data("sources", "columns")["unanswerable"].items():
        if str(find(scope, column)).lower() in (str(value).lower(), str(int(value))):
            raise DataError(
                f"unanswerable: {column!r} is {str(value).lower()}",
                hint="a question without an answer has no score",
            )


def _parse(values: Mapping[str, Any], source: str, dataset: str) -> DatasetRow:
    # pydantic costs a tenth of a second to import, which `picbench list` must not pay.
    from picbench.workloads.sources.row_schema import RowSchema, first_problem

    try:
        found = RowSchema.model_validate(values)
    except ValueError as error:
        raise DataError(
            f"{source}: {first_problem(error)}",
            hint="a row needs input, context and answers; `columns` says which columns they are "
            "in, `on_bad_row=skip` leaves the row out",
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
        places=tuple(found.places or ()),
        passages=tuple(found.passages or ()),
    )

"""Rows as they are found, in files or in a split of a data set on the hub.

`datasets` reads them: JSON, Parquet and Arrow, and what is compressed, row group by row group, so
that the first rows of a large file cost what these rows cost. JSON Lines are read as lines, because
Arrow's own reader of JSON gives up a whole file for one malformed line; plain ones need no package.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from picbench.errors import DataError
from picbench.workloads.sources.cache_files import cache_directory

#: How `datasets` reads files by their suffix; all others are JSON Lines.
_LINES = ("text", {"encoding": "utf-8-sig", "encoding_errors": "backslashreplace"})
_DOCUMENT = ("text", {"encoding": "utf-8-sig", "sample_by": "document"})
_READERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    ".jsonl": _LINES,
    ".json": _DOCUMENT,
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

#: Files beside the rows that `Dataset.save_to_disk` writes.
_METADATA = {"state.json", "dataset_info.json", "dataset_dict.json"}

#: Endings of row files in a folder.
SUFFIXES = tuple(_READERS)


@dataclass(frozen=True, slots=True)
class Record:
    """One row: its place, for messages, and its columns, or `line`, JSON that has them."""

    source: str
    content: object = None
    line: str | None = None

    def values(self) -> Mapping[str, Any]:
        """The row's columns; DataError where it is no object."""
        found = self.content if self.line is None else _parse(self.line, self.source)
        if not isinstance(found, dict):
            raise DataError(f"{self.source}: not a JSON object", hint=_HINT)
        return found


_HINT = "a row is a JSON object, in a file of lines one a line"


def is_row_file(path: Path) -> bool:
    """Whether a file in a folder of rows has some."""
    return _suffix(path) in _READERS and path.name not in _METADATA


def file_records(path: Path) -> Iterator[Record]:
    """The rows of a file in order; blank lines are passed over.

    ``source`` is ``file:line`` of JSON Lines, else ``file row N``, from 1. Raises DataError where
    the file cannot be read.
    """
    kind, options = _READERS.get(_suffix(path), _LINES)
    try:
        rows = enumerate(_stream(path, kind, options), start=1)
        if kind != "text":
            for number, row in rows:
                yield Record(f"{path} row {number}", row)
        elif "sample_by" in options:
            for _, row in rows:
                yield from _document(row["text"], path)
        else:
            for number, row in rows:
                if row["text"].strip():
                    yield Record(f"{path}:{number}", line=row["text"])
    except DataError:
        raise
    # Also errors of Arrow and of compression libraries.
    except (OSError, ValueError, EOFError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise DataError(
            f"cannot read {path}: {reason}", hint="`data` names a folder or a file"
        ) from error


def _stream(path: Path, kind: str, options: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    if not path.exists():
        raise DataError(f"cannot read {path}: no such file", hint="`data` names a folder or a file")
    if options is _LINES[1] and path.suffix not in _COMPRESSED:
        with path.open(encoding="utf-8-sig", errors="backslashreplace") as file:
            yield from ({"text": line.rstrip("\n")} for line in file)
        return
    # Two seconds, which `picbench list` must not take.
    from datasets import load_dataset
    from datasets.utils import logging

    logging.set_verbosity(logging.CRITICAL)  # Errors are raised as well.
    yield from load_dataset(
        kind,
        data_files=escape(str(path.absolute())),
        split="train",
        streaming=True,
        cache_dir=str(cache_directory("datasets")),
        **options,
    )


def _document(text: str, path: Path) -> Iterator[Record]:
    """The rows of one JSON document: a list, or an object with a list below ``data``."""
    found = _parse(text, str(path))
    rows = found.get("data") if isinstance(found, dict) else found
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: neither a list of rows nor an object with such a list below 'data'",
            hint="one object a line goes into a file that ends in .jsonl",
        )
    for number, row in enumerate(rows, start=1):
        yield Record(f"{path} row {number}", row)


def _parse(text: str, source: str) -> Any:
    # pydantic costs a tenth of a second to import, which `picbench list` must not pay.
    from pydantic_core import from_json

    try:
        return from_json(text)
    except ValueError as error:
        raise DataError(f"{source}: {error}", hint=_HINT) from error


def _suffix(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    return suffixes[-1] if suffixes else ""

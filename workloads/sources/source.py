"""Find the rows of a data set: bundled, from the hub, or in a folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from picbench.errors import ConfigError, DataError
from picbench.workloads.sources.bundled import BUNDLED, bundled_file
from picbench.workloads.sources.columns import LONGBENCH_COLUMNS, Columns, parse_columns
from picbench.workloads.sources.hub import Origin, hub_rows, is_hub, parse
from picbench.workloads.sources.hub_split import OpenedSplit, is_split, open_split, parse_split
from picbench.workloads.sources.records import SUFFIXES, Record, file_records, is_row_file
from picbench.workloads.sources.row import BadRows


@dataclass(frozen=True, slots=True)
class RowSource:
    """A folder or a file with rows, or a split of a data set on the hub.

    `columns` are those of the fields in it. `path` only names a `split`, and `origin` is set for
    rows from the hub.
    """

    path: Path
    origin: Origin | None = None
    columns: Columns = LONGBENCH_COLUMNS
    split: OpenedSplit | None = None

    def has_rows(self, dataset: str) -> bool:
        """Whether there are rows of `dataset`, rather than texts to make them from."""
        return self.split is not None or bool(row_files(self.path, dataset))

    def streams(self, dataset: str) -> list[Iterator[Record]]:
        """The rows of `dataset`, file by file; an empty list where there are none."""
        if self.split is not None:
            return [self.split.records()]
        return [file_records(file) for file in row_files(self.path, dataset)]


def locate(
    data: str,
    dataset: str,
    *,
    columns: str | None = None,
    offline: bool = False,
    stream: bool = False,
    generated: bool = False,
) -> RowSource:
    """Return where the rows of `dataset` are.

    `data` is ``bundled`` for generated rows, a form of ``hub`` (see `hub.parse`), a form of ``hf:``
    (see `hub_split.parse_split`), or a folder or a file; `columns` says which columns the fields
    are in (see `columns.parse_columns`). `offline` reads only the hub's cache, `stream` reads rows
    from the hub as they are needed. Rows of a `generated` data set have no file. Raises ConfigError
    where there is nothing.
    """
    found = parse_columns(columns) if columns else LONGBENCH_COLUMNS
    if columns and (data == BUNDLED or is_hub(data)):
        raise ConfigError(
            f"`columns`: rows of `data={data}` have LongBench's columns",
            hint="`data=hf:OWNER/NAME`, DIR or FILE have others",
        )
    if data == BUNDLED:
        return RowSource(Path(data) if generated else bundled_file(dataset))
    if is_hub(data):
        return RowSource(*hub_rows(parse(data), dataset, offline=offline))
    if is_split(data):
        split = open_split(parse_split(data), offline=offline, stream=stream)
        return RowSource(Path(split.name), split.origin, found, split)
    path = Path(data).expanduser()
    if not path.exists():
        raise ConfigError(
            f"`data` {data}: no such folder or file",
            hint="`data=DIR`, FILE, hf:OWNER/NAME, hub or bundled",
        )
    return RowSource(path, columns=found)


def row_files(data: Path, dataset: str) -> list[Path]:
    """Return the row files of `dataset`, sorted by name; an empty list where there are none.

    `data` is a file, or a folder that has some in ``<dataset>/``, or ``<dataset>.jsonl``, .json,
    .parquet or .arrow.
    """
    if data.is_file():
        return [data]
    inside = sorted(filter(is_row_file, (data / dataset).glob("*")))
    single = [file for suffix in SUFFIXES if (file := data / f"{dataset}{suffix}").is_file()]
    return inside or single[:1]


def text_files(data: Path, dataset: str) -> list[Path]:
    """Return the text files of `dataset`, sorted by path; an empty list where there are none.

    `data` is a text file, or a folder that has them in ``<dataset>/`` or in itself, at any depth.
    """
    if data.is_file():
        return [data] if data.suffix == ".txt" else []
    folder = data / dataset
    return sorted((folder if folder.is_dir() else data).rglob("*.txt"))


def read_texts(files: Sequence[Path], bad: BadRows) -> Iterator[str]:
    """The texts of files in UTF-8, with a blank line after each; others are bad rows."""
    for file in files:
        try:
            yield _read_text(file).strip() + "\n\n"
        except DataError as error:
            bad.reject(error)


def _read_text(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}", hint="`data=DIR`") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{file}:{line}: not UTF-8: {error.reason}",
            hint="convert the file; `on_bad_row=skip` leaves it out",
        ) from error


def no_rows(data: Path, dataset: str, wanted: str) -> ConfigError:
    """Return the error for a folder without anything for `dataset`."""
    return ConfigError(
        f"`data` {data}: nothing for data set {dataset!r}", hint=f"expected {wanted}"
    )

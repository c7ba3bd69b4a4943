"""Find the files of a data set: bundled, from the hub, or in a folder."""

from dataclasses import dataclass
from pathlib import Path

from picbench.errors import ConfigError
from picbench.workloads.sources.bundled import BUNDLED, bundled_file
from picbench.workloads.sources.hub import Origin, hub_rows, is_hub, parse


@dataclass(frozen=True, slots=True)
class RowSource:
    """A folder or a file with rows; `origin` is set for rows from the hub."""

    path: Path
    origin: Origin | None = None


def locate(data: str, dataset: str, *, offline: bool = False) -> RowSource:
    """Return where the rows of `dataset` are.

    `data` is ``bundled`` for generated rows, a form of ``hub`` (see `hub.parse`), or a folder or
    a file; `offline` reads only the hub's cache. Raises ConfigError where there is nothing.
    """
    if data == BUNDLED:
        return RowSource(bundled_file(dataset))
    if is_hub(data):
        return RowSource(*hub_rows(parse(data), dataset, offline=offline))
    path = Path(data).expanduser()
    if not path.exists():
        raise ConfigError(
            f"`data` {data}: no such folder or file", hint="`data=DIR`, FILE, hub or bundled"
        )
    return RowSource(path)


def row_files(data: Path, dataset: str) -> list[Path]:
    """Return the row files of `dataset`, sorted by name; an empty list where there are none.

    `data` is a file, or a folder that has ``<dataset>/*.jsonl`` or ``<dataset>.jsonl``.
    """
    if data.is_file():
        return [data]
    single = data / f"{dataset}.jsonl"
    return sorted((data / dataset).glob("*.jsonl")) or ([single] if single.is_file() else [])


def text_files(data: Path, dataset: str) -> list[Path]:
    """Return the text files of `dataset`, sorted by path; an empty list where there are none.

    `data` is a text file, or a folder that has them in ``<dataset>/`` or in itself, at any depth.
    """
    if data.is_file():
        return [data] if data.suffix == ".txt" else []
    folder = data / dataset
    return sorted((folder if folder.is_dir() else data).rglob("*.txt"))


def no_rows(data: Path, dataset: str, wanted: str) -> ConfigError:
    """Return the error for a folder without anything for `dataset`."""
    return ConfigError(
        f"`data` {data}: nothing for data set {dataset!r}", hint=f"expected {wanted}"
    )

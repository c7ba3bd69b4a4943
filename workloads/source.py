"""Find the files of a data set in what `--data` names."""

from pathlib import Path

from picbench.errors import ConfigError
from picbench.workloads.bundled import BUNDLED, bundled_file


def locate(data: str, dataset: str) -> Path:
    """Return the folder or file with the rows of `dataset` that `--data` names.

    ``bundled`` names the rows that picbench generates. Raises ConfigError where there is nothing.
    """
    if data == BUNDLED:
        return bundled_file(dataset)
    if data == "hub":
        raise ConfigError(
            "--data hub: data sets cannot be downloaded by this version",
            hint="fetch the rows yourself and name their folder: --data DIR with "
            "DIR/<dataset>/*.jsonl; or use --data bundled",
        )
    path = Path(data).expanduser()
    if not path.exists():
        raise ConfigError(f"--data {data}: no such folder or file", hint="--data DIR or FILE")
    return path


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
        f"--data {data}: nothing for data set {dataset!r}", hint=f"expected {wanted}"
    )

"""The rows that come with picbench: generated, not shipped, and the same on every machine."""

from pathlib import Path

from picbench.workloads.sources.cache_files import write_rows

#: The value of `data` for these rows.
BUNDLED = "bundled"

#: Number of rows of each data set.
COUNT = 200


def bundled_file(dataset: str, directory: Path | None = None) -> Path:
    """Generate the rows of a data set into a file, and return the file.

    The file is ``<dataset>-<fingerprint>.jsonl`` in `directory` (default: the user's cache) and
    appears whole or not at all. Raises ConfigError for a data set that has no generator.
    """
    from picbench.workloads.synthetic.generate import rows

    return write_rows(dataset, rows(dataset, count=COUNT), directory)

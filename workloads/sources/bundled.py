"""The rows that come with picbench: generated, not shipped, and the same on every machine."""

import hashlib
import json
from pathlib import Path

from picbench.workloads.sources.cache_files import cache_directory, write_whole

#: What `data` says to use them.
BUNDLED = "bundled"

#: Rows of each data set.
COUNT = 200


def bundled_file(dataset: str, directory: Path | None = None) -> Path:
    """Generate the rows of a data set into a file, and return the file.

    The file is ``<dataset>-<fingerprint>.jsonl`` in `directory` (default: the user's cache) and
    appears whole or not at all. Raises ConfigError for a data set that has no generator.
    """
    from picbench.workloads.synthetic.generate import rows

    lines = [json.dumps(row, ensure_ascii=False) for row in rows(dataset, count=COUNT)]
    content = ("\n".join(lines) + "\n").encode()
    parent = directory or cache_directory("rows")
    file = parent / f"{dataset}-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    if not file.exists():
        write_whole(file, content)
    return file

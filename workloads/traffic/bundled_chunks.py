"""Synthetic rows for traffic: several questions about each context."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError
from picbench.workloads.sources.cache_files import cache_directory, write_whole

#: The largest context that the generators of questions make, in passages; see `Level.count`.
_LARGEST = {"musique": 20, "2wikimqa": 10, "hotpotqa": 10}

#: Attempts at a question for each one that is wanted; not every attempt finds a new one.
_TRIES = 3


def topic_file(
    dataset: str, *, topics: int, passages: int, questions: int, directory: Path | None = None
) -> Path:
    """Generate rows with `questions` questions about each of `topics` contexts, into a file.

    A context has `passages` passages, or what its first question needs. All questions but the
    first ask for a single fact. Rows of one context follow each other. The file is in
    LongBench's schema, in `directory` (default: the user's cache). Raises ConfigError for data
    sets that have no such questions.
    """
    if dataset not in _LARGEST:
        raise ConfigError(
            f"`dataset` {dataset}: traffic over bundled rows asks questions over passages",
            hint=f"one of {', '.join(_LARGEST)}, or name rows with `data`",
        )
    if not 2 <= passages <= _LARGEST[dataset]:
        raise ConfigError(
            f"`passages` {passages}: contexts of {dataset} have 2 to {_LARGEST[dataset]}",
            hint="use `passages` in that range, or another `dataset`",
        )
    rows = (row for index in range(topics) for row in _rows(dataset, index, passages, questions))
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    parent = directory or cache_directory("rows")
    file = parent / f"{dataset}-topics-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    if not file.exists():
        write_whole(file, content)
    return file


def _rows(dataset: str, index: int, passages: int, questions: int) -> Iterator[dict[str, Any]]:
    from picbench.workloads.synthetic.example import Level
    from picbench.workloads.synthetic.generate import example
    from picbench.workloads.synthetic.reply import extract

    scale = (passages - 2) / (_LARGEST[dataset] - 2)
    level = Level(scale=scale, more=_TRIES * questions, simple=1.0)
    made = example(dataset, "test", index, level=level)
    name = f"testbed-{dataset}-topic-{index}"
    row = made.row(dataset, name)
    yield row
    for number, further in enumerate(made.more[: questions - 1], start=1):
        changed = {
            "input": further.input,
            "answers": [extract(further.reply)],
            "_id": f"{name}-{number}",
        }
        yield row | changed | {"gold_passages": None, "qtype": "1-hop"}

"""Build a corpus of generated rows, other rows or random tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError, check_counts
from picbench.workloads.load import load_samples
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.sources.bundled import BUNDLED
from picbench.workloads.sources.cache_files import write_rows
from picbench.workloads.sources.source import RowSource, locate
from picbench.workloads.traffic.corpus import SYNTHETIC, Corpus, from_samples, from_tokens

#: The largest context that the generators of questions make, in passages; see `Level.count`.
_LARGEST = {"musique": 20, "2wikimqa": 10, "hotpotqa": 10}

#: Attempts for each question; not every attempt finds a new one.
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSource:
    """Where chunks and questions come from.

    `dataset` is a data set in `data` (``bundled``: generated rows), whose fields are in `columns`,
    or ``synthetic`` for random tokens. `pool` is the least number of distinct chunks; topics stay
    whole. A chunk is `join` passages, or more until it has `chunk_tokens` tokens, and exactly that
    many random tokens (0: 256). `passages` and `questions` are those of a generated context.
    `max_tokens` is the length of a reply (None: the data set's).
    """

    dataset: str
    data: str = BUNDLED
    columns: str | None = None
    pool: int = 64
    join: int = 1
    chunk_tokens: int = 0
    passages: int = 8
    questions: int = 6
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_counts(max_tokens=self.max_tokens)
        for field, value, least in (
            ("pool", self.pool, 1),
            ("join", self.join, 1),
            ("chunk_tokens", self.chunk_tokens, 0),
            ("questions", self.questions, 1),
        ):
            if value < least:
                raise ConfigError(
                    f"`{field}` {value} is not possible", hint=f"use at least {least}"
                )

    @property
    def synthetic(self) -> bool:
        """Whether the rows are generated."""
        return self.dataset == SYNTHETIC or self.data == BUNDLED


def build(source: ChunkSource, tokenizer: Tokenizer, seed: int) -> Corpus:
    """Build a corpus; raises ConfigError or DataError where `source` has too little."""
    if source.dataset == SYNTHETIC:
        return from_tokens(
            plain_ids(tokenizer),
            seed,
            pool=source.pool,
            chunk_tokens=source.chunk_tokens or 256,
            max_tokens=source.max_tokens or 16,
        )
    samples = load_samples(
        source.dataset, _rows(source), tokenizer, max_tokens=source.max_tokens, documents=True
    )
    return from_samples(
        samples, tokenizer, pool=source.pool, join=source.join, chunk_tokens=source.chunk_tokens
    )


def _rows(source: ChunkSource) -> RowSource:
    if source.data != BUNDLED:
        return locate(source.data, source.dataset, columns=source.columns)
    # A topic has at least one chunk, so this many are enough.
    return RowSource(
        topic_file(
            source.dataset, topics=source.pool, passages=source.passages, questions=source.questions
        )
    )


def plain_ids(tokenizer: Tokenizer) -> list[int]:
    """All ids of a vocabulary without special tokens."""
    known: Any = tokenizer  # Its whole interface is not in the protocol.
    special = set(known.all_special_ids)
    return [token for token in range(len(known)) if token not in special]


def topic_file(
    dataset: str, *, topics: int, passages: int, questions: int, directory: Path | None = None
) -> Path:
    """Generate rows with `questions` questions about each of `topics` contexts, into a file.

    A context has `passages` passages, or as many as its first question needs. All questions but
    the first are about a single fact. Rows of one context are consecutive. The file is in
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
    topic = partial(_about_topic, dataset, passages, questions)
    rows = chain.from_iterable(map(topic, range(topics)))
    return write_rows(f"{dataset}-topics", rows, directory)


def _about_topic(
    dataset: str, passages: int, questions: int, index: int
) -> Iterator[dict[str, Any]]:
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

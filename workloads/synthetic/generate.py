"""Rows of the six data sets, deterministic in data set, split, seed and index."""

from random import Random
from types import MappingProxyType
from typing import Any

from picbench.errors import ConfigError, closest
from picbench.workloads.synthetic import multi_news_rows, needle_rows, qa_rows, samsum_rows
from picbench.workloads.synthetic.example import Example, Level, Make
from picbench.workloads.synthetic.names import SPLITS, Split

#: The seed of the rows that ship with picbench.
SEED = 0

_MAKERS: MappingProxyType[str, Make] = MappingProxyType(
    {
        "musique": qa_rows.musique,
        "2wikimqa": qa_rows.wikimqa,
        "hotpotqa": qa_rows.hotpotqa,
        "samsum": samsum_rows.make,
        "multi_news": multi_news_rows.make,
        "needle": needle_rows.make,
    }
)

#: The data sets that can be generated.
DATASETS = tuple(_MAKERS)


def example(
    dataset: str, split: Split, index: int, seed: int = SEED, level: Level | None = None
) -> Example:
    """Make example number `index`; the same arguments make the same example everywhere."""
    rng = Random(f"{dataset}/{split}/{seed}/{index}")
    return _MAKERS[dataset](rng, split, index, level or Level())


def rows(
    dataset: str, split: Split = "test", count: int = 200, seed: int = SEED
) -> list[dict[str, Any]]:
    """Make the first `count` rows of a data set in LongBench's schema.

    Raises ConfigError for a data set or a split that does not exist.
    """
    if dataset not in _MAKERS:
        hint = f"{closest(dataset, DATASETS)}, or name rows with `data`"
        raise ConfigError(f"no bundled rows for {dataset!r}", hint=hint)
    if split not in SPLITS:
        raise ConfigError(f"no split is called {split!r}", hint=closest(split, SPLITS))
    return [
        example(dataset, split, index, seed).row(dataset, f"testbed-{dataset}-{split}-{index}")
        for index in range(count)
    ]

"""The metric that scores the replies of a data set: its own, or one by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

from picbench.workloads.datasets import Dataset
from picbench.workloads.metrics.cacheblend import Metric, stemmed_rouge_l, token_f1
from picbench.workloads.metrics.chinese import chinese
from picbench.workloads.metrics.f1 import exact_match, f1
from picbench.workloads.metrics.rouge import rouge_l
from picbench.workloads.prompts.tokens import Tokenizer

Rule = Literal["longbench", "longbench-zh", "cacheblend"]

_Load = Callable[[], Tokenizer]

#: Metrics by name: word F1, exact match, Rouge-L, LongBench's for Chinese, and CacheBlend's F1 over
#: token ids and Rouge-L over stemmed words. What loads a tokenizer is called where tokens count.
METRICS: Mapping[str, Callable[[_Load], Metric]] = MappingProxyType(
    {
        "f1": lambda load: f1,
        "em": lambda load: exact_match,
        "rouge-l": lambda load: rouge_l,
        "f1-zh": lambda load: chinese("f1-zh"),
        "rouge-l-zh": lambda load: chinese("rouge-l-zh"),
        "f1-cacheblend": lambda load: token_f1(load()),
        "rouge-l-cacheblend": lambda load: stemmed_rouge_l(),
    }
)


@dataclass(frozen=True, slots=True)
class Scorer:
    """The name of a data set's metric, and the metric.

    `score` takes a reply and the right answers and returns the best score, from 0 to 1.
    """

    metric: str
    score: Callable[[str, Sequence[str]], float]


def find_scorer(dataset: Dataset, rule: Rule, load: _Load) -> Scorer:
    """Return LongBench's scorer for `dataset`, that for Chinese, or CacheBlend's over token ids.

    `load` is called where tokens count. Raises ConfigError where a package is missing.
    """
    if rule == "longbench":
        return Scorer(dataset.metric, dataset.score)
    return scorer_by_name(dataset, f"{dataset.metric}-{rule.removeprefix('longbench-')}", load)


def scorer_by_name(dataset: Dataset, metric: str, load: _Load) -> Scorer:
    """Return the scorer of `dataset` by one of METRICS; `load` is called where tokens count.

    Raises ConfigError where a package is missing.
    """
    name = metric.replace("-cacheblend", " (CacheBlend)")
    return Scorer(name, partial(dataset.best, METRICS[metric](load)))

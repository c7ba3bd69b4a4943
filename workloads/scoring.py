"""The metric that scores the replies of a data set: its own, or one by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

from picbench.workloads.datasets import Dataset
from picbench.workloads.metrics.cacheblend import stemmed_rouge_l, token_f1
from picbench.workloads.metrics.f1 import exact_match, f1
from picbench.workloads.metrics.rouge import rouge_l
from picbench.workloads.prompts.tokens import Tokenizer

Rule = Literal["longbench", "cacheblend"]

_PLAIN = MappingProxyType({"f1": f1, "em": exact_match, "rouge-l": rouge_l})

#: Metrics by name: word F1, exact match, Rouge-L, and CacheBlend's F1 over token ids and Rouge-L
#: over stemmed words.
METRICS = (*_PLAIN, "f1-cacheblend", "rouge-l-cacheblend")


@dataclass(frozen=True, slots=True)
class Scorer:
    """The name of a data set's metric, and the metric.

    `score` takes a reply and the right answers and returns the best score, from 0 to 1.
    """

    metric: str
    score: Callable[[str, Sequence[str]], float]


def find_scorer(dataset: Dataset, rule: Rule, load: Callable[[], Tokenizer]) -> Scorer:
    """Return LongBench's scorer for `dataset`, or CacheBlend's, whose F1 is over token ids.

    `load` is called where tokens count. Raises ConfigError where a package is missing.
    """
    if rule == "longbench":
        return Scorer(dataset.metric, dataset.score)
    return scorer_by_name(dataset, f"{dataset.metric}-cacheblend", load)


def scorer_by_name(dataset: Dataset, metric: str, load: Callable[[], Tokenizer]) -> Scorer:
    """Return the scorer of `dataset` by one of METRICS; `load` is called where tokens count.

    Raises ConfigError where a package is missing.
    """
    if metric in _PLAIN:
        return Scorer(metric, partial(dataset.best, _PLAIN[metric]))
    if metric == "f1-cacheblend":
        return Scorer("f1 (CacheBlend)", partial(dataset.best, token_f1(load())))
    return Scorer("rouge-l (CacheBlend)", partial(dataset.best, stemmed_rouge_l()))

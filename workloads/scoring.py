"""The metric that scores the replies of a data set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from picbench.workloads.datasets import Dataset
from picbench.workloads.metrics.cacheblend import stemmed_rouge_l, token_f1
from picbench.workloads.prompts.tokens import Tokenizer

Rule = Literal["longbench", "cacheblend"]


@dataclass(frozen=True, slots=True)
class Scorer:
    """The name of a data set's metric, and the metric.

    `score` takes a reply and the right answers and returns the best score, from 0 to 1.
    """

    metric: str
    score: Callable[[str, Sequence[str]], float]


def find_scorer(dataset: Dataset, rule: Rule, tokenizer: Tokenizer) -> Scorer:
    """Return LongBench's scorer for `dataset`, or CacheBlend's, whose F1 is over token ids.

    Raises ConfigError where a package is missing.
    """
    if rule == "longbench":
        return Scorer(dataset.metric, dataset.score)
    metric = token_f1(tokenizer) if dataset.metric == "f1" else stemmed_rouge_l()
    return Scorer(f"{dataset.metric} (CacheBlend)", partial(dataset.best, metric))

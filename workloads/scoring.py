"""Score replies by the rule of their data set."""

from collections.abc import Sequence

from picbench.workloads.datasets import find


def score(dataset: str, prediction: str, answers: Sequence[str]) -> float:
    """Return the score of one reply, from 0 to 1: the metric's best over `answers`.

    Raises ConfigError for an unknown data set.
    """
    return find(dataset).score(prediction, answers)

"""Distance between what an engine reported and what the oracle says."""

from collections.abc import Mapping, Sequence

import torch


def distance(expected: torch.Tensor, reported: Sequence[Mapping[int, float]]) -> float:
    """The largest difference in log-probability over all tokens reported at all steps.

    `expected` is [steps, vocabulary]; `reported` holds {token id: logprob} for each step.
    """
    if len(reported) != len(expected):
        raise ValueError(f"{len(reported)} steps reported, {len(expected)} expected")
    return max(
        abs(float(row[token]) - logprob)
        for row, step in zip(expected, reported, strict=True)
        for token, logprob in step.items()
    )

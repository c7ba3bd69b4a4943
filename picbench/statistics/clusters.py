"""Samples that are not independent of each other, as clusters.

Questions about the same documents succeed and fail together, and requests that were served in one
round share its queue. What varies independently is the cluster, so clusters are what is resampled
(Cameron, Gelbach, Miller 2008; Miller 2024, arXiv 2411.00640).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ClusterSums:
    """Values by cluster: the sum and the count of each, both of shape [clusters]."""

    sums: Floats
    counts: Floats

    @property
    def mean(self) -> float:
        """The mean over all values."""
        return float(self.sums.sum() / self.counts.sum())


def sum_clusters(values: Floats, clusters: Sequence[Hashable] | None = None) -> ClusterSums:
    """Group `values` [n] by `clusters` [n]; without these every value is a cluster of its own.

    Raises ValueError where there is nothing to group or the lengths differ.
    """
    if not len(values):
        raise ValueError("no values")
    if clusters is None:
        return ClusterSums(values, np.ones(len(values)))
    if len(clusters) != len(values):
        raise ValueError(f"{len(values)} values in {len(clusters)} clusters")
    numbers = {cluster: i for i, cluster in enumerate(dict.fromkeys(clusters))}
    codes = np.fromiter((numbers[cluster] for cluster in clusters), np.intp, len(clusters))
    return ClusterSums(
        np.bincount(codes, weights=values).astype(np.float64),
        np.bincount(codes).astype(np.float64),
    )


def ratio_of_sums(first: Sequence[float], second: Sequence[float]) -> ClusterSums:
    """Rows of which the mean is the sum of `first` [n] over that of `second` [n], at least 0.

    A ratio estimate is a mean of clusters: the row counts for as much as it adds to the divisor
    (Cochran, "Sampling Techniques", chapter 6).
    """
    return ClusterSums(np.asarray(first, np.float64), np.asarray(second, np.float64))

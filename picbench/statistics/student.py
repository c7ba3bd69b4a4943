"""Means over few clusters, by Student's t.

A dozen clusters are too few to resample: the extremes of resampled means are then inside of what
95 % need, and of four clusters no way to flip signs has a p below 1/8. The t statistic of cluster
means is right for few clusters, also of unequal variance (Ibragimov, Mueller, "t-Statistic Based
Correlation and Heterogeneity Robust Inference", J. of Business & Economic Statistics 28, 2010).
"""

from dataclasses import dataclass
from math import sqrt

from scipy import stats  # type: ignore[import-untyped]

from picbench.statistics.bootstrap import Interval
from picbench.statistics.clusters import ClusterSums

#: Up to so many clusters are few.
FEW = 13


@dataclass(frozen=True, slots=True)
class StudentMean:
    """The mean over clusters, its standard error, and how many clusters it is from."""

    mean: float
    standard_error: float
    clusters: int

    @classmethod
    def of(cls, values: ClusterSums) -> "StudentMean":
        """Clusters of several sizes count by size (linearised); a single one has no error."""
        clusters = len(values.sums)
        if clusters < 2:
            return cls(values.mean, 0.0, clusters)
        away = values.sums - values.mean * values.counts
        total = float((away**2).sum())
        return cls(
            values.mean,
            sqrt(clusters / (clusters - 1) * total) / float(values.counts.sum()),
            clusters,
        )

    def interval(self, level: float = 0.95) -> Interval | None:
        """The two-sided interval; None for a single cluster."""
        if self.clusters < 2:
            return None
        reach = float(stats.t.isf((1 - level) / 2, self.clusters - 1)) * self.standard_error
        return Interval(self.mean - reach, self.mean + reach, level)

    @property
    def p(self) -> float:
        """Two-sided, of a mean of 0; 1 for a single cluster."""
        if self.clusters < 2 or not self.mean:
            return 1.0
        if not self.standard_error:
            return 0.0
        return float(2 * stats.t.sf(abs(self.mean) / self.standard_error, self.clusters - 1))

"""Means of values in two kinds of clusters at once: requests, and repeats of all of them.

The variance is that of both kinds together (Cameron, Gelbach, Miller, "Robust Inference With
Multiway Clustering", J. of Business & Economic Statistics 29, 2011, without taking off what is in
both, which is the safe side and never negative). Each kind keeps the Student's t of its own number
of clusters, and the lengths add as squares (Zou, Donner, "Construction of confidence limits about
effect measures", Statistics in Medicine 27, 2008): three repeats do not make 100 requests few, nor
do 100 requests make three repeats many.
"""

from dataclasses import dataclass
from math import hypot, sqrt

from scipy import optimize, stats  # type: ignore[import-untyped]

from picbench.statistics.bootstrap import Interval
from picbench.statistics.student import StudentMean

#: The least p that is told apart from 0.
_LEAST_P = 1e-12


@dataclass(frozen=True, slots=True)
class CrossedMean:
    """One mean, over its `rows` and over its `repeats`, of which there are at least two each."""

    rows: StudentMean
    repeats: StudentMean

    @property
    def mean(self) -> float:
        """The mean over all values."""
        return self.rows.mean

    @property
    def standard_error(self) -> float:
        """That of both kinds of clusters."""
        return hypot(self.rows.standard_error, self.repeats.standard_error)

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the standard error (Welch 1947)."""
        parts = [(part.standard_error**2, part.clusters - 1) for part in (self.rows, self.repeats)]
        shares = sum(variance**2 / freedom for variance, freedom in parts)
        return self.standard_error**4 / shares if shares else float(self.rows.clusters - 1)

    def interval(self, level: float = 0.95) -> Interval:
        """The two-sided interval."""
        reach = self._reach(1 - level)
        return Interval(self.mean - reach, self.mean + reach, level)

    @property
    def p(self) -> float:
        """Two-sided, of a mean of 0: of the widest interval that does not have it."""
        distance = abs(self.mean)
        if not distance:
            return 1.0
        if self._reach(_LEAST_P) <= distance:
            return _LEAST_P if self.standard_error else 0.0
        found = optimize.brentq(lambda p: self._reach(p) - distance, _LEAST_P, 1.0)
        return float(found)

    def _reach(self, p: float) -> float:
        """Half of the interval that misses the truth with probability `p`."""
        lengths = (
            float(stats.t.isf(p / 2, part.clusters - 1)) * part.standard_error
            for part in (self.rows, self.repeats)
        )
        return sqrt(sum(length**2 for length in lengths))

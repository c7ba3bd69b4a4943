"""How often the same request, served twice by the same arm, is answered differently."""

from collections.abc import Mapping
from dataclasses import dataclass

from scipy import stats  # type: ignore[import-untyped]

from picbench.statistics.bootstrap import Interval


@dataclass(frozen=True, slots=True)
class Nondeterminism:
    """`differing` of `pairs` answers were other ones the second time.

    The interval of the rate is exact (Clopper, Pearson 1934); None without a pair.
    """

    pairs: int
    differing: int
    interval: Interval | None

    @property
    def rate(self) -> float | None:
        """The coefficient of nondeterminism; None without a pair."""
        return self.differing / self.pairs if self.pairs else None


def nondeterminism(first: Mapping[str, str], second: Mapping[str, str]) -> Nondeterminism:
    """Compare hashes of answers by sample; samples of one side only do not count."""
    shared = first.keys() & second.keys()
    differing = sum(first[sample] != second[sample] for sample in shared)
    if not shared:
        return Nondeterminism(0, 0, None)
    exact = stats.binomtest(differing, len(shared)).proportion_ci(method="exact")
    interval = Interval(float(exact.low), float(exact.high), 0.95)
    return Nondeterminism(len(shared), differing, interval)

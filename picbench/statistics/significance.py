"""Tests of paired differences, and what several tests together are worth."""

from collections.abc import Sequence

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from picbench.statistics.clusters import ClusterSums, Floats

FLIPS = 9999

#: Up to this many clusters all assignments of signs are tried: 2^13 are fewer than `FLIPS`.
_EXACT = 13

_BATCH = 1 << 22


def sign_flip(values: ClusterSums, seed: int = 0, flips: int = FLIPS) -> float:
    """Two-sided p of paired differences whose mean is 0 if both sides are exchangeable.

    The signs of whole clusters are flipped (Fisher's randomisation test): all ways to do so for few
    clusters, else `flips` random ones, of which p = (1 + those at least as extreme) / (1 + flips)
    (Phipson, Smyth 2010). Clusters of no difference decide nothing and are left out.
    """
    sums = values.sums[values.sums != 0]
    if not len(sums):
        return 1.0
    exact = len(sums) <= _EXACT
    totals = _all_flips(sums) if exact else _random_flips(sums, seed, flips)
    # Sums in another order differ in their last bits; equal ones must count as such.
    least = abs(float(sums.sum())) - 1e-9 * float(np.abs(sums).sum())
    extreme = int((np.abs(totals) >= least).sum())
    return extreme / len(totals) if exact else (1 + extreme) / (1 + flips)


def mcnemar(wins: int, losses: int) -> float:
    """Exact two-sided p of right answers won and lost (McNemar 1947, by the binomial)."""
    discordant = wins + losses
    return float(stats.binomtest(wins, discordant).pvalue) if discordant else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """p adjusted for being several (Holm 1979): the chance of any false alarm stays below each."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = worst
    return adjusted


def _all_flips(sums: Floats) -> Floats:
    totals = np.zeros(1)
    for value in sums:
        totals = np.concatenate((totals + value, totals - value))
    return totals


def _random_flips(sums: Floats, seed: int, flips: int) -> Floats:
    """Totals after random flips: those of the flipped clusters count twice, negatively."""
    rng = np.random.default_rng(seed)
    octets = -(-len(sums) // 8)
    size = max(1, _BATCH // (8 * octets))
    found = []
    for begin in range(0, flips, size):
        bits = rng.integers(256, size=(min(size, flips - begin), octets), dtype=np.uint8)
        flipped = np.unpackbits(bits, axis=1, count=len(sums))
        found.append(sums.sum() - 2 * (flipped.astype(np.float64) @ sums))
    return np.concatenate(found)

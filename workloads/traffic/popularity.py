"""Who is drawn how often."""

from collections.abc import Collection, Sequence
from random import Random


def zipf(count: int, exponent: float) -> tuple[float, ...]:
    """Weights of `count` things, most popular first; they sum to 1, and exponent 0 is uniform."""
    weights = [float(rank) ** -exponent for rank in range(1, count + 1)]
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def pick(
    rng: Random, weights: Sequence[float], count: int, without: Collection[int] = ()
) -> list[int]:
    """Draw `count` indices by weight, in the order of the draw, none twice and none in `without`.

    Each index waits for an exponential time with its weight as rate, and those that wait least
    are taken: the distribution of drawing one after another without putting back.
    """
    waits = [(rng.expovariate(weight), index) for index, weight in enumerate(weights)]
    return [index for _, index in sorted(waits) if index not in without][:count]

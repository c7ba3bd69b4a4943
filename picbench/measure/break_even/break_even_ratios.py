"""Ratios of mepic to arms without chunks, cell by cell and seed by seed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from picbench.grid.measured_grid import ALONE, BURST, ArmCell, GridPoint, MeasuredGrid

#: The arm that is judged, and those that it is held against.
SUBJECT, RIVALS = "mepic", ("prefix", "reorder")

#: Whose cell is a rival's where it has none: it would have sent the same there.
_SAME = {"reorder": "prefix"}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A figure of an arm that is less where it is better, under some loads."""

    name: str
    text: str
    value: Callable[[ArmCell], float]
    loads: Callable[[str], bool]


#: What is compared; requests a second as their inverse.
QUANTITIES = (
    Quantity("ttft", "TTFT", lambda cell: cell.ttft_s, lambda load: load != BURST),
    Quantity("throughput", "seconds a request", lambda c: 1 / c.requests_s, lambda x: x == BURST),
    Quantity("kv", "peak KV blocks", lambda cell: cell.peak_blocks, lambda load: load != ALONE),
)


@dataclass(frozen=True, slots=True)
class SeedRatios:
    """mepic's figure over a rival's at a point, one ratio for each seed."""

    point: GridPoint
    quantity: Quantity
    rival: str
    ratios: tuple[float, ...]

    @property
    def middle(self) -> float:
        """The median over the seeds; below 1 mepic is better."""
        return median(self.ratios)

    @property
    def sure(self) -> bool:
        """Whether all seeds are on the same side of 1."""
        return max(self.ratios) < 1 or min(self.ratios) > 1


def find_ratios(grid: MeasuredGrid) -> list[SeedRatios]:
    """All ratios of a grid: quantity by quantity, rival by rival, point by point."""
    return list(_ratios(grid))


def _ratios(grid: MeasuredGrid) -> Iterator[SeedRatios]:
    points = grid.points()
    for quantity in QUANTITIES:
        for rival in RIVALS:
            for point, cells in points.items():
                if quantity.loads(point.load):
                    found = tuple(_ratio(cell.arms, quantity, rival) for cell in cells)
                    yield SeedRatios(point, quantity, rival, found)


def _ratio(arms: Mapping[str, ArmCell], quantity: Quantity, rival: str) -> float:
    other = arms[rival] if rival in arms else arms[_SAME[rival]]
    return quantity.value(arms[SUBJECT]) / quantity.value(other)


def crossing(ratios: Mapping[float, float]) -> float | None:
    """The least reuse from which on mepic is better, by a straight line between the points.

    `ratios` are by reuse. 0 where it always is, None where it is not better at the most reuse.
    """
    reuses = sorted(ratios)
    if not reuses or ratios[reuses[-1]] >= 1:
        return None
    better = reuses[-1]
    for low in reversed(reuses[:-1]):
        if ratios[low] >= 1:
            share = (ratios[low] - 1) / (ratios[low] - ratios[better])
            return low + share * (better - low)
        better = low
    return 0.0

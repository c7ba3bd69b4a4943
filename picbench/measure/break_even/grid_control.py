"""Points of a grid that are served again, to see how fast a machine is now.

A machine's host and its accelerator change their speed apart from each other, and small steps wait
for the host: a control therefore computes about as much as what it is held against.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean, median

from picbench.engines.algorithms import Registry
from picbench.errors import ConfigError
from picbench.grid.measured_grid import ArmCell, GridPoint, MeasuredGrid
from picbench.measure.break_even.grid_plan import (
    GridSettings,
    GridTraffic,
    draw_traffic,
    plan_grid,
)
from picbench.profile.prediction.arm_kinds import links_chunks
from picbench.profile.prediction.predictor import GridPredictor
from picbench.profile.trace_profile import ArmProfile, TraceProfile
from picbench.workloads.sample import Sample


@dataclass(frozen=True, slots=True)
class GridControl:
    """A point of the grid, with its traffic from an empty cache."""

    point: GridPoint
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class MachineSlowness:
    """How many times as long a machine takes as the grid says: first tokens, bursts."""

    ttft: float
    seconds: float


class GridControls:
    """Chooses controls for arms on traces."""

    def __init__(self, grid: MeasuredGrid, settings: GridSettings) -> None:
        self._settings = settings
        self._registry = Registry()
        self._cells = grid.points()
        self._traffic = {traffic.point: traffic for traffic in reversed(plan_grid(settings))}

    def choose(self, profile: TraceProfile, arm: ArmProfile, load: str) -> GridControl:
        """The point of a load whose mean request is the most like the arm's on a trace.

        Raises ConfigError for a grid without such points.
        """
        sizes, links = arm.sizes, links_chunks(arm.algorithm)
        wanted = (
            profile.traffic.prompt / profile.traffic.requests,
            arm.counted.computed / max(1, arm.counted.requests),
            fmean(sizes.output) if sizes.output else 1.0,
        )
        planned = {
            traffic: size
            for point, traffic in self._traffic.items()
            if point.load == load and (size := self._size(point, links)) is not None
        }
        if not planned:
            raise ConfigError(f"the grid has no cells of {load} requests", hint="measure it again")
        nearest = min(planned, key=lambda traffic: _distance(planned[traffic], wanted))
        return self._draw(nearest)

    def _size(self, point: GridPoint, links: bool) -> tuple[float, float, float] | None:
        """What the arms of a kind computed at a point, in the mean."""
        cells = [
            cell
            for measured in self._cells.get(point, ())
            for arm, cell in measured.arms.items()
            if links_chunks(self._registry.parse(arm)) is links
        ]
        if not cells:
            return None
        return (
            fmean(cell.prompt for cell in cells),
            fmean(cell.computed for cell in cells),
            float(point.output),
        )

    def _draw(self, traffic: GridTraffic) -> GridControl:
        return GridControl(traffic.point, draw_traffic(traffic, self._settings).cold)


def slowness_by_kind(
    predictor: GridPredictor, served: Mapping[str, Sequence[tuple[GridPoint, ArmCell]]]
) -> dict[bool, MachineSlowness]:
    """How slow the machine was in one repeat, for arms that map chunks, and for those that do not.

    `served` are two controls of each arm: alone, and in a burst. The median over arms of a kind.
    """
    registry, found = Registry(), dict[bool, list[MachineSlowness]]()
    for arm, (alone, burst) in served.items():
        ttft = predictor.predict_cell(arm, *alone).ttft_s
        rate = predictor.predict_cell(arm, *burst).requests_s
        if ttft and rate:
            one = MachineSlowness(alone[1].ttft_s / ttft, rate / burst[1].requests_s)
            found.setdefault(links_chunks(registry.parse(arm)), []).append(one)
    return {links: _middle(each) for links, each in found.items()}


def _middle(each: Sequence[MachineSlowness]) -> MachineSlowness:
    def middle(value: Callable[[MachineSlowness], float]) -> float:
        return median(map(value, each))

    return MachineSlowness(middle(lambda one: one.ttft), middle(lambda one: one.seconds))


def _distance(size: Sequence[float], wanted: Sequence[float]) -> float:
    return sum(abs(log(one / other)) for one, other in zip(size, wanted, strict=True))

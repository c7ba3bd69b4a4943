"""What a grid that ends after a stage is worth: its predictions, and its crossings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from picbench.grid.measured_grid import GridPoint, MeasuredGrid
from picbench.measure.break_even.break_even_ratios import crossing, find_ratios
from picbench.measure.break_even.grid_plan import (
    GridSettings,
    GridStage,
    GridTraffic,
    plan_grid,
)
from picbench.output import markdown
from picbench.profile.prediction.predictor import GridPredictor

_HEAD = (
    "measured until",
    "cells",
    "seconds",
    "TTFT of requests alone",
    "requests a second",
    "least reuse at which mepic is better",
)

#: From which reuse on mepic is better: by traffic, figure and rival, None for never.
_Crossings = Mapping[tuple[GridPoint, str, str], float | None]


@dataclass(frozen=True)
class _Part:
    """The cells of a grid until the end of a stage, and how many are planned until then."""

    stage: GridStage
    grid: MeasuredGrid
    planned: int

    @cached_property
    def crossings(self) -> _Crossings:
        """Of traffic of which several reuses were measured."""
        found: dict[tuple[GridPoint, str, str], dict[float, float]] = {}
        for one in find_ratios(self.grid):
            key = replace(one.point, reuse=0.0), one.quantity.name, one.rival
            found.setdefault(key, {})[one.point.reuse] = one.middle
        return {key: crossing(column) for key, column in found.items() if len(column) > 1}


def stage_errors(grid: MeasuredGrid, settings: GridSettings) -> str:
    """A table with a row for each stage that has cells; its seconds are without engines' start."""
    parts = list(_parts(grid, settings))
    return markdown.table(_HEAD, [_row(part, parts[-1].crossings) for part in parts])


def _parts(grid: MeasuredGrid, settings: GridSettings) -> Iterator[_Part]:
    order = list(GridStage)
    planned = [order.index(settings.stage(t)) for t in plan_grid(settings) for _ in t.points]
    places = [
        order.index(settings.stage(GridTraffic(replace(cell.point, cache="cold"), cell.seed)))
        for cell in grid.cells
    ]
    for place in sorted(set(places)):
        cells = [cell for cell, own in zip(grid.cells, places, strict=True) if own <= place]
        count = sum(own <= place for own in planned)
        yield _Part(order[place], MeasuredGrid(grid.facts, cells), count)


def _row(part: _Part, whole: _Crossings) -> tuple[str, ...]:
    errors = GridPredictor(part.grid).errors()
    return (
        f"{part.stage}",
        f"{len(part.grid.cells)} of {part.planned}",
        f"{sum(cell.seconds for cell in part.grid.cells):,.0f}",
        f"{errors.ttft or 'too few points'}",
        f"{errors.requests_s or 'too few points'}",
        _apart(part.crossings, whole),
    )


def _apart(found: _Crossings, whole: _Crossings) -> str:
    """How far crossings are from those of the whole grid."""
    both = [
        abs(one - other)
        for key, other in whole.items()
        if (one := found.get(key)) is not None and other is not None
    ]
    shared = [key for key in found if key in whole]
    one_sided = sum((found[key] is None) is not (whole[key] is None) for key in shared)
    if not both:
        return "none"
    points = 100 * np.quantile(both, 0.9)
    return (
        f"{len(shared)} of {len(whole)}; 90 % within {points:.0f} points of the whole grid's, "
        f"{one_sided} only in one"
    )

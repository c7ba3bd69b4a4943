"""The requests of measured cells, as they are compared with those of a trace."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from picbench.grid.measured_grid import QUIET, ArmCell, GridPoint
from picbench.profile.prediction.request_sizes import RequestSize


def cell_size(point: GridPoint, arms: Sequence[ArmCell], *, linked: bool) -> RequestSize:
    """The mean request of a cell's repeats."""
    size = RequestSize(
        prompt=fmean(arm.prompt for arm in arms),
        computed=fmean(arm.computed for arm in arms),
        compiled=fmean(arm.compiled or 0.0 for arm in arms),
        chunks=point.chunks,
        chunk_tokens=point.chunk_tokens,
        output=fmean(arm.output for arm in arms),
    )
    return of_kind(size, linked=linked)


def quiet_cells(arms: Sequence[ArmCell]) -> Sequence[ArmCell]:
    """The repeats whose requests began on quiet cores; all of them if none did.

    Small steps wait for the host: what else it does makes them 1.5 times as long.
    """
    return [arm for arm in arms if arm.quiet is None or arm.quiet >= QUIET] or arms


def middle(arms: Sequence[ArmCell]) -> dict[str, float]:
    """What the request of the median TTFT computed, where that is known."""
    known = [arm.middle for arm in arms if arm.middle is not None]
    if len(known) < len(arms):
        return {}
    computed, compiled = (fmean(column) for column in zip(*known, strict=True))
    return {"computed": computed, "compiled": compiled}


def of_kind(size: RequestSize, *, linked: bool) -> RequestSize:
    """Chunks are text to arms that do not map them."""
    return size if linked else replace(size, chunks=0.0)


def mean_size(sizes: Sequence[RequestSize]) -> RequestSize:
    """The mean of each number."""
    return RequestSize(
        prompt=fmean(size.prompt for size in sizes),
        computed=fmean(size.computed for size in sizes),
        compiled=fmean(size.compiled for size in sizes),
        chunks=fmean(size.chunks for size in sizes),
        chunk_tokens=fmean(size.chunk_tokens for size in sizes),
        output=fmean(size.output for size in sizes),
    )

"""How long what is left of a grid will take."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from picbench.grid.measured_grid import ALONE, BURST, GridPoint, MeasuredGrid
from picbench.measure.break_even.grid_plan import GridSettings, GridTraffic

#: Prompt tokens a second of which nothing is cached, and seconds of a step that only generates.
#: CPU: two cores of an AMD EPYC, the testbed's model. CUDA: an H200, Llama-3.1-8B's shape.
_SPEED = {"cpu": 2_700.0, "cuda": 38_000.0}
_STEP = {"cpu": 0.015, "cuda": 0.01}

#: Seconds until engines answer that start together.
_START = {"cpu": 25.0, "cuda": 130.0}

#: Tokens of a prompt beside its chunks, about.
_TEXT = 48

#: Arms that map chunks, half of which are not there yet where the cache is cold.
_LINKED = ("mepic", "naive")


@dataclass(frozen=True, slots=True)
class GridShare:
    """A part of the traffic: how much of it is left, prompt tokens of all arms, and seconds."""

    name: str
    left: int
    total: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.total - self.left} of {self.total} measured, "
            f"{self.tokens:,} prompt tokens left, about {self.seconds:,.0f} s"
        )


@dataclass(frozen=True, slots=True)
class GridProgress:
    """How much of a grid is measured, kind by kind, and stage by stage in their order.

    `start` are seconds until engines answer.
    """

    shares: tuple[GridShare, ...]
    stages: tuple[GridShare, ...]
    start: float

    @property
    def done(self) -> int:
        """How many traffics were measured."""
        return self.total - sum(share.left for share in self.shares)

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(share.total for share in self.shares)

    @property
    def tokens(self) -> int:
        """Prompt tokens that are left."""
        return sum(share.tokens for share in self.shares)

    @property
    def seconds(self) -> float:
        """Seconds that are left, without the start of engines."""
        return sum(share.seconds for share in self.shares)

    def __str__(self) -> str:
        stages = [f"{n}. {share}" for n, share in enumerate(self.stages, 1)]
        lines = [*map(str, self.shares), *(stages if len(stages) > 1 else ())]
        whole = (
            f"{self.done} of {self.total} traffics measured, {self.tokens:,} prompt tokens left, "
            f"about {self.seconds:,.0f} s, and {self.start:,.0f} s for each start of engines"
        )
        return "\n".join([*lines, whole])


def estimate_grid(
    planned: Sequence[GridTraffic], settings: GridSettings, device: str, grid: MeasuredGrid | None
) -> GridProgress:
    """What is left of `planned`; by the seconds of what is measured, once anything is."""
    done = {(cell.point, cell.seed) for cell in grid.cells} if grid else set()
    factor = _factor(grid, settings, device) if grid and grid.cells else 1.0
    kinds: dict[str, list[GridTraffic]] = {}
    stages: dict[str, list[GridTraffic]] = {}
    for traffic in planned:
        kinds.setdefault(_kind(traffic, settings), []).append(traffic)
        stages.setdefault(settings.stage(traffic), []).append(traffic)
    share = partial(_share, done=done, settings=settings, device=device, factor=factor)
    return GridProgress(
        tuple(share(name, found) for name, found in sorted(kinds.items())),
        tuple(share(name, found) for name, found in stages.items()),
        _START[device],
    )


def _share(
    name: str,
    found: Sequence[GridTraffic],
    *,
    done: set[tuple[GridPoint, int]],
    settings: GridSettings,
    device: str,
    factor: float,
) -> GridShare:
    left = [traffic for traffic in found if (traffic.point, traffic.seed) not in done]
    tokens = sum(_prompt(t, settings) * len(settings.arms_at(t.point)) for t in left)
    seconds = factor * sum(_expected(t, settings, device) for t in left)
    return GridShare(name, len(left), len(found), tokens, seconds)


def _factor(grid: MeasuredGrid, settings: GridSettings, device: str) -> float:
    """By how much what was measured took longer than expected."""
    cold = [cell for cell in grid.cells if cell.point.cache == "cold"]
    known = [GridTraffic(cell.point, cell.seed) for cell in cold]
    spent = sum(cell.seconds for cell in grid.cells)
    expected = sum(_expected(traffic, settings, device) for traffic in known)
    return spent / expected if spent and expected else 1.0


def _expected(traffic: GridTraffic, settings: GridSettings, device: str) -> float:
    """Seconds of all arms of a traffic, with a cold cache and a warm one."""
    point, requests = traffic.point, 2 * settings.requests(traffic.point)
    running = 1 if point.load == ALONE else settings.running
    generated = point.output * max(2, requests / running) * _STEP[device]
    arriving = requests / float(point.load) if point.load not in (ALONE, BURST) else 0.0
    filled = _fill(traffic, settings) / _SPEED[device]
    return sum(
        max(share * _prompt(traffic, settings) / _SPEED[device] + generated, arriving)
        + (filled if arm != "full" else 0.0)
        for arm, share in _computed(traffic, settings)
    )


def _computed(traffic: GridTraffic, settings: GridSettings) -> Iterator[tuple[str, float]]:
    """The share of prompt tokens that each arm computes, about."""
    for arm in settings.arms_at(traffic.point):
        yield arm, 1 - 0.75 * traffic.point.reuse if arm in _LINKED else 1.0


def _fill(traffic: GridTraffic, settings: GridSettings) -> float:
    """Tokens that fill the cache of one arm: chunks that warm requests draw from the corpus."""
    point = traffic.point
    drawn = settings.requests(point) * point.chunks * point.reuse
    used = point.corpus * (1 - math.pow(1 - 1 / point.corpus, drawn))
    return used * (point.chunk_tokens + _TEXT)


def _prompt(traffic: GridTraffic, settings: GridSettings) -> int:
    """Prompt tokens of all requests of one arm."""
    point = traffic.point
    return 2 * settings.requests(point) * (point.chunks * point.chunk_tokens + _TEXT)


def _kind(traffic: GridTraffic, settings: GridSettings) -> str:
    point = traffic.point
    if point.load != BURST:
        return "alone" if point.load == ALONE else "at rates"
    if point.output != settings.output:
        return "other replies"
    if point.corpus not in (settings.corpus, point.chunks):
        return "other corpora"
    return "in bursts"

"""The grids that are measured: which traffic, in which order, and its requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from picbench.grid.measured_grid import ALONE, BURST, GridPoint
from picbench.workloads.sample import Sample
from picbench.workloads.traffic.corpus import from_tokens
from picbench.workloads.traffic.draw import Stream, draw
from picbench.workloads.traffic.settings import Traffic

#: Ids that every model's vocabulary has; the first ones are often special.
IDS = range(16, 1000)

#: Arms that are compared.
ARMS = ("full", "prefix", "reorder", "mepic", "naive")


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSettings:
    """The values of each axis, and how much is served in a cell.

    All combinations of `reuse`, `chunks` and `chunk_tokens` are served with chunks of `corpus`,
    alone and in bursts, with replies of `output` tokens. The other `corpora`, `outputs` and the
    `rates` (requests a second) are served for some of them, whose chunks are in the middle. `alone`
    and `burst` requests are measured with a cold cache, and as many with a warm one; `running` are
    served at a time in a burst.
    """

    reuse: tuple[float, ...]
    chunks: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    corpus: int
    corpora: tuple[int, ...]
    rates: tuple[float, ...]
    seeds: int
    alone: int
    burst: int
    running: int
    output: int
    outputs: tuple[int, ...]
    pool: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its reply."""
        return max(self.chunks) * max(self.chunk_tokens) + 64 + max(self.output, *self.outputs, 0)


#: By device. On a GPU an hour for all seeds, on two idle cores about twenty minutes.
GRIDS = {
    "cuda": GridSettings(
        reuse=(0.0, 0.25, 0.5, 0.75, 0.95, 0.98),
        chunks=(2, 8, 32),
        chunk_tokens=(128, 512),
        corpus=64,
        corpora=(24, 256, 1024),
        rates=(2.0, 8.0),
        seeds=3,
        alone=4,
        burst=24,
        running=16,
        output=16,
        outputs=(64, 256),
        pool=20_000,
    ),
    "cpu": GridSettings(
        reuse=(0.0, 0.5, 0.95),
        chunks=(2, 6),
        chunk_tokens=(48, 128),
        corpus=24,
        corpora=(),
        rates=(),
        seeds=3,
        alone=2,
        burst=4,
        running=4,
        output=4,
        outputs=(),
        pool=2_000,
    ),
}


@dataclass(frozen=True, slots=True)
class GridTraffic:
    """Traffic that every arm serves twice as much of: first with a cold cache, then a warm one."""

    point: GridPoint
    seed: int

    @property
    def points(self) -> tuple[GridPoint, GridPoint]:
        """The cells that it gives: the cold one, the warm one."""
        warm = GridPoint(
            reuse=self.point.reuse,
            chunks=self.point.chunks,
            chunk_tokens=self.point.chunk_tokens,
            corpus=self.point.corpus,
            load=self.point.load,
            output=self.point.output,
            cache="warm",
        )
        return self.point, warm


def plan_grid(settings: GridSettings) -> list[GridTraffic]:
    """All traffic of a grid: seed by seed, in a random order, so that any part of it is even."""
    found: list[GridTraffic] = []
    for seed in range(settings.seeds):
        points = list(_points(settings))
        Random(f"{seed}/order").shuffle(points)
        found += [GridTraffic(point, seed) for point in points]
    return found


def _points(settings: GridSettings) -> Iterator[GridPoint]:
    for reuse, chunks, tokens, load in product(
        settings.reuse, settings.chunks, settings.chunk_tokens, (ALONE, BURST)
    ):
        yield _point(reuse, chunks, tokens, settings.corpus, load, settings.output)
    middle = settings.chunks[len(settings.chunks) // 2]
    longest, some = max(settings.chunk_tokens), (settings.reuse[-2], settings.reuse[-1])
    for reuse, corpus in product(some, settings.corpora):
        yield _point(reuse, middle, longest, corpus, BURST, settings.output)
    for reuse, output in product(some, settings.outputs):
        yield _point(reuse, middle, longest, settings.corpus, BURST, output)
    for reuse, rate in product((settings.reuse[0], *some), settings.rates):
        yield _point(reuse, middle, longest, settings.corpus, f"{rate:g}", settings.output)


def _point(
    reuse: float, chunks: int, chunk_tokens: int, corpus: int, load: str, output: int
) -> GridPoint:
    return GridPoint(
        reuse=reuse,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        corpus=max(corpus, chunks),
        load=load,
        output=output,
        cache="cold",
    )


def draw_traffic(
    traffic: GridTraffic, settings: GridSettings
) -> tuple[list[Sample], list[Sample], Stream]:
    """Its cold and its warm requests, and all of them as a stream with their arrivals."""
    point = traffic.point
    count = settings.alone if point.load == ALONE else settings.burst
    corpus = from_tokens(
        IDS,
        traffic.seed,
        pool=point.corpus,
        chunk_tokens=point.chunk_tokens,
        max_tokens=point.output,
    )
    drawn = draw(
        Traffic(
            requests=2 * count,
            seed=traffic.seed,
            chunks=(point.chunks, point.chunks),
            cached=point.reuse,
            rate=None if point.load in (ALONE, BURST) else float(point.load),
        ),
        corpus,
    )
    samples: Sequence[Sample] = drawn.samples
    return list(samples[:count]), list(samples[count:]), drawn

"""The grids that are measured: which traffic, in which order, and its requests."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from random import Random

from picbench.engines.config import BLOCK_SIZE
from picbench.profile.grid import ALONE, BURST, GridPoint
from picbench.workloads.sample import Sample, SampleSegment
from picbench.workloads.traffic.corpus import from_tokens
from picbench.workloads.traffic.draw import draw
from picbench.workloads.traffic.settings import Traffic

#: Ids that every model's vocabulary has; the first ones are often special.
IDS = range(16, 1000)

#: Arms that are compared.
ARMS = ("full", "prefix", "reorder", "mepic", "naive")

#: Those that are compared at a rate of arrivals, where seconds pass whatever is served.
_RATED = ("prefix", "reorder", "mepic")


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSettings:
    """The values of each axis, and how much is served in a cell.

    All combinations of `reuse`, `chunks` and `chunk_tokens` are served with chunks of `corpus`,
    alone and in bursts, with replies of `alone_output` and of `output` tokens, and those with
    `alone_chunks` instead of `chunks` alone: it costs little to know more lengths of prompts there.
    The other `corpora`, `outputs` and the `rates` (requests a second) are served at some reuses
    only, with chunks in the middle. `alone` to `most_alone` requests, and `burst` at most, are
    measured with a cold cache, and as many with a warm one: about `alone_tokens` and `burst_tokens`
    of prompts. `running` are served at a time in a burst, half of which are served at least.

    `arms` are those of the device. `small_arms` are served as well where a request alone has at
    most `small_tokens` new tokens in its chunks: how large a step is depends on the arm there.
    Prompts of up to `again_tokens` are served alone with every seed before anything else is served
    again: they wait for the host, so their repeats differ the most.
    """

    reuse: tuple[float, ...]
    chunks: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    corpus: int
    corpora: tuple[int, ...]
    rates: tuple[float, ...]
    seeds: int
    alone: int
    most_alone: int
    alone_tokens: int
    burst: int
    burst_tokens: int
    running: int
    alone_output: int
    output: int
    outputs: tuple[int, ...]
    pool: int
    arms: tuple[str, ...]
    alone_chunks: tuple[int, ...] = ()
    small_arms: tuple[str, ...] = ()
    small_tokens: int = 0
    again_tokens: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its reply."""
        return max(self.chunks) * max(self.chunk_tokens) + 64 + max(self.output, *self.outputs, 0)

    def requests(self, point: GridPoint) -> int:
        """How many requests are served at a point with a cold cache, and again with a warm one."""
        prompt = point.chunks * point.chunk_tokens
        if point.load == ALONE:
            return min(self.most_alone, max(self.alone_tokens // prompt, self.alone))
        return min(self.burst, max(self.burst_tokens // prompt, self.running // 2))

    def arms_at(self, point: GridPoint) -> tuple[str, ...]:
        """The arms that are served at a point.

        `full` takes the same at every reuse. Where no chunk recurs, `reorder` sends what `prefix`
        does.
        """
        arms = self.arms if point.reuse == min(self.reuse) else self.arms[1:]
        arms = arms if point.load in (ALONE, BURST) else _RATED
        if not point.reuse:
            arms = tuple(arm for arm in arms if arm != "reorder")
        new = (1 - point.reuse) * point.chunks * point.chunk_tokens
        small = point.load == ALONE and new <= self.small_tokens
        return (*arms, *self.small_arms) if small else arms

    def stage(self, traffic: "GridTraffic") -> "GridStage":
        """When traffic is measured."""
        point, prompt = traffic.point, traffic.point.chunks * traffic.point.chunk_tokens
        if traffic.seed:
            small = point.load == ALONE and prompt <= self.again_tokens
            return GridStage.SMALL if small else GridStage.AGAIN
        closed = point.load in (ALONE, BURST)
        usual = point.corpus == max(self.corpus, point.chunks)
        return GridStage.ONCE if closed and usual else GridStage.BESIDE


class GridStage(StrEnum):
    """What is measured after what: a grid is of use after each, and the pages of grids say of how
    much.
    """

    ONCE = "each traffic once"
    SMALL = "small prompts alone, with other seeds"
    BESIDE = "other corpora and rates"
    AGAIN = "all else, with other seeds"


#: By device. On an H200 about half an hour for all seeds, on two idle cores about ten minutes.
GRIDS = {
    "cuda": GridSettings(
        reuse=(0.0, 0.25, 0.5, 0.75, 0.95, 0.98),
        chunks=(2, 8, 32),
        chunk_tokens=(128, 512),
        corpus=64,
        corpora=(24, 256, 1024),
        rates=(4.0, 12.0),
        seeds=3,
        alone=3,
        most_alone=12,
        alone_tokens=32_768,
        burst=16,
        burst_tokens=65_536,
        running=16,
        alone_output=4,
        output=16,
        outputs=(64, 256),
        pool=20_000,
        # Elsewhere predictions take the costs of `naive` from `mepic`: one arm less to serve.
        arms=("full", "prefix", "reorder", "mepic"),
        alone_chunks=(4,),
        small_arms=("naive",),
        small_tokens=1024,
        again_tokens=4096,
    ),
    "cpu": GridSettings(
        reuse=(0.0, 0.5, 0.95),
        chunks=(2, 6),
        chunk_tokens=(48, 128),
        corpus=24,
        corpora=(),
        rates=(),
        seeds=3,
        alone=4,
        most_alone=4,
        alone_tokens=0,
        burst=8,
        burst_tokens=8_192,
        running=4,
        alone_output=4,
        output=4,
        outputs=(),
        pool=2_000,
        arms=ARMS,
    ),
}


@dataclass(frozen=True, slots=True)
class GridTraffic:
    """Traffic that every arm serves with a cold cache, and as much again with a warm one."""

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


def plan_grid(settings: GridSettings, part: tuple[int, int] = (1, 1)) -> list[GridTraffic]:
    """All traffic of a grid: stage by stage, seed by seed, in a random order, so that any part of
    a stage is even.

    Of `part` (k, n) every n-th, from the k-th on: together they are all, none of them twice.
    """
    found: list[GridTraffic] = []
    for seed in range(settings.seeds):
        points = list(_points(settings))
        Random(f"{seed}/order").shuffle(points)
        found += [GridTraffic(point, seed) for point in points]
    order = list(GridStage)
    found.sort(key=lambda traffic: order.index(settings.stage(traffic)))
    return found[part[0] - 1 :: part[1]]


def _points(settings: GridSettings) -> Iterator[GridPoint]:
    loads = (
        (ALONE, settings.alone_output, (*settings.chunks, *settings.alone_chunks)),
        (BURST, settings.output, settings.chunks),
    )
    for load, output, counts in loads:
        for reuse, chunks, tokens in product(settings.reuse, counts, settings.chunk_tokens):
            yield _point(reuse, chunks, tokens, settings.corpus, load, output)
    middle, longest = settings.chunks[len(settings.chunks) // 2], max(settings.chunk_tokens)
    much, most = settings.reuse[-2:]
    for reuse, corpus in product((much, most), settings.corpora):
        yield _point(reuse, middle, longest, corpus, BURST, settings.output)
    for output in settings.outputs:
        yield _point(much, middle, longest, settings.corpus, BURST, output)
    for reuse, rate in product((settings.reuse[0], much), settings.rates):
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


@dataclass(frozen=True, slots=True)
class GridRequests:
    """What is served at a point, one after the other: `cold` requests from an empty cache, requests
    of one chunk each that `fill` it, and `warm` ones.

    `fill` has the chunks of the corpus that `warm` needs, so that each was once the first of a
    prompt: prefix caching finds these. Of a corpus that is larger than the pool it has as large a
    share as fits. `arrivals` are those of the cold requests, then of the warm ones, if any.
    """

    cold: tuple[Sample, ...]
    fill: tuple[Sample, ...]
    warm: tuple[Sample, ...]
    arrivals: tuple[float, ...] | None


def draw_traffic(traffic: GridTraffic, settings: GridSettings) -> GridRequests:
    """The requests of a traffic."""
    point, count = traffic.point, settings.requests(traffic.point)
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
    cold, warm = drawn.samples[:count], drawn.samples[count:]
    fits = settings.pool * BLOCK_SIZE / (point.corpus * point.chunk_tokens)
    return GridRequests(cold, tuple(_fill(warm, drawn.preload, fits)), warm, drawn.arrivals)


def _fill(
    warm: Sequence[Sample], known: Collection[SampleSegment], fits: float
) -> Iterator[Sample]:
    """Requests of one chunk each for a share `fits` of the `known` chunks in `warm`."""
    used = dict.fromkeys(chunk for sample in warm for chunk in sample.chunks if chunk in known)
    for number, chunk in enumerate(list(used)[: math.ceil(fits * len(used))]):
        first, last = warm[0].segments[0], warm[0].segments[-1]
        yield replace(warm[0], id=f"fill {number}", segments=(first, chunk, last), max_tokens=1)

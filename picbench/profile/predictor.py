"""Measured grids, and times and memory of arms that are predicted from them.

A cell of a grid is traffic of one kind, served by every arm: how much of it recurs, how many chunks
of which length, drawn from how many, how requests come, and what was served before. Repeats differ
in their seed. The package has copies of such files (``grid.json``).

How well costs that are fitted to a grid interpolate is measured by leaving out one point after
another (`leave_one_out`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Literal, TypeVar

from pydantic import TypeAdapter

from picbench.engines.algorithms import Algorithm, Registry, Reuse
from picbench.engines.algorithms.auto import Auto
from picbench.engines.costs import RequestSize
from picbench.errors import ConfigError
from picbench.files import reading, write_json
from picbench.profile.costs import (
    CellSpread,
    InterpolationError,
    LoopCounts,
    Observation,
    fit,
    leave_one_out,
    scattered_median,
    serve_loop,
)

#: How requests come: one at a time, or as many at a time as the grid says; else requests a second.
ALONE, BURST = "alone", "burst"

#: The least share of requests on a quiet core that leaves their median alone.
QUIET = 0.9

SCHEMA = 3

#: The grids that come with the package, by name.
PACKAGED = {path.stem: path for path in sorted((Path(__file__).parent / "data").glob("*.json"))}

#: The largest distance of the mean and the middle request of a cell whose requests are all alike,
#: as a share, and in tokens.
_ALIKE, _ALIKE_TOKENS = 0.02, 2.0

_REGISTRY = Registry()

T = TypeVar("T")


def links_chunks(arm: Algorithm | str) -> bool:
    """Whether an algorithm maps chunks."""
    algorithm = _REGISTRY.parse(arm) if isinstance(arm, str) else arm
    return algorithm.reuse is Reuse.CHUNKS


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class GridPoint:
    """What is served in a cell.

    `reuse` is the share of chunk tokens in chunks of a corpus of `corpus` chunks; all others occur
    once. `chunks` of `chunk_tokens` each are in a prompt. `load` is `ALONE`, `BURST`, or requests a
    second, `output` the number of generated tokens. A `warm` cache has served each chunk of the
    corpus that is needed, as the first of a prompt, and as many requests of the same kind.
    """

    reuse: float
    chunks: int
    chunk_tokens: int
    corpus: int
    load: str
    output: int
    cache: Literal["cold", "warm"]

    @property
    def closed(self) -> bool:
        """Whether requests come as others end, and not at a rate."""
        return self.load in (ALONE, BURST)

    @property
    def prompt(self) -> int:
        """Tokens of a prompt's chunks."""
        return self.chunks * self.chunk_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCell:
    """What one arm took in a cell: means over its requests, except where another is named.

    `ttft_s` is the median from arrival to the first token, `ttft_p95_s` the 95th percentile.
    `requests_s` are answered requests over the time from the first arrival to the last token.
    `peak_blocks` were held by running requests at a time, at most. `computed` prompt tokens were
    computed, `compiled` ones for chunks among them. `middle` has both numbers of the request in the
    middle, in order of computed tokens: those that the median TTFT is of. `quiet` is the share of
    requests alone, or of bursts, that began on a core that nothing else used. None is not known.
    """

    requests: int
    ttft_s: float
    ttft_p95_s: float
    requests_s: float
    peak_blocks: float
    prompt: float
    computed: float
    output: float
    compiled: float | None = None
    middle: tuple[float, float] | None = None
    quiet: float | None = None

    @property
    def first(self) -> float:
        """Tokens computed for the request of the median TTFT, or else in the mean."""
        return self.middle[0] if self.middle else self.computed


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """A point, the seed of its traffic, and what each arm took; `seconds` are those of them all."""

    point: GridPoint
    seed: int
    arms: Mapping[str, ArmCell]
    seconds: float = 0.0

    @property
    def key(self) -> tuple[GridPoint, int]:
        """What the cells of a grid are told apart by."""
        return self.point, self.seed

    @property
    def quiet(self) -> float:
        """The share of requests on a quiet core, of the arm with the fewest; 1 if none says."""
        return min(1.0 if arm.quiet is None else arm.quiet for arm in self.arms.values())

    @property
    def disturbed(self) -> bool:
        """Whether any arm's times may be of something else that the host did.

        Only those of requests alone: bursts hardly wait for the host.
        """
        return self.point.load == ALONE and self.quiet < QUIET


@dataclass(frozen=True, slots=True)
class GridFacts:
    """Where a grid was measured: for its captions, and for what is predicted from it.

    `block_bytes` are those of KV of 16 tokens, `running` requests are served at a time in a burst,
    in steps of at most `step_tokens`. `caveat` is what readers must know of the figures. By arm,
    CUDA graphs of its engine served steps of up to `graph_tokens`, 0 without graphs.
    """

    hardware: str
    versions: Mapping[str, str]
    model: str
    dtype: str
    block_bytes: int
    pool: int
    running: int
    caveat: str
    step_tokens: int = 2048
    graph_tokens: Mapping[str, int] = field(default_factory=dict)

    def captured(self, *, linked: bool) -> int:
        """Tokens of the largest step that graphs of a kind of arms served; 0 without graphs."""
        sizes = self.graph_tokens.items()
        return max((size for arm, size in sizes if links_chunks(arm) is linked), default=0)

    def graphs(self) -> str:
        """The sizes of graphs in words: by arm, where they differ."""
        tokens = self.graph_tokens
        if not any(tokens.values()):
            return "no CUDA graphs"
        found = []
        for size in sorted(set(tokens.values())):
            arms = [arm for arm, own in tokens.items() if own == size]
            found.append(
                f"{size:,}" if len(arms) == len(tokens) else f"{size:,} ({', '.join(arms)})"
            )
        return f"CUDA graphs of up to {' and '.join(found)} tokens"

    def graph_warning(self, grid: "GridFacts", name: str) -> str | None:
        """Why a grid's predictions may not be those of what was measured here, called `name`.

        None where the arms that both have in common had graphs of the same sizes.
        """
        there = grid.graph_tokens
        if all(there.get(arm, size) == size for arm, size in self.graph_tokens.items()):
            return None
        return (
            f"{name}: {self.graphs()}, --grid: {grid.graphs()}. Steps between these sizes take "
            "other times; measure the grid again (picbench measure break-even)."
        )


@dataclass(frozen=True, slots=True)
class MeasuredGrid:
    """All cells that were measured, and where."""

    facts: GridFacts
    cells: Sequence[MeasuredCell]

    def points(self) -> dict[GridPoint, list[MeasuredCell]]:
        """The repeats of each point, in order."""
        found: dict[GridPoint, list[MeasuredCell]] = {}
        for cell in sorted(self.cells, key=lambda cell: cell.key):
            found.setdefault(cell.point, []).append(cell)
        return found

    def about(self) -> str:
        """One line about where it was measured."""
        facts = self.facts
        known = {name: text for name, text in facts.versions.items() if text != "none"}
        versions = ", ".join(f"{name} {text}" for name, text in known.items())
        where = f"{facts.model}, {facts.dtype}, {facts.hardware}, {versions}"
        return f"{where}. {facts.caveat}".rstrip()


def read_measured(path: Path, kind: type[T], schema: int, name: str, hint: str) -> T:
    """Read a JSON file of a schema. Raises ConfigError that begins with `name` for another file."""
    with reading(name, missing=hint, wrong=hint):
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.pop("schema", None) != schema:
            raise ValueError(f"not of schema {schema}")
        return TypeAdapter(kind).validate_python(found)


def read_grid(path: Path, field: str = "grid") -> MeasuredGrid:
    """Read a file that `field` names. Raises ConfigError that names the field for no grid."""
    packaged = f", or one of the package's: {', '.join(PACKAGED)}" * (field == "grid")
    hint = "measure it again" if path.is_file() else f"name a grid.json{packaged}"
    return read_measured(path, MeasuredGrid, SCHEMA, f"`{field}` {path}", hint)


def write_grid(path: Path, grid: MeasuredGrid) -> None:
    """Write a file, whole or not at all."""
    write_json(path, {"schema": SCHEMA} | asdict(grid))


def choose_grid(name: str | None) -> MeasuredGrid | None:
    """The grid with this name, in this file, or None for ``none``.

    By default the package's grid of a GPU, the one of the last name: a CPU's has to be named.
    Raises ConfigError for what is no grid.
    """
    if name is None:
        name = max(stem for stem in PACKAGED if not stem.startswith("cpu"))
    return None if name == "none" else read_grid(PACKAGED.get(name, Path(name)))


def choose_predictor(grid: str | None, calibration: str | None) -> "GridPredictor | None":
    """Predicts from the grid that `choose_grid` finds, at the speed of a file's cells of it.

    Raises ConfigError for what is no grid, and for a calibration without one.
    """
    measured = choose_grid(grid)
    if measured is not None:
        again = read_grid(Path(calibration), "calibration") if calibration else None
        return GridPredictor(measured, again)
    if calibration is not None:
        raise ConfigError(
            f"`calibration` {calibration}: there is no grid to calibrate",
            hint="name one with `grid`",
        )
    return None


@dataclass(frozen=True, slots=True)
class ArmPrediction:
    """An arm's figures for the requests of a trace.

    `ttft_s` is the median of requests alone, `requests_s` are answered when as many run at a time
    as the profile says. At the trace's own rate requests also wait: `loaded_ttft_s` adds the mean
    wait of a queue, infinite where more come than are answered, None without times. `kv_gib` is
    held by the running requests. None is what the grid does not have. `inside` says whether the
    mean request is within the grid. Ranges are those in which 90 % of single cells of the grid lie
    around what is fitted to them, for requests that compute about as much; that of `ttft_s` is
    around the medians that 90 % of as many requests of such traffic have.
    """

    ttft_s: float | None
    requests_s: float | None
    loaded_ttft_s: float | None
    kv_gib: float
    inside: bool
    ttft_s_range: tuple[float, float] | None = None
    requests_s_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class PredictorErrors:
    """How well the grid predicts points of itself that were left out; None for too few points."""

    ttft: InterpolationError | None
    requests_s: InterpolationError | None

    def texts(self) -> tuple[str, str]:
        """Both in words."""
        found = (self.ttft, self.requests_s)
        ttft, requests_s = (str(error) if error else "too few points" for error in found)
        return ttft, requests_s


class _ArmKind:
    """What is fitted for one kind of arms: those that map chunks (`linked`), or all others.

    `alone` and `bursts` are how single `measured` cells lie around the fitted first tokens and
    requests a second, `tails` the 95th percentiles over medians of cells whose requests are alike.
    """

    def __init__(self, grid: MeasuredGrid, measured: MeasuredGrid, *, linked: bool) -> None:
        self._grid, self._linked = grid, linked
        self.graphs = grid.facts.captured(linked=linked)
        self.ttft = fit(list(self.first_tokens()))
        self.seconds = fit(list(self.loops()))
        alone, bursts, tails = [], [], []
        for point, cells in self._observed(measured):
            for cell in cells:
                ttft_s, requests_s = self.predict(point, cell)
                if point.load == ALONE and ttft_s:
                    alone.append((cell.first, cell.ttft_s / ttft_s))
                if requests_s:
                    bursts.append((cell.computed, cell.requests_s / requests_s))
            for cell in _quiet_cells(cells) if point.load == ALONE else ():
                apart = abs(cell.first - cell.computed)
                if cell.middle and apart <= _ALIKE * cell.computed + _ALIKE_TOKENS:
                    tails.append((cell.first, cell.ttft_p95_s / cell.ttft_s))
        self.alone, self.bursts = CellSpread.of(alone), CellSpread.of(bursts)
        self.tails = CellSpread.of(tails)

    def predict(self, point: GridPoint, cell: ArmCell) -> tuple[float | None, float | None]:
        """The fitted times of a cell, of what it computed: TTFT, requests a second."""
        _, alone, loop = self._counts(point, [cell])
        return (
            self.ttft.predict(alone.first_token(self.graphs)) if self.ttft else None,
            cell.requests / self.seconds.predict((*loop.prefill, *loop.step_costs()))
            if self.seconds
            else None,
        )

    def covers(self, mean: RequestSize) -> bool:
        """Whether both times are fitted to such requests; TTFT does not depend on the reply."""
        if self.ttft is None or self.seconds is None:
            return False
        shape = _shape(mean)
        return self.ttft.covers(shape[:-1]) and self.seconds.covers(shape)

    def first_tokens(self) -> Iterator[Observation]:
        """TTFT of requests alone, a median at each point."""
        for point, arms in self._observed(self._grid):
            if point.load == ALONE:
                quiet = _quiet_cells(arms)
                _, size, _ = self._counts(point, quiet)
                value = median(arm.ttft_s for arm in quiet)
                counts = size.first_token(self.graphs)
                yield Observation(_traffic(point), counts, value, _shape(size)[:-1])

    def loops(self) -> Iterator[Observation]:
        """Seconds of the engine for all requests, a median at each point."""
        for point, arms in self._observed(self._grid):
            mean, _, loop = self._counts(point, arms)
            value = loop.requests / median(arm.requests_s for arm in arms)
            counts = (*loop.prefill, *loop.step_costs())
            yield Observation(_traffic(point), counts, value, _shape(mean))

    def _counts(
        self, point: GridPoint, arms: Sequence[ArmCell]
    ) -> tuple[RequestSize, RequestSize, LoopCounts]:
        """The mean request of a cell's repeats, that of the median TTFT, and what serving takes."""
        mean = RequestSize(
            prompt=fmean(arm.prompt for arm in arms),
            computed=fmean(arm.computed for arm in arms),
            compiled=fmean(arm.compiled or 0.0 for arm in arms),
            # Chunks are text to arms that do not map them.
            chunks=point.chunks if self._linked else 0.0,
            chunk_tokens=point.chunk_tokens,
            output=fmean(arm.output for arm in arms),
        )
        facts, running = self._grid.facts, 1 if point.load == ALONE else self._grid.facts.running
        requests = repeat(mean, arms[0].requests)
        loop = serve_loop(requests, running, facts.step_tokens, self.graphs)
        known = [arm.middle for arm in arms if arm.middle is not None]
        if len(known) < len(arms):
            return mean, mean, loop
        computed, compiled = (fmean(column) for column in zip(*known, strict=True))
        return mean, mean._replace(computed=computed, compiled=compiled), loop

    def _observed(self, measured: MeasuredGrid) -> Iterator[tuple[GridPoint, list[ArmCell]]]:
        """Each point of a closed loop, and the repeats of each arm of the kind in it."""
        known = dict.fromkeys(arm for cell in measured.cells for arm in cell.arms)
        # What chooses request by request has times of both kinds.
        fixed = [arm for arm in known if not isinstance(_REGISTRY.parse(arm), Auto)]
        arms = [arm for arm in fixed if links_chunks(arm) is self._linked]
        for point, cells in measured.points().items():
            for arm in arms if point.closed else ():
                if repeats := [cell.arms[arm] for cell in cells if arm in cell.arms]:
                    yield point, repeats


class GridPredictor:
    """Predicts from the cells of one grid; arms of one kind share their costs.

    The kinds are arms that map chunks, and arms that compute whole prompts from some token on. TTFT
    is fitted to requests alone. What a request takes of the engine is fitted to all closed loops:
    each is served again by a simulated scheduler, which counts its steps.

    Another machine takes other times. With a `calibration`, cells of the same grid that were
    measured there, predictions are for that machine: each time of the grid is multiplied by the
    median ratio of those of its cells that compute about as much.

    Raises ConfigError for a calibration of another model or engine, or with too few cells.
    """

    def __init__(self, grid: MeasuredGrid, calibration: MeasuredGrid | None = None) -> None:
        self.grid, self.calibration = grid, calibration
        self._kinds = {
            linked: _ArmKind(grid, calibration or grid, linked=linked) for linked in (False, True)
        }
        if calibration is None:
            return
        for name in ("model", "dtype", "running", "step_tokens"):
            there, here = getattr(grid.facts, name), getattr(calibration.facts, name)
            if there != here:
                raise ConfigError(
                    f"`calibration`: its {name} is {here}, the grid's is {there}",
                    hint="measure the same grid, or name another `grid`",
                )
        if any(kind.alone is None or kind.bursts is None for kind in self._kinds.values()):
            raise ConfigError(
                "`calibration`: too few cells, it needs 20 of each load for arms that map chunks",
                hint="measure more of the grid there",
            )

    @property
    def warning(self) -> str | None:
        """What to know of a calibration whose engines had other graphs than the grid's."""
        if self.calibration is None:
            return None
        return self.calibration.facts.graph_warning(self.grid.facts, "--calibration")

    def predict(
        self,
        algorithm: Algorithm,
        sizes: Sequence[RequestSize],
        loop: LoopCounts,
        peak_blocks: int,
        rate: float | None = None,
    ) -> ArmPrediction:
        """An algorithm's figures for requests, which a closed loop has served, and their rate."""
        links = links_chunks(algorithm)
        linked = links and any(size.chunks for size in sizes)
        kind, graphs = self._kinds[linked], self._kinds[links].graphs
        sizes = [size if linked else size._replace(chunks=0.0) for size in sizes]
        kv_gib = peak_blocks * self.grid.facts.block_bytes / 2**30
        if not sizes:
            return ArmPrediction(None, None, None, kv_gib, False)
        computed, mean = [size.computed for size in sizes], RequestSize.mean(sizes)
        slow, longer = self._slowness(kind, median(computed), mean.computed)
        first = first_range = answered = answered_range = loaded = None
        if kind.ttft:
            times = [kind.ttft.predict(size.first_token(graphs)) for size in sizes]
            first = scattered_median(times, computed, kind.tails) * slow
            first_range = kind.alone.around_median(times, computed) if kind.alone else None
        if kind.seconds:
            # Seconds of the engine for each request; those of steps are the same for each.
            none = (0.0,) * len(loop.step_costs())
            own = [kind.seconds.predict((*size.prefill(), *none)) for size in sizes]
            steps = (*(0.0 for _ in loop.prefill), *loop.step_costs())
            share = kind.seconds.predict(steps) / len(own)
            fitted = [seconds + share for seconds in own]
            each = [seconds * longer for seconds in fitted]
            answered = 1 / fmean(each)
            if kind.bursts:
                answered_range = kind.bursts.around(1 / fmean(fitted), mean.computed)
            if first is not None and rate is not None:
                loaded = first + _wait(each, rate)
        inside = kind.covers(mean)
        return ArmPrediction(first, answered, loaded, kv_gib, inside, first_range, answered_range)

    def predict_cell(
        self, arm: str, point: GridPoint, cell: ArmCell
    ) -> tuple[float | None, float | None]:
        """TTFT and requests a second of a cell that an arm has served, from what it computed."""
        kind = self._kinds[links_chunks(arm)]
        ttft_s, requests_s = kind.predict(point, cell)
        slow, longer = self._slowness(kind, cell.first, cell.computed)
        return ttft_s and ttft_s * slow, requests_s and requests_s / longer

    def errors(self) -> PredictorErrors:
        """Leave-one-out errors of both times, over the arms of both kinds."""
        kinds = self._kinds.values()
        return PredictorErrors(
            leave_one_out([list(kind.first_tokens()) for kind in kinds]),
            leave_one_out([list(kind.loops()) for kind in kinds]),
        )

    def _slowness(self, kind: _ArmKind, first: float, computed: float) -> tuple[float, float]:
        """The ratios of times on this machine to the grid's: of first tokens, of the engine's work.

        The request whose first token is meant computes `first` tokens, the mean one `computed`.
        """
        if self.calibration is None or kind.alone is None or kind.bursts is None:
            return 1.0, 1.0
        return kind.alone.middle(first), 1 / kind.bursts.middle(computed)


def _quiet_cells(arms: Sequence[ArmCell]) -> Sequence[ArmCell]:
    """The repeats whose requests began on quiet cores; all of them if none did.

    Small steps wait for the host, which takes 1.5 times as long for them when it is busy.
    """
    return [arm for arm in arms if arm.quiet is None or arm.quiet >= QUIET] or arms


def _traffic(point: GridPoint) -> GridPoint:
    """What is left out together: a point with a cold and a warm cache, alone and in a burst."""
    return replace(point, cache="cold", load=BURST)


def _shape(size: RequestSize) -> tuple[float, ...]:
    """What must be within the range of the grid; the reply comes last."""
    return size.prompt, size.computed, size.chunks, size.output


def _wait(each: Sequence[float], rate: float) -> float:
    """Mean wait in a queue with random arrivals (M/G/1, Pollaczek-Khinchine).

    `each` are the service times.
    """
    used = rate * fmean(each)
    return inf if used >= 1 else rate * fmean(s**2 for s in each) / (2 * (1 - used))

"""Does `picbench profile` predict what engines take? Three traces that no grid has, measured.

Each trace is a request file. Every arm serves it from an empty cache, one request at a time, and
then again, as many at a time as in the grid's bursts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

from picbench.arms.server import Server
from picbench.engines.algorithms import Registry
from picbench.errors import ConfigError
from picbench.grid.measured_grid import ArmCell, GridFacts, MeasuredGrid
from picbench.measure.break_even.grid_plan import ARMS, IDS
from picbench.measure.break_even.measure_grid import GridRun, grid_facts, open_engines
from picbench.measure.break_even.serve_cells import CellWork, make_work, serve_cells
from picbench.output import markdown
from picbench.output.json_file import write_json
from picbench.profile.prediction.predictor import GridPredictor
from picbench.profile.trace_profile import TraceProfile, profile_trace
from picbench.profile.traces.trace_reader import Encode, read_trace_file
from picbench.workloads.sample import Sample
from picbench.workloads.traffic.corpus import from_tokens
from picbench.workloads.traffic.draw import Stream, draw
from picbench.workloads.traffic.file import Header, write_requests
from picbench.workloads.traffic.settings import Traffic

#: Errors up to this share are what is promised.
WITHIN = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenTrace:
    """Requests unlike those of the grid: how many chunks, of which length, from which corpus.

    Chunks are drawn by popularity (`zipf`), or a share `reuse` of their tokens from the corpus.
    """

    name: str
    requests: int
    chunks: tuple[int, int]
    chunk_tokens: int
    corpus: int
    output: int
    zipf: float = 0.0
    reuse: float | None = None

    def draw(self, seed: int) -> Stream:
        """The requests."""
        corpus = from_tokens(
            IDS,
            seed,
            pool=self.corpus,
            chunk_tokens=self.chunk_tokens,
            max_tokens=self.output,
        )
        traffic = Traffic(
            requests=self.requests,
            seed=seed,
            chunks=self.chunks,
            zipf=self.zipf,
            cached=self.reuse,
        )
        return draw(traffic, corpus)


#: By device. Within what its grid covers, and none of its points.
TRACES: Mapping[str, tuple[UnseenTrace, ...]] = {
    "cuda": (
        UnseenTrace(
            name="popular", requests=64, chunks=(6, 14), chunk_tokens=320, corpus=120, output=24,
            zipf=1.0,
        ),
        UnseenTrace(
            name="few-documents", requests=64, chunks=(2, 6), chunk_tokens=480, corpus=40,
            output=48, reuse=0.9,
        ),
        UnseenTrace(
            name="mostly-new", requests=48, chunks=(10, 20), chunk_tokens=200, corpus=80,
            output=16, reuse=0.4,
        ),
    ),
    "cpu": (
        UnseenTrace(
            name="popular", requests=24, chunks=(3, 5), chunk_tokens=96, corpus=30, output=4,
            zipf=1.0,
        ),
        UnseenTrace(
            name="few-documents", requests=24, chunks=(2, 4), chunk_tokens=112, corpus=12,
            output=4, reuse=0.8,
        ),
        UnseenTrace(
            name="mostly-new", requests=16, chunks=(4, 6), chunk_tokens=64, corpus=20, output=4,
            reuse=0.3,
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckedFigure:
    """A figure of an arm on a trace: measured in each repeat, and what was predicted of it."""

    trace: str
    arm: str
    figure: str
    measured: list[float] = field(repr=False)
    predicted: float
    inside: bool

    @property
    def error(self) -> float:
        """Relative, to the median of what was measured."""
        return self.predicted / median(self.measured) - 1


def check_profile(
    run: GridRun, grid: MeasuredGrid, repeats: int, say: Callable[[str], None]
) -> list[CheckedFigure]:
    """Measure the traces of the device and compare; writes ``profile.json`` and ``profile.md``.

    Raises ConfigError for a grid of another model than is served.
    """
    predictor, found = GridPredictor(grid), list[CheckedFigure]()
    streams = {trace.name: trace.draw(seed=77) for trace in TRACES[run.device]}
    with open_engines(run) as (engines, block_bytes):
        facts = grid_facts(run, block_bytes)
        if facts.model != grid.facts.model:
            raise ConfigError(
                f"the grid is of {grid.facts.model}, this is {facts.model}", hint="`model`"
            )
        for name, stream in streams.items():
            profile = _profile(name, stream, run, grid.facts.running)
            cells = _serve(name, stream, engines, grid.facts.running, repeats)
            found += _compare(profile, predictor, cells)
            say(f"{name}: {_summary([one for one in found if one.trace == name])}")
    _write(run.output, facts, grid, found, repeats)
    return found


def _profile(name: str, stream: Stream, run: GridRun, running: int) -> TraceProfile:
    path = run.output / f"{name}.jsonl"
    write_requests(path, Header(dataset="synthetic", synthetic=True), stream)
    arms = [Registry().parse(arm) for arm in ARMS]
    return profile_trace(name, read_trace_file(path, _no_texts), arms, running=running)


def _no_texts() -> Encode:
    raise ConfigError("the trace has texts, and no tokenizer is loaded")


def _serve(
    name: str,
    stream: Stream,
    engines: Mapping[str, tuple[Server, bool]],
    running: int,
    repeats: int,
) -> dict[str, list[tuple[ArmCell, ArmCell]]]:
    """Each arm's figures alone and together, repeat by repeat; an order of arms for each."""
    found: dict[str, list[tuple[ArmCell, ArmCell]]] = {arm: [] for arm in ARMS}
    samples: Sequence[Sample] = stream.samples
    for repeat in range(repeats):
        for arm in Random(f"{name} {repeat}").sample(ARMS, len(ARMS)):
            engine, stock = engines[arm]
            works = [_work(arm, samples, at_once, stock=stock) for at_once in (1, running)]
            [alone], [together] = (engine.call(partial(serve_cells, work)) for work in works)
            found[arm].append((alone, together))
    return found


def _work(arm: str, samples: Sequence[Sample], at_once: int, *, stock: bool) -> CellWork:
    return make_work(arm, [samples], at_once, None, stock=stock)


def _compare(
    profile: TraceProfile,
    predictor: GridPredictor,
    cells: Mapping[str, Sequence[tuple[ArmCell, ArmCell]]],
) -> Iterator[CheckedFigure]:
    gib = predictor.grid.facts.block_bytes / 2**30
    for arm in profile.arms:
        name = arm.algorithm.spec
        found = predictor.predict(profile, arm)
        alone, together = zip(*cells[name], strict=True)
        requests = max(1, arm.counted.requests)
        rows = (
            ("computed tokens", [c.computed for c in alone], arm.counted.computed / requests),
            ("TTFT, s", [c.ttft_s for c in alone], found.ttft_s),
            ("requests/s", [c.requests_s for c in together], found.requests_s),
            ("KV, GiB", [c.peak_blocks * gib for c in together], found.kv_gib),
        )
        for figure, measured, predicted in rows:
            if predicted is not None:
                yield CheckedFigure(profile.name, name, figure, measured, predicted, found.inside)


def _summary(found: Sequence[CheckedFigure]) -> str:
    texts = []
    for figure in dict.fromkeys(one.figure for one in found):
        errors = [abs(one.error) for one in found if one.figure == figure]
        good = sum(error <= WITHIN for error in errors)
        texts.append(
            f"{figure}: {good} of {len(errors)} within {WITHIN:.0%}, median error "
            f"{median(errors):.0%}, worst {max(errors):.0%}"
        )
    return "; ".join(texts)


def _write(
    output: Path,
    facts: GridFacts,
    grid: MeasuredGrid,
    found: Sequence[CheckedFigure],
    repeats: int,
) -> None:
    rows = [
        (
            one.trace,
            one.arm,
            one.figure,
            f"{median(one.measured):.4g} ({min(one.measured):.4g} - {max(one.measured):.4g})",
            f"{one.predicted:.4g}",
            f"{one.error:+.0%}",
            "yes" if one.inside else "no",
        )
        for one in found
    ]
    head = ("trace", "arm", "figure", "measured", "predicted", "error", "in the grid's range")
    page = [
        "# What `picbench profile` predicts, against engines",
        f"Three traces that the grid has no point of, served by {facts.model}, {facts.dtype}, "
        f"{facts.hardware}, commit {facts.versions['commit'][:7]}; {facts.caveat or 'idle'}. "
        f"Median (lowest - highest) of {repeats} repeats, arms in a new order in each. Predicted "
        f"from: {grid.about()} TTFT: median of requests alone, from an empty cache; requests a "
        f"second and KV: {grid.facts.running} at a time.",
        f"{_summary(found)}.",
        markdown.table(head, rows),
    ]
    output.mkdir(parents=True, exist_ok=True)
    (output / "profile.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    document = {"facts": asdict(facts), "grid": asdict(grid.facts)}
    write_json(output / "profile.json", document | {"found": [asdict(one) for one in found]})

"""The arms and the request files of the measurement under load."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from picbench.compare.significance import paired_ratio
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.errors import ConfigError, closest
from picbench.experiments.decode_load import ratio
from picbench.experiments.engines import Measure
from picbench.experiments.page import spread, update_summary
from picbench.experiments.rounds import (
    CellFigures,
    RoundsFound,
    RoundsPlan,
    ServedArm,
    ServedCell,
    ServingRun,
    estimate,
    measure_rounds,
)
from picbench.experiments.waves import (
    CostGuess,
    LoadTraffic,
    MixedTraffic,
    cold_figures,
    load_figures,
    mixed_figures,
    stream_figures,
)
from picbench.files import write_whole
from picbench.run.schedule import to_request
from picbench.run.traffic_file import parse_traffic
from picbench.tables import table as markdown
from picbench.workloads import models
from picbench.workloads.traffic.chunk_source import build
from picbench.workloads.traffic.draw import draw
from picbench.workloads.traffic.settings import Traffic

#: Arms that are compared: MEPIC and prefix caching.
SUBJECT, PREFIX = "mepic", "prefix"

#: Chunks of about 170 tokens each, as in MiniPIC's throughput on 2WikiMQA, at a rate that no arm
#: keeps up with; and long ones at a rate that mepic keeps up with, while private copies, of about
#: 640 blocks a request, fill the pool.
LOADS = {
    "throughput": {
        "chunk-tokens": 90,
        "chunks": 10,
        "pool": 256,
        "requests": 1000,
        "rate": 500,
        "max-tokens": 16,
    },
    "memory": {
        "chunk-tokens": 480,
        "chunks": 16,
        "pool": 24,
        "requests": 200,
        "rate": 10,
        "max-tokens": 128,
    },
}


#: Of mixed traffic, the arm whose prompts' chunks are new.
NEW = "mepic, new chunks"

#: A rate counts as served where so much of it was: the last requests end after the last arrival.
_SERVED = 0.9

_LOAD: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "requests_s": ("requests/s", 2),
        "ttft_ms": ("TTFT p50, ms", 0),
        "ttft_p95_ms": ("p95, ms", 0),
        "tpot_ms": ("TPOT, ms", 1),
        "referenced": ("referenced, blocks", 0),
        "resident": ("resident, blocks", 0),
    }
)
_MIXED: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "itl_p99_ms": ("between tokens, p99, ms", 1),
        "itl_ms": ("median, ms", 2),
        "itl_most_ms": ("most, ms", 1),
        "itl_alone_ms": ("median without prompts, ms", 2),
    }
)
_COLD: Mapping[str, tuple[str, int]] = MappingProxyType({"ttft_ms": ("TTFT, ms", 0)})

#: Groups of cells: title, what is said, and columns, of which the first is compared.
GROUPS: Mapping[str, tuple[str, str, Mapping[str, tuple[str, int]]]] = MappingProxyType(
    {
        "share-nothing": (
            "Nothing is shared",
            "Each chunk is in one request only; by tokens of a chunk, ten in a request.",
            _LOAD,
        ),
        "2wiki": (
            "2WikiMQA-like requests, more than any arm can serve",
            "The load of `picbench measure load`, from an empty cache.",
            _LOAD,
        ),
        "mixed": (
            "Plain requests beside long prompts",
            "Plain requests decode while long prompts of chunks arrive; chunks are in the pool of "
            f"`{SUBJECT}`, and new otherwise.",
            _MIXED,
        ),
        "cold": (
            "Nothing is cached",
            "A long prompt of new chunks, one request at a time.",
            _COLD,
        ),
        "closed": (
            "Closed loop",
            "By distinct chunks, which were all served before, and requests in flight.",
            _LOAD,
        ),
        "rate": (
            "Rates",
            "Poisson arrivals a second; chunks were all served before.",
            _LOAD,
        ),
    }
)


def write_report(found: RoundsFound, output: Path) -> str:
    """Write ``load-report.md`` and the summary's figures; the page."""
    page = render_report(found)
    write_whole(output / "load-report.md", page.encode())
    update_summary(output, report_figures(found))
    return page


def report_figures(found: RoundsFound) -> dict[str, Any]:
    """The figures for ``summary.json`` of the groups that are measured.

    Requests a second and their ratios to stock vLLM's are medians over rounds, `spread` is the
    range of MEPIC's over their median.
    """
    figures: dict[str, Any] = {}
    shared = {
        f"chunk_{cell.rpartition(' ')[2]}": _median_ratio(found.cells[cell])
        for cell in _page_cells(found, "share-nothing")
    }
    if shared:
        figures["share_nothing"] = shared
    if "2wiki" in found.cells:
        ours, theirs = (found.cells["2wiki"][arm]["requests_s"] for arm in (SUBJECT, PREFIX))
        figures["load"] = {
            "mepic_rps": median(ours),
            "prefix_rps": median(theirs),
            "spread": (max(ours) - min(ours)) / median(ours),
        }
    if SUBJECT in found.compiled:
        figures["jit_after_ready"] = len(found.compiled[SUBJECT])
    return figures


def _median_ratio(arms: CellFigures) -> float:
    """Requests a second of MEPIC's engine over stock vLLM's, round by round."""
    rounds = zip(arms[SUBJECT]["requests_s"], arms[PREFIX]["requests_s"], strict=True)
    return median(ours / theirs for ours, theirs in rounds)


def render_report(found: RoundsFound) -> str:
    """The page, in Markdown."""
    facts = found.facts
    kernels = ", ".join(f"{arm}: {len(names)}" for arm, names in found.compiled.items())
    lines = [
        "# Loads, each arm with a server of its own",
        "",
        f"{facts['model']}, {facts['dtype']}: times, not answers; {facts['gpu']}, driver "
        f"{facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}, commit "
        f"{facts['commit']}. `{SUBJECT}` is an engine of picbench (shared decode: "
        f"{facts['shared_decode']}), `{PREFIX}` stock vLLM with "
        f"prefix caching; both are up at once with pools of {facts['pool']:,} blocks of "
        f"{facts['block_tokens']} tokens, at most {facts['running']} requests at a time and the "
        "token budget that they have by default, and take turns, another one first in each round. "
        f"Median (lowest - highest). Over {PREFIX}: geometric mean of rounds (95 %). Kernels "
        f"compiled after engines were ready: {kernels}.",
        "",
    ]
    for group, (title, text, columns) in GROUPS.items():
        cells = _page_cells(found, group)
        if cells:
            lines += [f"## {title}", "", text, "", _table(found, cells, columns), ""]
    if cells := _page_cells(found, "rate"):
        knees = (f"{arm} {_knee(found, cells, arm)}" for arm in (SUBJECT, PREFIX))
        lines += [
            f"Highest rate of which {_SERVED:.0%} is served, requests/s: {', '.join(knees)}.",
            "",
        ]
    for cell, error in found.failures.items():
        lines += [f"{cell} failed: {error.splitlines()[0]}", ""]
    return "\n".join(lines)


def _table(found: RoundsFound, cells: Sequence[str], columns: Mapping[str, tuple[str, int]]) -> str:
    key = next(iter(columns))
    rows = [row for cell in cells for row in _rows(cell, found.cells[cell], columns)]
    head = ("", "n", "arm", *(name for name, _ in columns.values()), f"{columns[key][0]}, over")
    return markdown.table(head, rows, right=3)


def _rows(
    cell: str, figures: CellFigures, columns: Mapping[str, tuple[str, int]]
) -> Iterator[tuple[str, ...]]:
    key = next(iter(columns))
    for arm, values in figures.items():
        alone = arm == PREFIX or PREFIX not in figures
        over = "-" if alone else ratio(values[key], figures[PREFIX][key])
        yield (
            cell,
            str(len(values[key])),
            arm,
            *(spread(values[name], digits) for name, (_, digits) in columns.items()),
            over,
        )


def _knee(found: RoundsFound, cells: Sequence[str], arm: str) -> str:
    """The highest rate that an arm serves; at least that where no higher one was measured."""
    rates = {float(cell.removeprefix("rate ")): found.cells[cell] for cell in cells}
    own = {rate: arms[arm] for rate, arms in rates.items() if arm in arms}
    served = [r for r, cell in own.items() if median(cell["requests_s"]) >= _SERVED * r]
    if not served:
        return f"below {min(rates):g}"
    return f"{'at least ' if max(served) == max(own) else ''}{max(served):g}"


def _page_cells(found: RoundsFound, group: str) -> list[str]:
    """The measured cells of a group, by the numbers in their names."""
    cells = [cell for cell in found.cells if cell.split(" ")[0] == group]
    return sorted(cells, key=lambda cell: [float(w) for w in cell.split() if w.isdigit()])


def _ratio(figures: CellFigures, key: str) -> Any:
    return paired_ratio(figures[PREFIX][key], figures[SUBJECT][key])


#: Rounds of the long stream, whose spread is that of a thousand requests.
_STREAMS = 3


@dataclass(frozen=True, slots=True)
class LoadSizes:
    """What is served on a device; pools are in blocks.

    Requests of the closed loops and of the rates are like `base`. Requests arrive for `arriving`
    seconds at each of `rates`, and at each of `high_rates`, which only the subject is expected to
    serve. `nothing` are tokens of chunks that belong to one request only. `stream` are settings of
    `picbench traffic`. `costs` is what a first round may take.
    """

    pool: int
    running: int
    base: LoadTraffic
    in_flight: tuple[int, ...]
    corpora: tuple[int, ...]
    rates: tuple[float, ...]
    high_rates: tuple[float, ...]
    arriving: float
    nothing: tuple[int, ...]
    cold: LoadTraffic
    mixed: MixedTraffic
    stream: Mapping[str, Any]
    costs: CostGuess

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and its reply."""
        longest = (traffic.chunks * traffic.length for traffic in (self.mixed, self.cold))
        return max(2048, *longest) + 512

    @property
    def brief(self) -> Measure:
        """A short load, to warm up."""
        few = replace(self.base, requests=8, corpus=min(self.corpora))
        return partial(load_figures, traffic=few)


_STREAM = {key.replace("-", "_"): value for key, value in LOADS["throughput"].items()}

#: By device. On a GPU two engines with such pools fit 139 GiB.
LOAD_SIZES: Mapping[str, LoadSizes] = MappingProxyType(
    {
        "cuda": LoadSizes(
            pool=20_000,
            running=256,
            base=LoadTraffic(64, 10, 170, 256, 64),
            in_flight=(1, 8, 64),
            corpora=(24, 256, 1024),
            rates=(8, 16, 24, 32),
            high_rates=(64, 96, 128),
            arriving=6.0,
            nothing=(170, 500),
            cold=LoadTraffic(2, 64, 512, 0, 1),
            mixed=MixedTraffic(64, 512, 16, 3, 100, 500),
            stream=_STREAM,
            costs=CostGuess(42_000, 0.006),
        ),
        "cpu": LoadSizes(
            pool=600,
            running=8,
            base=LoadTraffic(4, 3, 40, 8, 4, reply=4),
            in_flight=(1, 4),
            corpora=(4, 8),
            rates=(20, 40),
            high_rates=(80,),
            arriving=0.2,
            nothing=(40,),
            cold=LoadTraffic(2, 4, 40, 0, 1, reply=2),
            mixed=MixedTraffic(4, 40, 3, 2, 6, 40),
            stream=_STREAM | {"requests": 6, "pool": 24, "chunks": 8, "chunk_tokens": 20},
            costs=CostGuess(3_000, 0.02),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun(ServingRun):
    """How to measure; `only` some groups of cells (none: all)."""

    only: Sequence[str] = ()
    shared_decode: str = "off"


def measure(run: LoadRun, say: Callable[[str], None]) -> tuple[str, bool]:
    """Measure what is left: the page of all that is measured, and whether nothing is left.

    The page is empty before any cell is done.
    """
    began = time.monotonic()
    plan = load_plan(run)
    if run.seconds:  # Drawing requests takes seconds, too.
        plan = replace(plan, seconds=max(1.0, run.seconds - (time.monotonic() - began)))
    return measure_rounds(plan, partial(write_report, output=run.output), say)


def estimated(run: LoadRun) -> str:
    """What is left."""
    plan = load_plan(run)
    return str(estimate(plan, plan.read()))


def load_plan(run: LoadRun) -> RoundsPlan:
    """The cells that are asked for. Raises ConfigError for a group that is not there."""
    for name in run.only:
        if name not in GROUPS:
            raise ConfigError(f"`only` {name}: no such group", hint=closest(name, GROUPS))
    sizes = LOAD_SIZES[run.device]
    config = EngineConfig(
        model=str(models.resolve(run.model).path),
        device=run.device,
        dtype=run.dtype,
        context=sizes.context,
        kv_blocks=sizes.pool,
        max_requests=sizes.running,
        tiers="",
        shared_decode=run.shared_decode,
    )
    facts = run.facts() | {"pool": sizes.pool, "running": sizes.running}
    facts["block_tokens"] = BLOCK_SIZE
    facts["shared_decode"] = run.shared_decode
    stock = replace(config, stock=True, algorithm="prefix", shared_decode="off")
    return RoundsPlan(
        run.output / "load-report.json",
        facts,
        {SUBJECT: config, PREFIX: stock},
        list(_cells(sizes, run)),
        run.rounds,
        run.seconds,
    )


def _cells(sizes: LoadSizes, run: LoadRun) -> Iterator[ServedCell]:
    for rank, group in enumerate(GROUPS):
        if not run.only or group in run.only:
            for cell in _CELLS[group](sizes, run):
                yield replace(cell, rank=rank)


def _nothing(sizes: LoadSizes, run: LoadRun) -> Iterator[ServedCell]:
    for length in sizes.nothing:
        traffic = replace(sizes.base, length=length, corpus=0)
        yield _loaded(f"share-nothing {length}", traffic, sizes, (SUBJECT, PREFIX))


def _stream(sizes: LoadSizes, run: LoadRun) -> Iterator[ServedCell]:
    values = {key: value for key, value in sizes.stream.items() if key != "chunks"}
    values |= {"rate": float(values["rate"]), "chunks": str(sizes.stream["chunks"])}
    config = parse_traffic({"dataset": "2wikimqa", **values})
    tokenizer = models.load_tokenizer(models.resolve(run.model))
    traffic: Traffic = config.traffic()
    stream = draw(traffic, build(config.source(models.resolve(run.model)), tokenizer, traffic.seed))
    assert stream.arrivals is not None
    requests = tuple(to_request(sample) for sample in stream.samples)
    work = partial(stream_figures, requests=requests, arrivals=tuple(stream.arrivals))
    tokens = sum(sample.prompt_tokens for sample in stream.samples)
    cell = _cell("2wiki", work, sizes, sizes.costs.prompts(tokens, 0.3 * tokens))
    yield replace(cell, most=_STREAMS)


def _mixed(sizes: LoadSizes, run: LoadRun) -> Iterator[ServedCell]:
    work = partial(mixed_figures, traffic=sizes.mixed)
    arms = {
        SUBJECT: ServedArm(SUBJECT, partial(work, new=False), sizes.brief),
        NEW: ServedArm(SUBJECT, partial(work, new=True)),
        PREFIX: ServedArm(PREFIX, partial(work, new=True), sizes.brief),
    }
    yield ServedCell("mixed", arms, len(arms) * sizes.costs.mixed(sizes.mixed))


def _cold(sizes: LoadSizes, run: LoadRun) -> Iterator[ServedCell]:
    seconds = 2 * sizes.costs.load(sizes.cold)
    yield _cell("cold", partial(cold_figures, traffic=sizes.cold), sizes, seconds)


def _closed(sizes: LoadSizes, run: LoadRun) -> Iterator[ServedCell]:
    for corpus, running in product(sizes.corpora, sizes.in_flight):
        requests = sizes.base.requests if running > 1 else max(2, sizes.base.requests // 4)
        traffic = replace(sizes.base, corpus=corpus, running=running, requests=requests)
        name = f"closed {corpus} chunks, {running} in flight"
        yield _loaded(name, traffic, sizes, (SUBJECT, PREFIX))


def _rates(sizes: LoadSizes, run: LoadRun) -> Iterator[ServedCell]:
    for rate in (*sizes.rates, *sizes.high_rates):
        traffic = replace(sizes.base, requests=round(sizes.arriving * rate), running=0, rate=rate)
        arms = (SUBJECT,) if rate in sizes.high_rates else (SUBJECT, PREFIX)
        yield _loaded(f"rate {rate:g}", traffic, sizes, arms)


#: Cells of each group.
_CELLS: Mapping[str, Callable[[LoadSizes, LoadRun], Iterator[ServedCell]]] = MappingProxyType(
    {
        "share-nothing": _nothing,
        "2wiki": _stream,
        "mixed": _mixed,
        "cold": _cold,
        "closed": _closed,
        "rate": _rates,
    }
)


def _loaded(name: str, traffic: LoadTraffic, sizes: LoadSizes, arms: tuple[str, ...]) -> ServedCell:
    """A cell of one load."""
    seconds = sum(sizes.costs.load(traffic, reused=arm == SUBJECT) for arm in arms)
    found = _cell(name, partial(load_figures, traffic=traffic), sizes, seconds)
    return replace(found, arms={arm: found.arms[arm] for arm in arms})


def _cell(name: str, work: Measure, sizes: LoadSizes, seconds: float) -> ServedCell:
    """A cell of both arms."""
    arms = {arm: ServedArm(arm, work, sizes.brief) for arm in (SUBJECT, PREFIX)}
    return ServedCell(name, arms, seconds)

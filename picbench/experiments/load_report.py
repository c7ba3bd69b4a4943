"""Loads of MEPIC's engine and of stock vLLM, repeated: `LOAD_REPORT`.

Nothing shared, more requests than can be served, plain requests beside long prompts, cold prompts,
closed loops over corpora, and rates.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from random import Random
from statistics import mean, median
from types import MappingProxyType
from typing import Any

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.engine import Engine
from picbench.engines.ledger import summarise
from picbench.engines.request import Chunk, Request, Result
from picbench.errors import ConfigError, InvalidRun, closest
from picbench.experiments.waves import CostGuess, as_stock, p99, serve_beside
from picbench.run.measurements import LoadReport
from picbench.run.runner import (
    Cell,
    ExperimentPlan,
    Measure,
    RoundsExperiment,
    RoundsRecord,
    ServedArm,
    engine_of,
    facts_of,
    random_chunks,
    random_text,
)
from picbench.run.schedule import to_request
from picbench.run.traffic_file import parse_traffic
from picbench.tables.page import (
    WHERE,
    Columns,
    Found,
    by_round,
    first_lines,
    mean_ratio,
    page,
    spreads,
)
from picbench.tables.table import NOTHING, table
from picbench.workloads import models
from picbench.workloads.traffic.chunk_source import build
from picbench.workloads.traffic.corpus import HEAD, TAIL
from picbench.workloads.traffic.draw import draw

#: Arms that are compared: MEPIC and prefix caching; and of mixed traffic, the arm whose prompts'
#: chunks are new.
SUBJECT, PREFIX = "mepic", "prefix"
NEW = "mepic, new chunks"

#: A rate counts as served where so much of it was: the last requests end after the last arrival.
_SERVED = 0.9

#: Rounds of the long stream, whose spread is that of a thousand requests.
_STREAMS = 3

#: Of the stream, by settings of `picbench traffic`: chunks of about 170 tokens each, as in
#: MiniPIC's throughput on 2WikiMQA, at a rate that no arm keeps up with.
_STREAM: Mapping[str, Any] = MappingProxyType(
    {"chunk_tokens": 90, "chunks": 10, "pool": 256, "requests": 1000, "rate": 500, "max_tokens": 16}
)


@dataclass(frozen=True, slots=True)
class LoadTraffic:
    """Requests of `chunks` chunks of `length` random tokens each, with replies of `reply`.

    Chunks are drawn from a corpus that was served before, or are of one request only (`corpus` 0).
    `running` requests are in flight at a time, or they arrive at `rate` a second (0: do not).
    """

    requests: int
    chunks: int
    length: int
    corpus: int
    running: int
    rate: float = 0.0
    reply: int = 16

    def draw(self, name: str) -> list[list[Chunk]]:
        """The chunks of each request, for each name others."""
        dice = Random(name)
        if not self.corpus:
            names = (f"{name} {i}" for i in range(self.requests))
            return [random_chunks(self.chunks, self.length, each) for each in names]
        known = self.known()
        return [dice.sample(known, self.chunks) for _ in range(self.requests)]

    def known(self) -> list[Chunk]:
        """The corpus."""
        return random_chunks(self.corpus, self.length, "corpus")

    def arrivals(self, name: str) -> list[float] | None:
        """Seconds of a Poisson process with as many arrivals; None in a closed loop."""
        if not self.rate:
            return None
        dice, span = Random(f"{name} arrivals"), self.requests / self.rate
        return sorted(dice.uniform(0.0, span) for _ in range(self.requests))

    def ask(self, chunks: Sequence[Chunk], name: str, algorithm: str | None) -> Request:
        """A request with these chunks."""
        head, tail = random_text(HEAD, "head"), random_text(TAIL, name)
        return Request([head, *chunks, tail], algorithm, self.reply)

    def asked(self, name: str, algorithm: str | None) -> list[Request]:
        """All requests, for each name others."""
        return [
            self.ask(chunks, f"{name} {i}", algorithm) for i, chunks in enumerate(self.draw(name))
        ]

    def seconds(self, costs: CostGuess, *, reused: bool = False) -> float:
        """What one arm may take, its corpus included.

        With `reused` chunks, a request computes a block of each chunk of the corpus.
        """
        computed = BLOCK_SIZE if reused and self.corpus else self.length
        steps = self.reply * self.requests / (self.running or self.requests)
        served = costs.seconds(self.requests * self.chunks * computed, steps)
        arriving = self.requests / self.rate if self.rate else 0.0
        return costs.seconds(self.corpus * self.length, 0) + max(served, arriving)


@dataclass(frozen=True, slots=True)
class MixedTraffic:
    """Long prompts that arrive while `others` plain requests decode `reply` tokens each.

    `arrivals` prompts of `chunks` chunks of `length` tokens come `gap` steps apart.
    """

    chunks: int
    length: int
    others: int
    arrivals: int
    gap: int
    reply: int

    def draw(self, name: str) -> list[list[Chunk]]:
        """The chunks of each prompt, for each name others."""
        names = (f"{name} {n}" for n in range(self.arrivals))
        return [random_chunks(self.chunks, self.length, each) for each in names]

    def seconds(self, costs: CostGuess) -> float:
        """What one arm may take."""
        return costs.seconds(self.arrivals * self.chunks * self.length, self.reply)


def load_figures(engine: Engine, name: str, *, traffic: LoadTraffic) -> dict[str, float]:
    """Requests a second, latencies and blocks of one load, from a cache with the corpus in it."""
    algorithm = _algorithm(engine)
    engine.reset()
    known, size = traffic.known(), traffic.chunks
    fill = [known[i : i + size] for i in range(0, len(known), size)]
    if fill:
        before = [traffic.ask(chunks, f"fill {i}", algorithm) for i, chunks in enumerate(fill)]
        engine.generate(before, ignore_eos=True, concurrency=8)
    requests = traffic.asked(name, algorithm)
    return _served(engine, requests, traffic.arrivals(name), traffic.running)


def stream_figures(
    engine: Engine, name: str, *, requests: Sequence[Request], arrivals: Sequence[float]
) -> dict[str, float]:
    """The same of a stream of requests, from an empty cache."""
    engine.reset()
    return _served(engine, requests, arrivals, 0)


def _served(
    engine: Engine, requests: Sequence[Request], arrivals: Sequence[float] | None, running: int
) -> dict[str, float]:
    engine.measure()
    results = engine.generate(
        requests, ignore_eos=True, concurrency=running or None, arrivals=arrivals
    )
    took = engine.busy_s - (min(arrivals) if arrivals else 0.0)
    _require_answers(results)
    blocks = summarise(engine.memory)
    ttft = sorted(result.timings.ttft for result in results)
    tpot = [result.timings.tpot for result in results if result.timings.tpot is not None]
    return {
        "requests_s": len(results) / took,
        "ttft_ms": median(ttft) * 1e3,
        "ttft_p95_ms": ttft[math.ceil(0.95 * len(ttft)) - 1] * 1e3,
        "tpot_ms": mean(tpot) * 1e3,
        "referenced": blocks.peak_referenced,
        "resident": blocks.peak_resident,
    }


def mixed_figures(
    engine: Engine, name: str, *, traffic: MixedTraffic, new: bool
) -> dict[str, float]:
    """Milliseconds between tokens of plain requests, alone and beside long prompts.

    The prompts' chunks are `new`, or in the pool, which stock vLLM cannot make use of. Each step
    gives each plain request a token. Raises InvalidRun if prompts were left when these ended.
    """
    engine.reset()
    prompts = traffic.draw(name)
    asked = random_text(TAIL, name)
    algorithm = _algorithm(engine)
    if not new:
        before = [Request([*chunks[::-1], asked], algorithm) for chunks in prompts]
        engine.generate(before, max_tokens=1, ignore_eos=True, concurrency=1)
    requests = [Request([*chunks, asked], algorithm) for chunks in prompts]
    texts = (random_text(HEAD, f"{name} other {i}") for i in range(traffic.others))
    others = [Request([text], "prefix") for text in texts]
    steps = serve_beside(engine, requests, others, gap=traffic.gap, reply=traffic.reply)
    ends = [steps[0][0], *(ended for _, ended in steps)]
    gaps = [(after - before) * 1e3 for before, after in pairwise(ends)]
    # The first steps compute the others' prompts.
    quiet, busy = gaps[traffic.gap // 2 : traffic.gap], gaps[traffic.gap :]
    return {
        "itl_alone_ms": median(quiet),
        "itl_ms": median(busy),
        "itl_p99_ms": p99(busy),
        "itl_most_ms": max(busy),
    }


def cold_figures(engine: Engine, name: str, *, traffic: LoadTraffic) -> dict[str, float]:
    """Milliseconds to the first token of prompts that nothing is cached of, one at a time."""
    algorithm = _algorithm(engine)
    requests = traffic.asked(name, algorithm)
    results = engine.generate(requests, ignore_eos=True, concurrency=1)
    _require_answers(results)
    return {"ttft_ms": median(r.timings.ttft for r in results) * 1e3}


def _require_answers(results: Sequence[Result]) -> None:
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise InvalidRun(f"{len(failed)} requests failed: {failed[0]}")


def _algorithm(engine: Engine) -> str | None:
    return None if engine.config.stock else "mepic"


@dataclass(frozen=True, slots=True)
class LoadSizes:
    """What is served on a device, by default a GPU; pools are in blocks.

    Requests of the closed loops and of the rates are like `base`. Requests arrive for `arriving`
    seconds at each of `rates`, and at each of `high_rates`, which only the subject is expected to
    serve. `nothing` are tokens of chunks that belong to one request only. `stream` are settings of
    `picbench traffic`. `costs` is what a first round may take.
    """

    stream: Mapping[str, Any]
    costs: CostGuess
    pool: int = 20_000
    running: int = 256
    base: LoadTraffic = LoadTraffic(64, 10, 170, 256, 64)
    in_flight: tuple[int, ...] = (1, 8, 64)
    corpora: tuple[int, ...] = (24, 256, 1024)
    rates: tuple[float, ...] = (8, 16, 24, 32)
    high_rates: tuple[float, ...] = (64, 96, 128)
    arriving: float = 6.0
    nothing: tuple[int, ...] = (170, 500)
    cold: LoadTraffic = LoadTraffic(2, 64, 512, 0, 1)
    mixed: MixedTraffic = MixedTraffic(64, 512, 16, 3, 100, 500)

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and its reply."""
        longest = (traffic.chunks * traffic.length for traffic in (self.mixed, self.cold))
        return max(2048, *longest) + 512

    def arm(self, name: str, measure: Measure) -> ServedArm:
        """What an arm's engine measures, warmed up by a short load."""
        few = replace(self.base, requests=8, corpus=min(self.corpora))
        return ServedArm(name, measure, partial(load_figures, traffic=few))

    def cell(
        self, name: str, work: Measure, seconds: float, arms: Sequence[str] = (SUBJECT, PREFIX)
    ) -> Cell:
        """A cell in which all arms do the same."""
        return Cell(name, {arm: self.arm(arm, work) for arm in arms}, seconds)

    def load(
        self, name: str, traffic: LoadTraffic, arms: Sequence[str] = (SUBJECT, PREFIX)
    ) -> Cell:
        """A cell of one load."""
        seconds = sum(traffic.seconds(self.costs, reused=arm == SUBJECT) for arm in arms)
        return self.cell(name, partial(load_figures, traffic=traffic), seconds, arms)


#: By device. On a GPU two engines with such pools fit 139 GiB.
LOAD_SIZES: Mapping[str, LoadSizes] = MappingProxyType(
    {
        "cuda": LoadSizes(_STREAM, CostGuess(42_000, 0.006)),
        "cpu": LoadSizes(
            {**_STREAM, "requests": 6, "pool": 24, "chunks": 8, "chunk_tokens": 20},
            CostGuess(3_000, 0.02),
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
        ),
    }
)


def _nothing(sizes: LoadSizes, model: str) -> Iterator[Cell]:
    for length in sizes.nothing:
        traffic = replace(sizes.base, length=length, corpus=0)
        yield sizes.load(f"share-nothing {length}", traffic)


def _stream(sizes: LoadSizes, model: str) -> Iterator[Cell]:
    values = {**sizes.stream, "rate": float(sizes.stream["rate"])}
    values["chunks"] = str(sizes.stream["chunks"])
    config = parse_traffic({"dataset": "2wikimqa", **values})
    found = models.resolve(model)
    traffic = config.traffic()
    source = build(config.source(found), models.load_tokenizer(found), traffic.seed)
    stream = draw(traffic, source)
    assert stream.arrivals is not None
    requests = tuple(to_request(sample) for sample in stream.samples)
    work = partial(stream_figures, requests=requests, arrivals=tuple(stream.arrivals))
    tokens = sum(sample.prompt_tokens for sample in stream.samples)
    cell = sizes.cell("2wiki", work, sizes.costs.seconds(1.3 * tokens, 0))
    yield replace(cell, most=_STREAMS)


def _mixed(sizes: LoadSizes, model: str) -> Iterator[Cell]:
    work = partial(mixed_figures, traffic=sizes.mixed)
    arms = {
        SUBJECT: sizes.arm(SUBJECT, partial(work, new=False)),
        NEW: ServedArm(SUBJECT, partial(work, new=True)),
        PREFIX: sizes.arm(PREFIX, partial(work, new=True)),
    }
    yield Cell("mixed", arms, len(arms) * sizes.mixed.seconds(sizes.costs))


def _cold(sizes: LoadSizes, model: str) -> Iterator[Cell]:
    seconds = 2 * sizes.cold.seconds(sizes.costs)
    yield sizes.cell("cold", partial(cold_figures, traffic=sizes.cold), seconds)


def _closed(sizes: LoadSizes, model: str) -> Iterator[Cell]:
    for corpus, running in product(sizes.corpora, sizes.in_flight):
        requests = sizes.base.requests if running > 1 else max(2, sizes.base.requests // 4)
        traffic = replace(sizes.base, corpus=corpus, running=running, requests=requests)
        yield sizes.load(f"closed {corpus} chunks, {running} in flight", traffic)


def _rates(sizes: LoadSizes, model: str) -> Iterator[Cell]:
    for rate in (*sizes.rates, *sizes.high_rates):
        traffic = replace(sizes.base, requests=round(sizes.arriving * rate), running=0, rate=rate)
        arms = (SUBJECT,) if rate in sizes.high_rates else (SUBJECT, PREFIX)
        yield sizes.load(f"rate {rate:g}", traffic, arms)


_LOAD: Columns = MappingProxyType(
    {
        "requests_s": ("requests/s", 2),
        "ttft_ms": ("TTFT p50, ms", 0),
        "ttft_p95_ms": ("p95, ms", 0),
        "tpot_ms": ("TPOT, ms", 1),
        "referenced": ("referenced, blocks", 0),
        "resident": ("resident, blocks", 0),
    }
)
_MIXED: Columns = MappingProxyType(
    {
        "itl_p99_ms": ("between tokens, p99, ms", 1),
        "itl_ms": ("median, ms", 2),
        "itl_most_ms": ("most, ms", 1),
        "itl_alone_ms": ("median without prompts, ms", 2),
    }
)


@dataclass(frozen=True, slots=True)
class CellGroup:
    """Cells of one kind: a section's title and text, and columns, the first one compared.

    `cells` makes them for a device's sizes and a model.
    """

    title: str
    text: str
    cells: Callable[[LoadSizes, str], Iterator[Cell]]
    columns: Columns


#: By the first word of their cells' names, in the order of the page and of what matters most.
GROUPS: Mapping[str, CellGroup] = MappingProxyType(
    {
        "share-nothing": CellGroup(
            "Nothing is shared",
            "Each chunk is in one request only; by tokens of a chunk, ten in a request.",
            _nothing,
            _LOAD,
        ),
        "2wiki": CellGroup(
            "2WikiMQA-like requests, more than any arm can serve",
            "The load of `picbench measure load`, from an empty cache.",
            _stream,
            _LOAD,
        ),
        "mixed": CellGroup(
            "Plain requests beside long prompts",
            "Plain requests decode while long prompts of chunks arrive; chunks are in the pool of "
            f"`{SUBJECT}`, and new otherwise.",
            _mixed,
            _MIXED,
        ),
        "cold": CellGroup(
            "Nothing is cached",
            "A long prompt of new chunks, one request at a time.",
            _cold,
            MappingProxyType({"ttft_ms": ("TTFT, ms", 0)}),
        ),
        "closed": CellGroup(
            "Closed loop",
            "By distinct chunks, which were all served before, and requests in flight.",
            _closed,
            _LOAD,
        ),
        "rate": CellGroup(
            "Rates", "Poisson arrivals a second; chunks were all served before.", _rates, _LOAD
        ),
    }
)


def load_plan(settings: LoadReport) -> ExperimentPlan:
    """The cells that are asked for. Raises ConfigError for a group that is not there."""
    for name in settings.only:
        if name not in GROUPS:
            raise ConfigError(f"`only` {name}: no such group", hint=closest(name, GROUPS))
    sizes = LOAD_SIZES[settings.device]
    config = engine_of(
        settings,
        context=sizes.context,
        kv_blocks=sizes.pool,
        max_requests=sizes.running,
        shared_decode=settings.shared_decode,
    )
    facts = {
        "pool": sizes.pool,
        "running": sizes.running,
        "block_tokens": BLOCK_SIZE,
        "shared_decode": settings.shared_decode,
    }
    return ExperimentPlan(
        name="load-report",
        facts=facts_of(settings) | facts,
        engines={SUBJECT: config, PREFIX: as_stock(config)},
        cells=[
            replace(cell, rank=rank)
            for rank, (name, group) in enumerate(GROUPS.items())
            if not settings.only or name in settings.only
            for cell in group.cells(sizes, settings.served)
        ],
        rounds=settings.rounds,
    )


def report_figures(record: RoundsRecord) -> dict[str, Any]:
    """The figures for ``summary.json`` of the groups that are measured.

    Requests a second and their ratios to stock vLLM's are medians over rounds, `spread` is the
    range of MEPIC's over their median.
    """
    figures: dict[str, Any] = {}
    shared = {
        f"chunk_{cell.rpartition(' ')[2]}": median(by_round(*_rates_of(record.cells[cell])))
        for cell in _measured(record, "share-nothing")
    }
    if shared:
        figures["share_nothing"] = shared
    if "2wiki" in record.cells:
        ours, theirs = _rates_of(record.cells["2wiki"])
        figures["load"] = {
            "mepic_rps": median(ours),
            "prefix_rps": median(theirs),
            "spread": (max(ours) - min(ours)) / median(ours),
        }
    if SUBJECT in record.compiled:
        figures["jit_after_ready"] = len(record.compiled[SUBJECT])
    return figures


def _rates_of(figures: Found) -> tuple[Sequence[float], Sequence[float]]:
    """Requests a second of MEPIC's engine and of stock vLLM, round by round."""
    return figures[SUBJECT]["requests_s"], figures[PREFIX]["requests_s"]


def render_report(record: RoundsRecord) -> str:
    """The page, in Markdown."""
    if not record.cells:
        return ""
    facts = record.facts
    kernels = ", ".join(f"{arm}: {len(names)}" for arm, names in record.compiled.items())
    sections = []
    for name, group in GROUPS.items():
        if cells := _measured(record, name):
            sections += [f"## {group.title}", group.text, _table(record, cells, group.columns)]
    if cells := _measured(record, "rate"):
        knees = (f"{arm} {_knee(record, cells, arm)}" for arm in (SUBJECT, PREFIX))
        served = f"Highest rate of which {_SERVED:.0%} is served, requests/s"
        sections.append(f"{served}: {', '.join(knees)}.")
    return page(
        "Loads, each arm with a server of its own",
        f"{WHERE.format(**facts)} `{SUBJECT}` is an engine of picbench (shared decode: "
        f"{facts['shared_decode']}), `{PREFIX}` stock vLLM with "
        f"prefix caching; both are up at once with pools of {facts['pool']:,} blocks of "
        f"{facts['block_tokens']} tokens, at most {facts['running']} requests at a time and the "
        "token budget that they have by default, and take turns, another one first in each round. "
        f"Median (lowest - highest). Over {PREFIX}: geometric mean of rounds (95 %). Kernels "
        f"compiled after engines were ready: {kernels}.",
        *sections,
        *first_lines(record.failures),
    )


def _table(record: RoundsRecord, cells: Sequence[str], columns: Columns) -> str:
    key = next(iter(columns))
    rows = []
    for cell in cells:
        figures = record.cells[cell]
        for arm, values in figures.items():
            alone = arm == PREFIX or PREFIX not in figures
            over = NOTHING if alone else mean_ratio(values[key], figures[PREFIX][key])
            rows.append((cell, str(len(values[key])), arm, *spreads(values, columns), over))
    head = ("", "n", "arm", *(name for name, _ in columns.values()), f"{columns[key][0]}, over")
    return table(head, rows, right=3)


def _knee(record: RoundsRecord, cells: Sequence[str], arm: str) -> str:
    """The highest rate that an arm serves; at least that where no higher one was measured."""
    rates = {float(cell.removeprefix("rate ")): record.cells[cell] for cell in cells}
    own = {rate: arms[arm] for rate, arms in rates.items() if arm in arms}
    served = [r for r, cell in own.items() if median(cell["requests_s"]) >= _SERVED * r]
    if not served:
        return f"below {min(rates):g}"
    return f"{'at least ' if max(served) == max(own) else ''}{max(served):g}"


def _measured(record: RoundsRecord, group: str) -> list[str]:
    """The measured cells of a group, by the numbers in their names."""
    cells = [cell for cell in record.cells if cell.split(" ")[0] == group]
    return sorted(cells, key=lambda cell: [float(w) for w in cell.split() if w.isdigit()])


LOAD_REPORT = RoundsExperiment(plan=load_plan, render=render_report, figures=report_figures)

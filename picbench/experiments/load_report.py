"""Loads of MEPIC's engine and of stock vLLM, repeated: `LOAD_REPORT`.

Nothing shared, more requests than can be served, plain requests beside long prompts, cold prompts,
closed loops over corpora, and rates.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from random import Random
from statistics import mean, median
from typing import Any

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.engine import Engine
from picbench.engines.ledger import summarise
from picbench.engines.request import Chunk, Request, Result
from picbench.errors import ConfigError, InvalidRun, closest
from picbench.experiments.waves import BesideScene, CostGuess, as_stock, p99, serve_beside
from picbench.run import runner
from picbench.run.measurements import LoadReport
from picbench.run.runner import Cell, RoundsRecord, ServedArm, random_chunks, random_text
from picbench.run.schedule import to_request
from picbench.run.traffic_file import parse_traffic
from picbench.tables.page import WHERE, Columns, by_round, first_lines, mean_ratio, page, spreads
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

    def known(self) -> list[Chunk]:
        """The corpus."""
        return random_chunks(self.corpus, self.length, "corpus")

    def ask(self, chunks: Sequence[Chunk], name: str, algorithm: str | None) -> Request:
        """A request with these chunks."""
        head, tail = random_text(HEAD, "head"), random_text(TAIL, name)
        return Request([head, *chunks, tail], algorithm, self.reply)

    def draw(self, name: str, algorithm: str | None) -> list[Request]:
        """All requests, for each name others."""
        dice, known, found = Random(name), self.known(), []
        for number in range(self.requests):
            own = f"{name} {number}"
            chunks = (
                dice.sample(known, self.chunks)
                if known
                else random_chunks(self.chunks, self.length, own)
            )
            found.append(self.ask(chunks, own, algorithm))
        return found

    def arrivals(self, name: str) -> list[float] | None:
        """Seconds of a Poisson process with as many arrivals; None in a closed loop."""
        if not self.rate:
            return None
        dice, span = Random(f"{name} arrivals"), self.requests / self.rate
        return sorted(dice.uniform(0.0, span) for _ in range(self.requests))

    def seconds(self, costs: CostGuess, *, reused: bool = False) -> float:
        """What one arm may take, its corpus included.

        With `reused` chunks, a request computes a block of each chunk of the corpus.
        """
        computed = BLOCK_SIZE if reused and self.corpus else self.length
        steps = self.reply * self.requests / (self.running or self.requests)
        served = costs.seconds(self.requests * self.chunks * computed, steps)
        arriving = self.requests / self.rate if self.rate else 0.0
        return costs.seconds(self.corpus * self.length, 0) + max(served, arriving)


def _algorithm(engine: Engine) -> str | None:
    return None if engine.config.stock else "mepic"


def load_figures(engine: Engine, name: str, *, traffic: LoadTraffic) -> dict[str, float]:
    """Requests a second, latencies and blocks of one load, from a cache with the corpus in it."""
    algorithm = _algorithm(engine)
    engine.reset()
    known, size = traffic.known(), traffic.chunks
    fill = [known[i : i + size] for i in range(0, len(known), size)]
    if fill:
        before = [traffic.ask(chunks, f"fill {i}", algorithm) for i, chunks in enumerate(fill)]
        engine.generate(before, ignore_eos=True, concurrency=8)
    requests = traffic.draw(name, algorithm)
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


def cold_figures(engine: Engine, name: str, *, traffic: LoadTraffic) -> dict[str, float]:
    """Milliseconds to the first token of prompts that nothing is cached of, one at a time."""
    requests = traffic.draw(name, _algorithm(engine))
    results = engine.generate(requests, ignore_eos=True, concurrency=1)
    _require_answers(results)
    return {"ttft_ms": median(r.timings.ttft for r in results) * 1e3}


def _require_answers(results: Sequence[Result]) -> None:
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise InvalidRun(f"{len(failed)} requests failed: {failed[0]}")


def mixed_figures(engine: Engine, name: str, *, scene: BesideScene, new: bool) -> dict[str, float]:
    """Milliseconds between tokens of plain requests, alone and beside long prompts.

    The prompts' chunks are `new`, or in the pool, which stock vLLM cannot make use of. Each step
    gives each plain request a token. Raises InvalidRun if prompts were left when these ended.
    """
    engine.reset()
    prompts = [scene.draw(f"{name} {n}") for n in range(scene.arrivals)]
    asked, algorithm = random_text(scene.question, name), _algorithm(engine)
    if not new:
        before = [Request([*chunks[::-1], asked], algorithm) for chunks in prompts]
        engine.generate(before, max_tokens=1, ignore_eos=True, concurrency=1)
    requests = [Request([*chunks, asked], algorithm) for chunks in prompts]
    steps = serve_beside(engine, requests, name, scene)
    ends = [steps[0][0], *(ended for _, ended in steps)]
    gaps = [(after - before) * 1e3 for before, after in pairwise(ends)]
    # The first steps compute the others' prompts.
    quiet, busy = gaps[scene.gap // 2 : scene.gap], gaps[scene.gap :]
    return {
        "itl_alone_ms": median(quiet),
        "itl_ms": median(busy),
        "itl_p99_ms": p99(busy),
        "itl_most_ms": max(busy),
    }


@dataclass(frozen=True, slots=True)
class LoadSizes:
    """What is served on a device, by default a GPU; pools are in blocks.

    Requests of the closed loops and of the rates are like `base`. Requests arrive for `arriving`
    seconds at each of `rates`, and at each of `high_rates`, which only the subject is expected to
    serve. `nothing` are tokens of chunks that belong to one request only. `stream` changes settings
    of the stream, see `stream_cell`. `costs` is what a first round may take.
    """

    costs: CostGuess
    mixed: BesideScene
    stream: Mapping[str, Any] = field(default_factory=dict)
    pool: int = 20_000
    running: int = 256
    base: LoadTraffic = LoadTraffic(64, 10, 170, 256, 64)
    in_flight: Sequence[int] = (1, 8, 64)
    corpora: Sequence[int] = (24, 256, 1024)
    rates: Sequence[float] = (8, 16, 24, 32)
    high_rates: Sequence[float] = (64, 96, 128)
    arriving: float = 6.0
    nothing: Sequence[int] = (170, 500)
    cold: LoadTraffic = LoadTraffic(2, 64, 512, 0, 1)

    def arm(self, name: str, measure: runner.Measure) -> ServedArm:
        """What an arm's engine measures, warmed up by a short load."""
        few = replace(self.base, requests=8, corpus=min(self.corpora))
        return ServedArm(name, measure, partial(load_figures, traffic=few))

    def cell(
        self,
        name: str,
        work: runner.Measure,
        seconds: float,
        arms: Sequence[str] = (SUBJECT, PREFIX),
    ) -> Cell:
        """A cell in which all arms do the same."""
        return Cell(name, {arm: self.arm(arm, work) for arm in arms}, seconds)

    def load(self, name: str, arms: Sequence[str] = (SUBJECT, PREFIX), **changes: Any) -> Cell:
        """A cell of one load, which is like `base` but for some changes."""
        traffic = replace(self.base, **changes)
        seconds = sum(traffic.seconds(self.costs, reused=arm == SUBJECT) for arm in arms)
        return self.cell(name, partial(load_figures, traffic=traffic), seconds, arms)

    def stream_cell(self, model: str) -> Cell:
        """A stream of `picbench traffic`, as in MiniPIC's throughput on 2WikiMQA.

        Chunks have about 170 tokens, the rate is one that no arm keeps up with. Three rounds are
        enough: their spread is that of a thousand requests.
        """
        asked = {"chunk_tokens": 90, "chunks": "10", "pool": 256, "requests": 1000, "rate": 500.0}
        config = parse_traffic({"dataset": "2wikimqa", "max_tokens": 16, **asked, **self.stream})
        found, traffic = models.resolve(model), config.traffic()
        source = build(config.source(found), models.load_tokenizer(found), traffic.seed)
        stream = draw(traffic, source)
        assert stream.arrivals is not None
        requests = tuple(to_request(sample) for sample in stream.samples)
        work = partial(stream_figures, requests=requests, arrivals=tuple(stream.arrivals))
        tokens = sum(sample.prompt_tokens for sample in stream.samples)
        return replace(self.cell("2wiki", work, self.costs.seconds(1.3 * tokens, 0)), most=3)

    def mixed_cell(self) -> Cell:
        """Plain requests beside long prompts, of known chunks and of new ones."""
        work, scene = partial(mixed_figures, scene=self.mixed), self.mixed
        arms = {
            SUBJECT: self.arm(SUBJECT, partial(work, new=False)),
            NEW: ServedArm(SUBJECT, partial(work, new=True)),
            PREFIX: self.arm(PREFIX, partial(work, new=True)),
        }
        seconds = self.costs.seconds(scene.arrivals * scene.chunks * scene.length, scene.reply)
        return Cell("mixed", arms, len(arms) * seconds)

    def cells(self, group: str, model: str) -> Iterator[Cell]:
        """The cells of a group."""
        match group:
            case "share-nothing":
                for length in self.nothing:
                    yield self.load(f"share-nothing {length}", length=length, corpus=0)
            case "2wiki":
                yield self.stream_cell(model)
            case "mixed":
                yield self.mixed_cell()
            case "cold":
                work = partial(cold_figures, traffic=self.cold)
                yield self.cell("cold", work, 2 * self.cold.seconds(self.costs))
            case "closed":
                for corpus, running in product(self.corpora, self.in_flight):
                    most = self.base.requests
                    count = most if running > 1 else max(2, most // 4)
                    name = f"closed {corpus} chunks, {running} in flight"
                    yield self.load(name, corpus=corpus, running=running, requests=count)
            case "rate":
                for rate in (*self.rates, *self.high_rates):
                    arms = (SUBJECT,) if rate in self.high_rates else (SUBJECT, PREFIX)
                    count = round(self.arriving * rate)
                    yield self.load(f"rate {rate:g}", arms, requests=count, running=0, rate=rate)


#: By device. On a GPU two engines with such pools fit 139 GiB.
LOAD_SIZES = {
    "cuda": LoadSizes(CostGuess(42_000, 0.006), BesideScene(question=TAIL, beside=HEAD, reply=500)),
    "cpu": LoadSizes(
        CostGuess(3_000, 0.02),
        BesideScene(4, 40, TAIL, 3, HEAD, 2, 6, 40),
        {"requests": 6, "pool": 24, "chunks": "8", "chunk_tokens": 20},
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
    ),
}

_LOAD: Columns = {
    "requests_s": ("requests/s", 2),
    "ttft_ms": ("TTFT p50, ms", 0),
    "ttft_p95_ms": ("p95, ms", 0),
    "tpot_ms": ("TPOT, ms", 1),
    "referenced": ("referenced, blocks", 0),
    "resident": ("resident, blocks", 0),
}
_MIXED: Columns = {
    "itl_p99_ms": ("between tokens, p99, ms", 1),
    "itl_ms": ("median, ms", 2),
    "itl_most_ms": ("most, ms", 1),
    "itl_alone_ms": ("median without prompts, ms", 2),
}

#: Groups of cells, by the first word of their names, in the order of the page and of what matters
#: most: a section's title and text, and its columns, of which the first one is compared.
GROUPS: Mapping[str, tuple[str, str, Columns]] = {
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
        {"ttft_ms": ("TTFT, ms", 0)},
    ),
    "closed": (
        "Closed loop",
        "By distinct chunks, which were all served before, and requests in flight.",
        _LOAD,
    ),
    "rate": ("Rates", "Poisson arrivals a second; chunks were all served before.", _LOAD),
}


def load_plan(settings: LoadReport) -> runner.ExperimentPlan:
    """The cells that are asked for. Raises ConfigError for a group that is not there."""
    for name in settings.only:
        if name not in GROUPS:
            raise ConfigError(f"`only` {name}: no such group", hint=closest(name, GROUPS))
    sizes = LOAD_SIZES[settings.device]
    config = runner.engine_of(
        settings,
        context=max(2048, *(s.chunks * s.length for s in (sizes.mixed, sizes.cold))) + 512,
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
    return runner.ExperimentPlan(
        name="load-report",
        facts=runner.facts_of(settings) | facts,
        engines={SUBJECT: config, PREFIX: as_stock(config)},
        cells=[
            replace(cell, rank=rank)
            for rank, name in enumerate(GROUPS)
            if not settings.only or name in settings.only
            for cell in sizes.cells(name, settings.served)
        ],
        rounds=settings.rounds,
    )


def report_figures(record: RoundsRecord) -> dict[str, Any]:
    """The figures for ``summary.json`` of the groups that are measured.

    Requests a second and their ratios to stock vLLM's are medians over rounds, `spread` is the
    range of MEPIC's over their median.
    """
    figures: dict[str, Any] = {}
    for name in ("share-nothing", "2wiki"):
        for cell in _measured(record, name):
            ours, theirs = (record.cells[cell][arm]["requests_s"] for arm in (SUBJECT, PREFIX))
            if name == "2wiki":
                figures["load"] = {
                    "mepic_rps": median(ours),
                    "prefix_rps": median(theirs),
                    "spread": (max(ours) - min(ours)) / median(ours),
                }
            else:
                ratio = median(by_round(ours, theirs))
                figures.setdefault("share_nothing", {})[f"chunk_{cell.split()[-1]}"] = ratio
    if SUBJECT in record.compiled:
        figures["jit_after_ready"] = len(record.compiled[SUBJECT])
    return figures


def render_report(record: RoundsRecord) -> str:
    """The page, in Markdown."""
    if not record.cells:
        return ""
    facts = record.facts
    kernels = ", ".join(f"{arm}: {len(names)}" for arm, names in record.compiled.items())
    sections = []
    for name, (title, text, columns) in GROUPS.items():
        if cells := _measured(record, name):
            sections += [f"## {title}", text, _table(record, cells, columns)]
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
    key, (first, _) = next(iter(columns.items()))
    rows = []
    for cell in cells:
        figures = record.cells[cell]
        for arm, values in figures.items():
            alone = arm == PREFIX or PREFIX not in figures
            over = NOTHING if alone else mean_ratio(values[key], figures[PREFIX][key])
            rows.append((cell, str(len(values[key])), arm, *spreads(values, columns), over))
    head = ("", "n", "arm", *(name for name, _ in columns.values()), f"{first}, over")
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


LOAD_REPORT = runner.RoundsExperiment(plan=load_plan, render=render_report, figures=report_figures)

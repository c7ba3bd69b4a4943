"""Loads of MEPIC's engine and of stock vLLM, repeated: `LOAD_REPORT`, by `GROUPS`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from random import Random
from statistics import mean, median
from typing import Any

import numpy as np

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.engine import Engine
from picbench.engines.ledger import summarise
from picbench.engines.request import Chunk, Request
from picbench.errors import ConfigError, InvalidRun, closest
from picbench.experiments import waves
from picbench.run import runner
from picbench.run.measurements import LoadReport
from picbench.run.runner import Cell, RoundsRecord, ServedArm, random_text
from picbench.run.schedule import to_request
from picbench.run.traffic_file import parse_traffic, source_of, traffic_of
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

#: A rate counts as served where so much of it was.
_SERVED = 0.9

#: Requests, and the seconds at which they arrive.
Stream = tuple[Sequence[Request], Sequence[float] | None]


@dataclass(frozen=True, slots=True)
class LoadTraffic(waves.DecodeScene):
    """Requests of which `running` are in flight, or that arrive at `rate` a second (0: do not).

    They are drawn from a corpus that was served before, if there is one.
    """

    chunks: int = 10
    corpus: int = 256
    length: int = 170
    question: int = TAIL
    reply: int = 16
    running: int = 64
    rate: float = 0.0

    def ask(self, chunks: Sequence[Chunk], name: str, algorithm: str | None) -> Request:
        """See `DecodeScene`."""
        head, tail = random_text(HEAD, "head"), random_text(self.question, name)
        return Request([head, *chunks, tail], algorithm, self.reply)

    def arrivals(self, name: str) -> list[float] | None:
        """Seconds of a Poisson process with as many arrivals; None in a closed loop."""
        if not self.rate:
            return None
        dice, span = Random(f"{name} arrivals"), self.requests / self.rate
        return sorted(dice.uniform(0.0, span) for _ in range(self.requests))


def load_figures(
    engine: Engine, name: str, *, traffic: LoadTraffic, stream: Stream | None = None
) -> dict[str, float]:
    """Requests a second, latencies and blocks of one load, from a cache with the corpus in it.

    The requests of a `stream` are the same in every round.
    """
    algorithm = waves.algorithm_of(engine)
    engine.reset()
    if traffic.corpus:
        engine.generate(traffic.cover(algorithm), ignore_eos=True, concurrency=8)
    requests, arrivals = stream or (traffic.draw(name, algorithm), traffic.arrivals(name))
    engine.measure()
    results = engine.generate(
        requests, ignore_eos=True, concurrency=traffic.running or None, arrivals=arrivals
    )
    took = engine.busy_s - (min(arrivals) if arrivals else 0.0)
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise InvalidRun(f"{len(failed)} requests failed: {failed[0]}")
    blocks = summarise(engine.memory)
    ttft = [result.timings.ttft * 1e3 for result in results]
    tpot = [result.timings.tpot for result in results if result.timings.tpot is not None]
    return {
        "requests_s": len(results) / took,
        "ttft_ms": median(ttft),
        "ttft_p95_ms": float(np.percentile(ttft, 95, method="inverted_cdf")),
        "tpot_ms": mean(tpot) * 1e3,
        "referenced": blocks.peak_referenced,
        "resident": blocks.peak_resident,
    }


def mixed_figures(
    engine: Engine, name: str, *, scene: waves.BesideScene, new: bool
) -> dict[str, float]:
    """Milliseconds between tokens of plain requests, alone and beside long prompts.

    The prompts' chunks are `new`, or in the pool, which stock vLLM cannot make use of. Each step
    gives each plain request a token. Raises InvalidRun if prompts were left when these ended.
    """
    engine.reset()
    prompts = [scene.draw(f"{name} {n}") for n in range(scene.arrivals)]
    asked, algorithm = random_text(scene.question, name), waves.algorithm_of(engine)
    if not new:
        before = [Request([*chunks[::-1], asked], algorithm) for chunks in prompts]
        engine.generate(before, max_tokens=1, ignore_eos=True, concurrency=1)
    requests = [Request([*chunks, asked], algorithm) for chunks in prompts]
    steps = waves.serve_beside(engine, requests, name, scene)
    ends = [steps[0][0], *(ended for _, ended in steps)]
    gaps = [(after - before) * 1e3 for before, after in pairwise(ends)]
    # The first steps compute the others' prompts.
    quiet, busy = gaps[scene.gap // 2 : scene.gap], gaps[scene.gap :]
    return {
        "itl_alone_ms": median(quiet),
        "itl_ms": median(busy),
        "itl_p99_ms": float(np.percentile(busy, 99)),
        "itl_most_ms": max(busy),
    }


#: By device: what requests are like, plain requests beside long prompts, and what a first round may
#: take: tokens of prompts a second, and seconds of a step that decodes.
BASES = {"cuda": LoadTraffic(), "cpu": LoadTraffic(4, 3, 8, 40, reply=4, running=4)}
SCENES = {
    "cuda": waves.BesideScene(question=TAIL, beside=HEAD, reply=500),
    "cpu": waves.BesideScene(4, 40, TAIL, 3, HEAD, 2, 6, 40),
}
SPEEDS = {"cuda": (42_000, 0.006), "cpu": (3_000, 0.02)}


def load_cell(
    device: str,
    name: str,
    arms: Sequence[str] = (SUBJECT, PREFIX),
    stream: Stream | None = None,
    **changes: Any,
) -> Cell:
    """A cell of one load, which is like the device's others but for some changes."""
    traffic, (tokens_s, step_s) = replace(BASES[device], **changes), SPEEDS[device]
    tokens = (traffic.corpus + traffic.requests * traffic.chunks) * traffic.length
    steps = traffic.reply * traffic.requests / (traffic.running or traffic.requests)
    arriving = traffic.requests / traffic.rate if traffic.rate else 0.0
    seconds = len(arms) * max(arriving, tokens / tokens_s + steps * step_s)
    work = partial(load_figures, traffic=traffic, stream=stream)
    return Cell(name, {arm: ServedArm(arm, work, _few(device)) for arm in arms}, seconds)


def _few(device: str) -> runner.Measure:
    """A short load, which warms up."""
    return partial(load_figures, traffic=replace(BASES[device], requests=8, corpus=24))


def stream_of(settings: LoadReport) -> Stream:
    """A stream of `picbench traffic`, as in MiniPIC's throughput on 2WikiMQA.

    Chunks have about 170 tokens, the rate is one that no arm keeps up with.
    """
    asked = {"chunk_tokens": 90, "chunks": "10", "pool": 256, "requests": 1000}
    if settings.device == "cpu":
        asked = {"chunk_tokens": 20, "chunks": "8", "pool": 24, "requests": 6}
    config = parse_traffic({"dataset": "2wikimqa", "max_tokens": 16, "rate": 500.0, **asked})
    found, traffic = models.resolve(settings.served), traffic_of(config)
    source = build(source_of(config, found), models.load_tokenizer(found), traffic.seed)
    drawn = draw(traffic, source)
    return tuple(map(to_request, drawn.samples)), drawn.arrivals


def cells(group: str, settings: LoadReport) -> Iterator[Cell]:
    """The cells of a group; on a CPU smaller ones."""
    device, small = settings.device, settings.device == "cpu"
    load = partial(load_cell, device)
    match group:
        case "share-nothing":
            for length in (40,) if small else (170, 500):
                yield load(f"share-nothing {length}", length=length, corpus=0)
        case "2wiki":
            stream = stream_of(settings)
            found = load("2wiki", stream=stream, requests=len(stream[0]), corpus=0, running=0)
            # Three rounds are enough: their spread is that of a thousand requests.
            yield replace(found, most=3)
        case "mixed":
            scene, (tokens_s, step_s) = SCENES[device], SPEEDS[device]
            new, known = (partial(mixed_figures, scene=scene, new=new) for new in (True, False))
            arms = {
                SUBJECT: ServedArm(SUBJECT, known, _few(device)),
                NEW: ServedArm(SUBJECT, new),
                PREFIX: ServedArm(PREFIX, new, _few(device)),
            }
            seconds = scene.arrivals * scene.prompt / tokens_s + scene.reply * step_s
            yield Cell("mixed", arms, len(arms) * seconds)
        case "cold":
            chunks, length = (4, 40) if small else (64, 512)
            yield load("cold", chunks=chunks, length=length, requests=2, corpus=0, running=1)
        case "closed":
            corpora, in_flight = ((4, 8), (1, 4)) if small else ((24, 256, 1024), (1, 8, 64))
            for corpus, running in product(corpora, in_flight):
                most = BASES[device].requests
                count = most if running > 1 else max(2, most // 4)
                name = f"closed {corpus} chunks, {running} in flight"
                yield load(name, corpus=corpus, running=running, requests=count)
        case "rate":
            # Only the subject is expected to serve the highest ones.
            rates, highest = ((20, 40, 80), 40) if small else ((8, 16, 24, 32, 64, 96, 128), 32)
            for rate in rates:
                served = (SUBJECT, PREFIX) if rate <= highest else (SUBJECT,)
                count = round((0.2 if small else 6.0) * rate)
                yield load(f"rate {rate}", served, requests=count, running=0, rate=rate)


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
#: most: what is served, and columns, of which the first one is compared.
GROUPS: Mapping[str, tuple[str, Columns]] = {
    "share-nothing": ("Nothing is shared; by tokens of a chunk, ten in a request", _LOAD),
    "2wiki": ("2WikiMQA-like requests, more than any arm can serve, from an empty cache", _LOAD),
    "mixed": (
        "Plain requests beside long prompts, of new chunks or of known ones (`mepic`)",
        _MIXED,
    ),
    "cold": ("A long prompt of new chunks, one at a time", {"ttft_ms": ("TTFT, ms", 0)}),
    "closed": ("Closed loop, by distinct chunks, all served before, and requests in flight", _LOAD),
    "rate": ("Poisson arrivals a second, of chunks that were all served before", _LOAD),
}


def load_plan(settings: LoadReport) -> runner.ExperimentPlan:
    """The cells that are asked for. Raises ConfigError for a group that is not there."""
    for name in settings.only:
        if name not in GROUPS:
            raise ConfigError(f"`only` {name}: no such group", hint=closest(name, GROUPS))
    found = [
        replace(cell, rank=rank)
        for rank, name in enumerate(GROUPS)
        if not settings.only or name in settings.only
        for cell in cells(name, settings)
    ]
    # On a GPU two engines with such pools fit 139 GiB.
    pool, running, context = (20_000, 256, 33_280) if settings.device == "cuda" else (600, 8, 2560)
    shared = {"shared_decode": settings.shared_decode}
    sizes = {"context": context, "kv_blocks": pool, "max_requests": running}
    config = runner.engine_of(settings, **sizes, **shared)
    facts = {"pool": pool, "running": running, "block_tokens": BLOCK_SIZE, **shared}
    return runner.ExperimentPlan(
        name="load-report",
        facts=runner.facts_of(settings) | facts,
        engines={SUBJECT: config, PREFIX: waves.as_stock(config)},
        cells=found,
        rounds=settings.rounds,
    )


def report_figures(record: RoundsRecord) -> dict[str, Any]:
    """The figures for ``summary.json`` of the groups that are measured.

    Requests a second and their ratios to stock vLLM's are medians over rounds, `spread` is the
    range of MEPIC's over their median.
    """
    figures: dict[str, Any] = {}
    for cell, arms in record.cells.items():
        if not cell.startswith(("share-nothing ", "2wiki")):
            continue
        ours, theirs = (arms[arm]["requests_s"] for arm in (SUBJECT, PREFIX))
        if cell == "2wiki":
            spread = (max(ours) - min(ours)) / median(ours)
            rates = {"mepic_rps": median(ours), "prefix_rps": median(theirs)}
            figures["load"] = {**rates, "spread": spread}
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
    sections = []
    for group, (title, columns) in GROUPS.items():
        names = [cell for cell in record.cells if cell.split(" ")[0] == group]
        names.sort(key=lambda cell: [float(word) for word in cell.split() if word.isdigit()])
        key, (first, _) = next(iter(columns.items()))
        rows = []
        for cell in names:
            arms = record.cells[cell]
            stock = arms.get(PREFIX)
            for arm, found in arms.items():
                over = mean_ratio(found[key], stock[key]) if stock and arm != PREFIX else NOTHING
                rows.append((cell, str(len(found[key])), arm, *spreads(found, columns), over))
        head = ("", "n", "arm", *(name for name, _ in columns.values()), f"{first}, over")
        sections += [f"## {title}", table(head, rows, right=3)] if rows else []
    if any(cell.startswith("rate ") for cell in record.cells):
        knees = (f"{arm} {_knee(record, arm)}" for arm in (SUBJECT, PREFIX))
        sections.append(
            f"Highest rate of which {_SERVED:.0%} is served, requests/s: {', '.join(knees)}."
        )
    about = (
        WHERE + " `mepic` is an engine of picbench (shared decode: {shared_decode}), `prefix` "
        "stock vLLM with prefix caching; both are up at once with pools of {pool:,} blocks of "
        "{block_tokens} tokens, at most {running} requests at a time and the token budget that "
        "they have by default, and take turns. Median (lowest - highest). Over prefix: geometric "
        "mean of rounds (95 %). "
    )
    return page(
        "Loads, each arm with a server of its own",
        about.format(**record.facts) + waves.compiled_kernels(record),
        *sections,
        *first_lines(record.failures),
    )


def _knee(record: RoundsRecord, arm: str) -> str:
    """The highest rate that an arm serves; at least that where no higher one was measured."""
    cells = {float(c.split()[1]): arms for c, arms in record.cells.items() if c[:5] == "rate "}
    tried = {rate: median(arms[arm]["requests_s"]) for rate, arms in cells.items() if arm in arms}
    # The last requests end after the last arrival.
    if served := [rate for rate, found in tried.items() if found >= _SERVED * rate]:
        return f"{'at least ' if max(served) == max(tried) else ''}{max(served):g}"
    return f"below {min(cells):g}"


LOAD_REPORT = runner.RoundsExperiment(plan=load_plan, render=render_report, figures=report_figures)

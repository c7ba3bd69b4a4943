"""Loads of which each arm has a server of its own: picbench (mepic) and stock vLLM (prefix).

Both are up at once with pools of the same size and the budgets that they have by default, and take
turns; every cell is measured several times, those of more important groups first.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.errors import ConfigError
from picbench.inputs.traffic_file import parse_traffic
from picbench.measure.engine.interleaved import Measure
from picbench.measure.load_settings import LOADS, PREFIX, SUBJECT
from picbench.measure.serving.load_costs import CostGuess
from picbench.measure.serving.load_report_page import GROUPS, NEW, write_report
from picbench.measure.serving.load_traffic import (
    LoadTraffic,
    MixedTraffic,
    cold_figures,
    load_figures,
    mixed_figures,
    stream_figures,
)
from picbench.measure.serving.served_rounds import (
    RoundsPlan,
    ServedArm,
    ServedCell,
    estimate,
)
from picbench.measure.serving.serving_run import ServingRun, measure_rounds
from picbench.names import closest
from picbench.run.protocol import to_request
from picbench.workloads import models
from picbench.workloads.traffic.chunk_source import build
from picbench.workloads.traffic.draw import draw
from picbench.workloads.traffic.settings import Traffic

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

"""What an engine is asked under load, and the figures of it."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from picbench.engines.engine import Engine
from picbench.engines.ledger import summarise
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.errors import InvalidRun
from picbench.measure.engine.random_tokens import random_tokens
from picbench.workloads.traffic.corpus import HEAD, TAIL


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
            return [self._chunks(f"{name} {i}", self.chunks) for i in range(self.requests)]
        known = self.known()
        return [dice.sample(known, self.chunks) for _ in range(self.requests)]

    def known(self) -> list[Chunk]:
        """The corpus."""
        return self._chunks("corpus", self.corpus)

    def arrivals(self, name: str) -> list[float] | None:
        """Seconds, by a Poisson process of which the number is known; None in a closed loop."""
        if not self.rate:
            return None
        dice, span = Random(f"{name} arrivals"), self.requests / self.rate
        return sorted(dice.uniform(0.0, span) for _ in range(self.requests))

    def ask(self, chunks: Sequence[Chunk], name: str, algorithm: str | None) -> Request:
        """A request with these chunks."""
        head, tail = Text(tokens=random_tokens(HEAD, "head")), random_tokens(TAIL, name)
        return Request([head, *chunks, Text(tokens=tail)], algorithm, self.reply)

    def _chunks(self, name: str, count: int) -> list[Chunk]:
        return [Chunk(tokens=random_tokens(self.length, f"{name} {i}")) for i in range(count)]


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


def load_figures(engine: Engine, name: str, *, traffic: LoadTraffic) -> dict[str, float]:
    """Requests a second, latencies and blocks of one load, from a cache with the corpus in it."""
    algorithm = _algorithm(engine)
    engine.reset()
    known, size = traffic.known(), traffic.chunks
    fill = [known[i : i + size] for i in range(0, len(known), size)]
    if fill:
        before = [traffic.ask(chunks, f"fill {i}", algorithm) for i, chunks in enumerate(fill)]
        engine.generate(before, ignore_eos=True, concurrency=8)
    requests = [
        traffic.ask(chunks, f"{name} {i}", algorithm) for i, chunks in enumerate(traffic.draw(name))
    ]
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
        requests,
        ignore_eos=True,
        concurrency=running or None,
        arrivals=arrivals,
    )
    took = engine.busy_s - (min(arrivals) if arrivals else 0.0)
    _require_answers(results)
    blocks = summarise(engine.memory)
    ttft = sorted(result.timings.ttft for result in results)
    tpot = [result.timings.tpot for result in results if result.timings.tpot is not None]
    return {
        "requests_s": len(results) / took,
        "ttft_ms": statistics.median(ttft) * 1e3,
        "ttft_p95_ms": ttft[math.ceil(0.95 * len(ttft)) - 1] * 1e3,
        "tpot_ms": statistics.mean(tpot) * 1e3,
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
    prompts = [
        [
            Chunk(tokens=random_tokens(traffic.length, f"{name} {n} {i}"))
            for i in range(traffic.chunks)
        ]
        for n in range(traffic.arrivals)
    ]
    asked = Text(tokens=random_tokens(TAIL, name))
    algorithm = _algorithm(engine)
    if not new:
        before = [Request([*chunks[::-1], asked], algorithm) for chunks in prompts]
        engine.generate(before, max_tokens=1, ignore_eos=True, concurrency=1)
    requests = [Request([*chunks, asked], algorithm) for chunks in prompts]
    quiet, busy = _gaps(engine, requests, name, traffic)
    return {
        "itl_alone_ms": statistics.median(quiet) * 1e3,
        "itl_ms": statistics.median(busy) * 1e3,
        "itl_p99_ms": statistics.quantiles(busy, n=100, method="inclusive")[-1] * 1e3,
        "itl_most_ms": max(busy) * 1e3,
    }


def _gaps(
    engine: Engine, prompts: Sequence[Request], name: str, traffic: MixedTraffic
) -> tuple[list[float], list[float]]:
    """Seconds between the ends of steps, before the first prompt and from then on."""
    texts = (random_tokens(HEAD, f"{name} other {i}") for i in range(traffic.others))
    others = {
        engine.submit(
            Request([Text(tokens=tokens)], "prefix"), max_tokens=traffic.reply, ignore_eos=True
        )
        for tokens in texts
    }
    waiting, came, ended = list(prompts), set[str](), set[str]()
    gaps, last = list[float](), time.perf_counter()
    while not others & ended:
        if waiting and gaps and len(gaps) % traffic.gap == 0:
            came.add(engine.submit(waiting.pop(0), max_tokens=1, ignore_eos=True))
        ended |= engine.step().keys()
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    served = not waiting and came <= ended
    while (others | came) - ended:
        ended |= engine.step().keys()
    if not served:
        raise InvalidRun(
            "plain requests ended before the prompts beside them", hint="raise `reply`"
        )
    # The first steps compute the others' prompts.
    return gaps[traffic.gap // 2 : traffic.gap], gaps[traffic.gap :]


def cold_figures(engine: Engine, name: str, *, traffic: LoadTraffic) -> dict[str, float]:
    """Milliseconds to the first token of prompts that nothing is cached of, one at a time."""
    algorithm = _algorithm(engine)
    requests = [
        traffic.ask(chunks, f"{name} {i}", algorithm) for i, chunks in enumerate(traffic.draw(name))
    ]
    results = engine.generate(requests, ignore_eos=True, concurrency=1)
    _require_answers(results)
    return {"ttft_ms": statistics.median(r.timings.ttft for r in results) * 1e3}


def _require_answers(results: Sequence[Result]) -> None:
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise InvalidRun(f"{len(failed)} requests failed: {failed[0]}")


def _algorithm(engine: Engine) -> str | None:
    return None if engine.config.stock else "mepic"

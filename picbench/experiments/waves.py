"""Requests that decode together: what an engine generates a second while all of them do."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.ledger import summarise
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.errors import InvalidRun
from picbench.experiments.engines import random_tokens
from picbench.experiments.rounds import ServedArm, ServingRun
from picbench.workloads.traffic.corpus import HEAD, TAIL

#: Requests that are planned and submitted before each step, while there are any.
AHEAD = 8

#: Blocks of a request beside those of its prompt and its reply: last ones that are not full.
_SPARE = 4


@dataclass(frozen=True, slots=True)
class DecodeScene:
    """Requests in flight, over chunks of a corpus: `chunks` of `length` tokens, then a question.

    Every request has its chunks in an order of its own and replies with `reply` tokens. Chunks are
    drawn without regard to the others' if the corpus is not `even`; otherwise as many requests
    read each chunk as read any other.
    """

    requests: int = 64
    chunks: int = 64
    corpus: int = 128
    length: int = 504
    question: int = 80
    reply: int = 512
    even: bool = False

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.chunks * self.length + self.question

    @property
    def sharing(self) -> float:
        """Requests that read a chunk, on average."""
        return self.requests * self.chunks / self.corpus

    @property
    def chunk_blocks(self) -> int:
        """Blocks of a chunk."""
        return -(-self.length // BLOCK_SIZE)

    @property
    def own_blocks(self) -> int:
        """Blocks of a request that no other one sees: a linked one for each chunk, and its text."""
        return self.chunks + -(-(self.question + self.reply) // BLOCK_SIZE) + _SPARE

    @property
    def blocks(self) -> int:
        """Blocks of the corpus and of all requests."""
        return self.corpus * self.chunk_blocks + self.requests * self.own_blocks

    def plain_fit(self, pool: int) -> int:
        """Requests that fit a pool at a time where they share nothing."""
        return min(self.requests, pool // (-(-(self.prompt + self.reply) // BLOCK_SIZE) + _SPARE))

    def common_fit(self, pool: int) -> int:
        """Requests that fit a pool at a time where all chunks of all are one common prefix."""
        prefix = self.chunks * self.length // BLOCK_SIZE + 1
        own = -(-(self.question + self.reply) // BLOCK_SIZE) + _SPARE
        return max(1, min(self.requests, (pool - prefix) // own))

    def known(self) -> list[Chunk]:
        """The corpus: the same chunks for every scene with as long ones."""
        return [Chunk(tokens=random_tokens(self.length, f"chunk {i}")) for i in range(self.corpus)]

    def draw(self, name: str, count: int, algorithm: str | None) -> list[Request]:
        """`count` requests that belong to a name."""
        dice, known = Random(name), self.known()
        uses = Counter[int]()
        found = []
        for number in range(count):
            if self.even:  # The least used ones, equal ones at random.
                order = sorted(range(self.corpus), key=lambda i: (uses[i], dice.random()))
                picked = dice.sample(order[: self.chunks], self.chunks)
            else:
                picked = dice.sample(range(self.corpus), self.chunks)
            uses.update(picked)
            asked = Text(tokens=random_tokens(self.question, f"{name} question {number}"))
            found.append(Request([*(known[i] for i in picked), asked], algorithm))
        return found

    def cover(self, algorithm: str | None) -> list[Request]:
        """Requests with all chunks of the corpus, so that they are compiled."""
        known, asked = self.known(), Text(tokens=random_tokens(self.question, "cover"))
        groups = (known[i : i + self.chunks] for i in range(0, self.corpus, self.chunks))
        return [Request([*group, asked], algorithm) for group in groups]


def decode_wave(engine: Engine, name: str, *, scene: DecodeScene, common: bool) -> dict[str, float]:
    """Requests over chunks that are in the pool; see `decode_figures`.

    Where they have one prefix in `common` instead, all have the same chunks in the same order.
    """
    requests = _prepared(engine, name, scene, common)
    preempted = engine.preemptions
    found = serve_wave(engine, requests, scene.reply)
    figures = decode_figures(found, scene.reply)
    compiled = sum(result.counts.compiled for result in found.results)
    lost = engine.preemptions - preempted
    return figures | {"compiled_tokens": compiled, "preemptions": lost}


def brief_wave(engine: Engine, name: str, *, scene: DecodeScene, common: bool) -> dict[str, float]:
    """The same to warm up, without figures."""
    serve_wave(engine, _prepared(engine, name, scene, common), scene.reply)
    return {}


def _prepared(engine: Engine, name: str, scene: DecodeScene, common: bool) -> list[Request]:
    """The requests, after what they share was served."""
    stock = engine.config.stock
    if common:
        known = scene.known()[: scene.chunks]
        names = (f"{name} {i}" for i in range(scene.requests + 1))
        texts = [Text(tokens=random_tokens(scene.question, each)) for each in names]
        plain = None if stock else "prefix"
        first, *requests = (Request([*known, text], plain) for text in texts)
        engine.generate([first], max_tokens=1)
        return requests
    algorithm = None if stock else "mepic"
    if not stock:
        engine.generate(scene.cover(algorithm), max_tokens=1, concurrency=4)
    return scene.draw(name, scene.requests, algorithm)


@dataclass(frozen=True, slots=True)
class WaveTimes:
    """When requests were sent and steps ended, in Unix seconds, and the requests' results.

    Of a request that was `sent` from the first time to the second, the arrival is in between.
    """

    began: float
    steps: Sequence[float]
    sent: Sequence[tuple[float, float]]
    results: Sequence[Result]


def serve_wave(engine: Engine, requests: Sequence[Request], reply: int) -> WaveTimes:
    """Serve requests that all are there from the start. Raises InvalidRun for one that failed."""
    began = time.time()
    waiting = list(requests)
    sent: dict[str, tuple[float, float]] = {}
    results: dict[str, Result] = {}
    steps = []
    while len(results) < len(requests):
        for request in waiting[:AHEAD]:
            before = time.time()
            tag = engine.submit(request, max_tokens=reply, ignore_eos=True)
            sent[tag] = before, time.time()
        del waiting[:AHEAD]
        results |= engine.step()
        steps.append(time.time())
    for result in results.values():
        if result.error is not None or len(result.tokens) != reply:
            raise InvalidRun(f"a request got {len(result.tokens)} of {reply} tokens")
    return WaveTimes(began, steps, [sent[tag] for tag in results], list(results.values()))


def decode_figures(found: WaveTimes, reply: int) -> dict[str, float]:
    """Tokens a second in all, and while all requests decode, when a step gives each a token.

    That is from the last first token to the first end. Steps that give no token are allowed for by
    how many steps the last request to start took for its reply. Raises InvalidRun where there are
    fewer than three steps in between.
    """
    pairs = list(zip(found.sent, found.results, strict=True))
    begin, last = max(
        (latest + result.timings.ttft, latest + result.timings.e2e) for (_, latest), result in pairs
    )
    end = min(earliest + result.timings.e2e for (earliest, _), result in pairs)
    inside = [step for step in found.steps if begin <= step <= end]
    if len(inside) < 4:
        raise InvalidRun(
            f"all requests decoded together for {len(inside)} steps", hint="raise `reply`"
        )
    taken = sum(begin < step <= last for step in found.steps)
    share = min(1.0, (reply - 1) / max(1, taken))
    gaps = [after - before for before, after in pairwise(inside)]
    count = len(found.results)
    return {
        "in_flight": count,
        "tokens_s": count * reply / (found.steps[-1] - found.began),
        "decode_tokens_s": count * share * len(gaps) / (inside[-1] - inside[0]),
        "tpot_ms": statistics.median(gaps) / share * 1e3,
        "tpot_p99_ms": statistics.quantiles(gaps, n=100, method="inclusive")[-1] * 1e3,
        "ttft_ms": statistics.median(r.timings.ttft for r in found.results) * 1e3,
        "steps": len(gaps),
        "tokens_a_step": share,
    }


#: Tokens of a reply when engines are warmed up.
_BRIEF = 16


def wave_arm(engine: str, scene: DecodeScene, *, common: bool = False) -> ServedArm:
    """The arm that serves a scene in an engine; with one prefix in `common`, see `decode_wave`."""
    brief = replace(scene, reply=min(_BRIEF, scene.reply))
    return ServedArm(
        engine,
        partial(decode_wave, scene=scene, common=common),
        partial(brief_wave, scene=brief, common=common),
    )


def wave_engine(
    run: ServingRun, model: str | Path, scene: DecodeScene, pool: int, shared_decode: str
) -> EngineConfig:
    """An engine that has all requests of a scene in flight, with a pool of `pool` blocks."""
    return EngineConfig(
        model=str(model),
        device=run.device,
        dtype=run.dtype,
        context=scene.prompt + scene.reply,
        batch_tokens=8192,
        kv_blocks=pool,
        max_requests=scene.requests,
        tiers="",
        shared_decode=shared_decode,
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


@dataclass(frozen=True, slots=True)
class CostGuess:
    """A device's tokens of prompts a second, and the seconds of a step that decodes."""

    tokens_s: float
    step_s: float

    def prompts(self, *tokens: float) -> float:
        """Seconds for prompts of this many tokens in all."""
        return sum(tokens) / self.tokens_s

    def load(self, traffic: LoadTraffic, *, reused: bool = False) -> float:
        """Seconds of a load in one arm, its corpus among them.

        With `reused` chunks, a request computes a block of each chunk of the corpus.
        """
        computed = BLOCK_SIZE if reused and traffic.corpus else traffic.length
        served = self.prompts(traffic.requests * traffic.chunks * computed)
        together = traffic.running or traffic.requests
        served += self.step_s * traffic.reply * traffic.requests / together
        arriving = traffic.requests / traffic.rate if traffic.rate else 0.0
        return self.prompts(traffic.corpus * traffic.length) + max(served, arriving)

    def mixed(self, traffic: MixedTraffic) -> float:
        """Seconds of one arm beside long prompts."""
        long = traffic.arrivals * traffic.chunks * traffic.length
        return self.prompts(long) + self.step_s * traffic.reply

    def wave(self, scene: DecodeScene) -> float:
        """Seconds of requests that decode together, over chunks that are there."""
        linked = scene.requests * (scene.chunks * BLOCK_SIZE + scene.question)
        return self.prompts(linked) + self.step_s * scene.reply

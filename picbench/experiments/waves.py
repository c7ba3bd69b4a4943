"""Requests that decode together, alone or beside prompts that arrive: what an engine takes."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from random import Random
from statistics import median, quantiles

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result
from picbench.errors import InvalidRun
from picbench.run.measurements import Served
from picbench.run.runner import ServedArm, engine_of, random_chunks, random_text

#: Requests that are planned and submitted before each step, while there are any.
AHEAD = 8

#: Blocks of a request beside those of its prompt and its reply: last ones that are not full.
_SPARE = 4

#: Tokens of a reply when engines are warmed up.
_BRIEF = 16


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
    def text_blocks(self) -> int:
        """Blocks of a request's question and reply, which are its own."""
        return -(-(self.question + self.reply) // BLOCK_SIZE) + _SPARE

    @property
    def blocks(self) -> int:
        """Blocks of the corpus and of all requests, each with a linked one for each chunk."""
        own = self.chunks + self.text_blocks
        return self.corpus * -(-self.length // BLOCK_SIZE) + self.requests * own

    def plain_fit(self, pool: int) -> int:
        """Requests that fit a pool at a time where they share nothing."""
        return min(self.requests, pool // (-(-(self.prompt + self.reply) // BLOCK_SIZE) + _SPARE))

    def common_fit(self, pool: int) -> int:
        """Requests that fit a pool at a time where all chunks of all are one common prefix."""
        prefix = self.chunks * self.length // BLOCK_SIZE + 1
        return max(1, min(self.requests, (pool - prefix) // self.text_blocks))

    def known(self) -> list[Chunk]:
        """The corpus: the same chunks for every scene with as long ones."""
        return random_chunks(self.corpus, self.length, "chunk")

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
            asked = random_text(self.question, f"{name} question {number}")
            found.append(Request([*(known[i] for i in picked), asked], algorithm))
        return found


@dataclass(frozen=True, slots=True)
class CostGuess:
    """A device's tokens of prompts a second, and the seconds of a step that decodes."""

    tokens_s: float
    step_s: float

    def seconds(self, tokens: float, steps: float) -> float:
        """Seconds for prompts of this many tokens in all, and for steps."""
        return tokens / self.tokens_s + steps * self.step_s

    def wave(self, scene: DecodeScene) -> float:
        """Seconds of requests that decode together; a block of each chunk is computed."""
        computed = scene.requests * (scene.chunks * BLOCK_SIZE + scene.question)
        return self.seconds(computed, scene.reply)


def wave_engine(settings: Served, scene: DecodeScene, pool: int) -> EngineConfig:
    """An engine that has all requests of a scene in flight, with a pool of `pool` blocks."""
    return engine_of(
        settings,
        context=scene.prompt + scene.reply,
        batch_tokens=8192,
        kv_blocks=pool,
        max_requests=scene.requests,
        shared_decode="off",
    )


def as_stock(config: EngineConfig) -> EngineConfig:
    """Stock vLLM with prefix caching, of the same sizes."""
    return replace(config, stock=True, algorithm="prefix", shared_decode="off")


def wave_arm(engine: str, scene: DecodeScene, *, common: bool = False) -> ServedArm:
    """The arm that serves a scene in an engine; with one prefix in `common`, see `decode_wave`."""
    work = partial(decode_wave, scene=scene, common=common)
    return ServedArm(engine, work, partial(work, brief=True))


def decode_wave(
    engine: Engine, name: str, *, scene: DecodeScene, common: bool, brief: bool = False
) -> dict[str, float]:
    """Requests over chunks that are in the pool; see `decode_figures`.

    Where they have one prefix in `common` instead, all have the same chunks in the same order. A
    `brief` wave warms up and has no figures.
    """
    reply = min(_BRIEF, scene.reply) if brief else scene.reply
    requests = _prepared(engine, name, scene, common)
    preempted = engine.preemptions
    found = serve_wave(engine, requests, reply)
    if brief:
        return {}
    return decode_figures(found, reply) | {
        "compiled_tokens": sum(result.counts.compiled for result in found.results),
        "preemptions": engine.preemptions - preempted,
    }


def _prepared(engine: Engine, name: str, scene: DecodeScene, common: bool) -> list[Request]:
    """The requests, after what they share was served."""
    stock, known = engine.config.stock, scene.known()
    if common:
        names = (f"{name} {i}" for i in range(scene.requests + 1))
        texts = [random_text(scene.question, each) for each in names]
        plain = None if stock else "prefix"
        first, *requests = (Request([*known[: scene.chunks], text], plain) for text in texts)
        engine.generate([first], max_tokens=1)
        return requests
    algorithm = None if stock else "mepic"
    if not stock:
        asked = random_text(scene.question, "cover")
        groups = (known[i : i + scene.chunks] for i in range(0, scene.corpus, scene.chunks))
        cover = [Request([*group, asked], algorithm) for group in groups]
        engine.generate(cover, max_tokens=1, concurrency=4)
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
        "tpot_ms": median(gaps) / share * 1e3,
        "tpot_p99_ms": p99(gaps) * 1e3,
        "ttft_ms": median(r.timings.ttft for r in found.results) * 1e3,
        "steps": len(gaps),
        "tokens_a_step": share,
    }


@dataclass(frozen=True, slots=True)
class BesideScene:
    """Prompts that arrive while plain requests decode.

    `arrivals` prompts of `chunks` chunks of `length` tokens and a question of `question` come `gap`
    steps apart; meanwhile `others` decode `reply` tokens each after `beside` tokens of their own.
    """

    chunks: int = 64
    length: int = 512
    question: int = 80
    others: int = 16
    beside: int = 2 * BLOCK_SIZE
    arrivals: int = 3
    gap: int = 100
    reply: int = 400

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.chunks * self.length + self.question

    def draw(self, name: str) -> list[Chunk]:
        """Chunks that belong to a name."""
        return random_chunks(self.chunks, self.length, name)


def serve_beside(
    engine: Engine, prompts: Sequence[Request], name: str, scene: BesideScene
) -> list[tuple[float, float]]:
    """When each step began and ended, in seconds, while the others decode.

    Each step gives each of the others a token. Raises InvalidRun if prompts did not arrive, or were
    not answered, before the others ended.
    """
    texts = (random_text(scene.beside, f"{name} other {i}") for i in range(scene.others))
    others = [Request([text], "prefix") for text in texts]
    left = {engine.submit(each, max_tokens=scene.reply, ignore_eos=True) for each in others}
    waiting, asked = list(prompts), set[str]()
    steps: list[tuple[float, float]] = []
    while left:
        if waiting and steps and len(steps) % scene.gap == 0:
            asked.add(engine.submit(waiting.pop(0), max_tokens=1, ignore_eos=True))
        began = time.perf_counter()
        ended = engine.step().keys()
        steps.append((began, time.perf_counter()))
        left -= ended
        asked -= ended
    late = len(asked)
    while asked:
        asked -= engine.step().keys()
    if waiting or late:
        raise InvalidRun(
            f"{len(waiting)} prompts did not arrive and {late} did not end while others decoded",
            hint="raise `reply`",
        )
    return steps


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return quantiles(values, n=100, method="inclusive")[-1]

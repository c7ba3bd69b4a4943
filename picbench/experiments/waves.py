"""Requests that decode together, alone or beside prompts that arrive: what an engine takes."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from random import Random
from statistics import median

import numpy as np

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result
from picbench.errors import InvalidRun
from picbench.run.measurements import Served
from picbench.run.runner import RoundsRecord, ServedArm, engine_of, random_chunks, random_text


@dataclass(frozen=True, slots=True)
class DecodeScene:
    """Requests over chunks of a corpus: `chunks` of `length` tokens, then a question.

    Every request has its chunks in an order of its own and replies with `reply` tokens. Chunks are
    drawn without regard to the others' if the corpus is not `even`; otherwise as many requests
    read each chunk as read any other. Without a corpus (0), each request has chunks of its own.
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
        """Blocks of a request's question and reply, which are its own, some of them not full."""
        return -(-(self.question + self.reply) // BLOCK_SIZE) + 4

    @property
    def blocks(self) -> int:
        """Blocks of the corpus and of all requests, each with a linked one for each chunk."""
        own = self.chunks + self.text_blocks
        return self.corpus * -(-self.length // BLOCK_SIZE) + self.requests * own

    def known(self) -> list[Chunk]:
        """The corpus: the same chunks for every scene with as long ones."""
        return random_chunks(self.corpus, self.length, "corpus")

    def ask(self, chunks: Sequence[Chunk], name: str, algorithm: str | None) -> Request:
        """A request with these chunks."""
        return Request([*chunks, random_text(self.question, name)], algorithm)

    def cover(self, algorithm: str | None) -> list[Request]:
        """Requests that have all of the corpus, a chunk once."""
        known, size = self.known(), self.chunks
        groups = (known[i : i + size] for i in range(0, self.corpus, size))
        return [self.ask(group, "cover", algorithm) for group in groups]

    def draw(self, name: str, algorithm: str | None) -> list[Request]:
        """All requests, others for each name."""
        dice, known, uses, found = Random(name), self.known(), Counter[int](), []
        for own in (f"{name} {number}" for number in range(self.requests)):
            if known:
                order: Sequence[int] = range(self.corpus)
                if self.even:  # The least used ones, equal ones at random.
                    order = sorted(order, key=lambda i: (uses[i], dice.random()))[: self.chunks]
                picked = dice.sample(order, self.chunks)
                uses.update(picked)
                chunks = [known[i] for i in picked]
            else:
                chunks = random_chunks(self.chunks, self.length, own)
            found.append(self.ask(chunks, own, algorithm))
        return found


def algorithm_of(engine: Engine) -> str | None:
    """MEPIC; None for stock vLLM, which has no algorithms."""
    return None if engine.config.stock else "mepic"


def compiled_kernels(record: RoundsRecord) -> str:
    """How many kernels each engine compiled while it was measured, for a page."""
    counts = ", ".join(f"{engine}: {len(names)}" for engine, names in record.compiled.items())
    return f"Kernels compiled after engines were ready: {counts}."


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
    `brief` wave warms up and has no figures. Raises InvalidRun for a request that failed.
    """
    algorithm, reply = algorithm_of(engine), min(16, scene.reply) if brief else scene.reply
    if common:
        chunks, plain = scene.known()[: scene.chunks], algorithm and "prefix"
        names = (f"{name} {number}" for number in range(scene.requests + 1))
        first, *requests = (scene.ask(chunks, each, plain) for each in names)
        before = [first]
    else:
        before = scene.cover(algorithm) if algorithm else []
        requests = scene.draw(name, algorithm)
    if before:
        engine.generate(before, max_tokens=1, concurrency=4)
    preempted, left, steps = engine.preemptions, list(requests), [time.time()]
    sent: dict[str, tuple[float, float]] = {}
    results: dict[str, Result] = {}
    while len(results) < len(requests):
        for request in left[:8]:  # They are planned and submitted before the step.
            began = time.time()
            tag = engine.submit(request, max_tokens=reply, ignore_eos=True)
            sent[tag] = began, time.time()
        del left[:8]
        results |= engine.step()
        steps.append(time.time())
    for result in results.values():
        if result.error is not None or len(result.tokens) != reply:
            raise InvalidRun(f"a request got {len(result.tokens)} of {reply} tokens")
    if brief:
        return {}
    served = [(*sent[tag], result) for tag, result in results.items()]
    return decode_figures(steps, served, reply) | {
        "compiled_tokens": sum(result.counts.compile_work for result in results.values()),
        "preemptions": engine.preemptions - preempted,
    }


def decode_figures(
    steps: Sequence[float], served: Sequence[tuple[float, float, Result]], reply: int
) -> dict[str, float]:
    """Tokens a second in all, and while all requests decode, when a step gives each a token.

    `steps` are the times at which the first one began and each ended, in Unix seconds; a request
    arrived between the two times before its result. All decode from the last first token to the
    first end. Steps that give no token are allowed for by how many steps the last request to start
    took for its reply. Raises InvalidRun where there are fewer than three steps in between.
    """
    begin, last = max((sent + r.timings.ttft, sent + r.timings.e2e) for _, sent, r in served)
    end = min(earliest + result.timings.e2e for earliest, _, result in served)
    inside = [step for step in steps[1:] if begin <= step <= end]
    if len(inside) < 4:
        raise InvalidRun(
            f"all requests decoded together for {len(inside)} steps", hint="raise `reply`"
        )
    taken = sum(begin < step <= last for step in steps[1:])
    share = min(1.0, (reply - 1) / max(1, taken))
    gaps = [after - before for before, after in pairwise(inside)]
    return {
        "in_flight": len(served),
        "tokens_s": len(served) * reply / (steps[-1] - steps[0]),
        "decode_tokens_s": len(served) * share * len(gaps) / (inside[-1] - inside[0]),
        "tpot_ms": median(gaps) / share * 1e3,
        "tpot_p99_ms": float(np.percentile(gaps, 99)) * 1e3,
        "ttft_ms": median(result.timings.ttft for *_, result in served) * 1e3,
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

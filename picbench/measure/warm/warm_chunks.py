"""TTFT of 64 warm chunks, 32k tokens, under algorithms that compile them after different texts.

What a chunk was compiled after makes no difference to a request: the same blocks are mapped, the
same tokens linked. Prompts are random tokens, so a model without weights will do. Stock vLLM serves
prompts of the same length, of which nothing is cached, or a prefix that leaves as many new tokens
as the first arm computes. Engine cores have processes of their own, as when they are served; all is
measured on a quiet host, and again while other processes keep cores busy.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

from picbench.arms.server import Server
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.request import Chunk, Request, Text
from picbench.errors import InvalidRun
from picbench.measure.engine.random_tokens import random_tokens
from picbench.measure.started_engines import started_engines
from picbench.measure.warm.busy_cores import busy_cores
from picbench.measure.warm.served_engine import FirstToken, ServedEngine, launch_served
from picbench.measure.warm.warm_chunks_page import Loads, write
from picbench.output import provenance
from picbench.workloads import models

#: Tokens of the text before all chunks, of a chunk, and of the question.
HEAD, CHUNK, QUESTION = 64, 504, 80

#: Chunks of a document: the last ones have more text before them than a chunk has.
SECTIONS = 4

#: Arms of the PIC engine; the first is what the others are compared with.
ARMS = (
    "mepic",
    "mepic:context=document",
    "mepic:anchored=on:context=document",
    "naive",
    "naive:anchored=on:context=document",
)

#: Arms of stock vLLM: a prefix of the prompt is cached, and nothing of it.
HIT, FULL = "prefix hit", "full"

#: What an engine answered, by arm.
Answers = dict[str, FirstToken]


@dataclass(frozen=True, slots=True)
class WarmSettings:
    """What is measured; on `busy` cores something else runs in half of the measurements."""

    model: str
    device: str
    repeats: int
    chunks: int
    busy: int


def ask_warm(engine: ServedEngine, *, name: str, chunks: int, first: bool) -> Answers:
    """Known chunks in a new order under all arms, in a new order of these, too.

    The first time, the chunks are compiled before.
    """
    order = random.Random(name)
    known = draw(chunks, "any")
    order.shuffle(known)
    found = {}
    for arm in order.sample(ARMS, len(ARMS)):
        if first:
            engine.first_token(ask(arm, known[::-1], f"{name} {arm} before"))
        found[arm] = engine.first_token(ask(arm, known, f"{name} {arm}"))
    return {arm: found[arm] for arm in ARMS}


def ask_stock(engine: ServedEngine, *, name: str, chunks: int, fresh: int) -> Answers:
    """A prompt of which all but `fresh` tokens are cached, and one of which nothing is.

    All that it may begin with is asked for before, so that no block of it was evicted since: hits
    of other lengths leave its last blocks unused, and prompts of which nothing is cached fill the
    pool. Raises InvalidRun if it finds another number of tokens, a block's worth apart.
    """
    known = ask("prefix", draw(chunks, "any"), "any")
    engine.first_token(known)
    tokens = tuple(chain.from_iterable(segment.tokens or () for segment in known.segments))
    prefix = Text(tokens=tokens[: len(tokens) - fresh])
    hit = engine.first_token(Request([prefix, Text(tokens=random_tokens(fresh, name))], "prefix"))
    if abs(hit.fresh - fresh) >= BLOCK_SIZE and engine.config.device == "cuda":
        raise InvalidRun(f"a prefix hit computed {hit.fresh} tokens, not {fresh}")
    return {HIT: hit, FULL: engine.first_token(ask("prefix", draw(chunks, name), name))}


def draw(count: int, name: str) -> list[Chunk]:
    """Chunks of documents that have `SECTIONS` of them, each with its document up to its end."""
    tokens = [random_tokens(CHUNK, f"{name} {n}") for n in range(count)]
    return [
        Chunk(tokens=tokens[n], document=tuple(chain(*tokens[n - n % SECTIONS : n + 1])))
        for n in range(count)
    ]


def ask(algorithm: str, chunks: Sequence[Chunk], name: str) -> Request:
    """A request for chunks, with a question that no other name has."""
    head = Text(tokens=random_tokens(HEAD, "head"))
    question = Text(tokens=random_tokens(QUESTION, name))
    return Request([head, *chunks, question], algorithm)


def measure(settings: WarmSettings, commit: str | None, output: Path) -> None:
    """Measure all arms, write ``warm-chunks.json`` and ``.md``, and note the ratios."""
    found_model = models.resolve(settings.model)
    context = HEAD + settings.chunks * CHUNK + QUESTION + BLOCK_SIZE
    config = EngineConfig(
        model=str(found_model.path),
        device=settings.device,
        dtype="bfloat16",
        context=context,
        batch_tokens=8192,
        # Chunks after three different texts, and the requests' own blocks.
        kv_blocks=context // BLOCK_SIZE * (len(ARMS) + 1),
        max_requests=8,
        tiers="",
    )
    stock = replace(config, stock=True, algorithm="prefix")
    configs = {"stock": stock, "picbench": config}
    with started_engines(configs, launch_served) as (engines, described):
        for name, what in described.items():
            print(name, what, flush=True)
        loads = _alternate(engines, settings)
    facts = provenance.facts(*provenance.ENGINE, device=settings.device, commit=commit)
    facts |= {"model": found_model.label, "dtype": config.dtype, "busy_cores": settings.busy}
    facts |= {"chunks": settings.chunks, "chunk": CHUNK, "sections": SECTIONS}
    facts |= {"head": HEAD, "question": QUESTION, "prompt_tokens": context - BLOCK_SIZE}
    write(loads, facts, output)


def _alternate(engines: Mapping[str, Server], settings: WarmSettings) -> Loads:
    """All answers, repeat by repeat; those of the first repeat are not kept."""
    loads: Loads = {"quiet": {}, **({"busy": {}} if settings.busy else {})}
    for repeat in range(settings.repeats + 1):
        began = perf_counter()
        # Which load comes first alternates, so that drift affects both alike.
        for load in list(loads)[:: -1 if repeat % 2 else 1]:
            with busy_cores(settings.busy if load == "busy" else 0):
                for answers in _answers(engines, settings, repeat, load):
                    for arm, answer in answers.items() if repeat else ():
                        loads[load].setdefault(arm, []).append(answer)
        if not repeat:
            left = settings.repeats * (perf_counter() - began)
            print(f"{settings.repeats} repeats, at most {left:.0f} s", flush=True)
    return loads


def _answers(
    engines: Mapping[str, Server], settings: WarmSettings, repeat: int, load: str
) -> Iterator[Answers]:
    given: dict[str, Any] = {"name": f"{repeat} {load}", "chunks": settings.chunks}
    ours: Answers = engines["picbench"].call(partial(ask_warm, first=not repeat, **given))
    yield ours
    yield engines["stock"].call(partial(ask_stock, fresh=ours[ARMS[0]].fresh, **given))

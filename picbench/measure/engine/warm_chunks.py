"""TTFT of 64 warm chunks, 32k tokens, under algorithms that compile them after different texts.

What a chunk was compiled after makes no difference to a request: the same blocks are mapped, the
same tokens linked. Prompts are random tokens, so a model without weights will do. Stock vLLM serves
prompts of the same length, of which nothing is cached.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
from picbench.measure.engine.interleaved import Found, Measure, run_interleaved
from picbench.measure.engine.random_tokens import random_tokens
from picbench.measure.report import Spread, save
from picbench.output import markdown, provenance
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

FULL = "full"


def ttft(engine: Engine, name: str, *, chunks: int) -> dict[str, float]:
    """Milliseconds to the first token by arm; the arms come in another order in each repeat."""
    order = random.Random(name)
    if engine.config.stock:
        return {FULL: _served(engine, "prefix", draw(chunks, name), name)}
    known = draw(chunks, "any")
    order.shuffle(known)
    found = {}
    for arm in order.sample(ARMS, len(ARMS)):
        if name.endswith(" 0"):  # the repeat that warms up: compile the chunks first
            _served(engine, arm, known[::-1], f"{name} {arm} before")
        found[arm] = _served(engine, arm, known, f"{name} {arm}")
    return {arm: found[arm] for arm in ARMS}


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


def _served(engine: Engine, algorithm: str, chunks: Sequence[Chunk], name: str) -> float:
    request = ask(algorithm, chunks, name)
    [result] = engine.generate([request], max_tokens=1, ignore_eos=True)
    return result.timings.ttft * 1e3


def measures(chunks: int) -> dict[str, Measure]:
    """The one measure: all arms in turn."""
    return {f"{chunks} chunks": partial(ttft, chunks=chunks)}


def ratios(times: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """TTFT of each arm but the first over the first arm's in the same repeat."""
    first = times[ARMS[0]]
    return {
        arm: Spread.of([t / base for t, base in zip(found, first, strict=True)])
        for arm, found in times.items()
        if arm != ARMS[0]
    }


def measure(
    model: str, device: str, repeats: int, chunks: int, commit: str | None, output: Path
) -> None:
    """Measure all arms and write ``warm-chunks.json`` and ``.md``."""
    found_model = models.resolve(model)
    context = HEAD + chunks * CHUNK + QUESTION + BLOCK_SIZE
    config = EngineConfig(
        model=str(found_model.path),
        device=device,
        dtype="bfloat16",
        context=context,
        batch_tokens=8192,
        # Chunks after three different texts, and the requests' own blocks.
        kv_blocks=context // BLOCK_SIZE * (len(ARMS) + 1),
        max_requests=8,
        tiers="",
    )
    stock = replace(config, stock=True, algorithm="prefix")
    found = run_interleaved({"stock": stock, "picbench": config}, measures(chunks), repeats)
    facts = provenance.facts(*provenance.ENGINE, device=device, commit=commit)
    facts |= {"model": found_model.label, "dtype": config.dtype}
    facts |= {"chunks": chunks, "prompt_tokens": HEAD + chunks * CHUNK + QUESTION}
    write(found, facts, output)


def write(found: Found, facts: Mapping[str, Any], output: Path) -> None:
    """Write the files."""
    times = found["picbench"] | found["stock"]
    document = {"schema": 1, "provenance": facts, "ttft_ms": times}
    save(output / "warm-chunks", document, render(times, facts))


def render(times: Mapping[str, Sequence[float]], facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    against = ratios(times)
    base = median(times[ARMS[0]])
    rows = [
        (
            f"`{arm}`",
            _quartiles(Spread.of(found), 1),
            f"{median(found) / base:.3f}",
            _quartiles(against[arm], 3) if arm in against else "-",
        )
        for arm, found in times.items()
    ]
    head = ("arm", "TTFT, ms", f"over {ARMS[0]}: of medians", "repeat by repeat")
    return "\n".join(
        [
            f"# TTFT of {facts['chunks']} warm chunks, by what they were compiled after",
            "",
            f"{facts['model']}, {facts['dtype']}: times, not answers; {facts['gpu']}, driver "
            f"{facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}, commit "
            f"{facts['commit']}. {facts['prompt_tokens']:,} tokens: a text of {HEAD}, "
            f"{facts['chunks']} chunks of {CHUNK} random tokens in a new order each time, "
            f"{SECTIONS} of them a document, and a question of {QUESTION}. One request at a time, "
            f"arms in turn and in a new order each time, n={len(times[ARMS[0]])}. Chunks are "
            f"cached; `{FULL}` is stock vLLM, of whose prompt only the first text is.",
            "",
            "Milliseconds from the request's arrival; median (quartiles).",
            "",
            markdown.table(head, rows, right=1),
            "",
        ]
    )


def _quartiles(spread: Spread, digits: int) -> str:
    numbers = (f"{number:,.{digits}f}" for number in (spread.median, spread.q25, spread.q75))
    return "{} ({} - {})".format(*numbers)

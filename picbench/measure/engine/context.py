"""TTFT against the length of the context: the form of EPIC's Figure 9 (arXiv 2410.15332).

Prompts are chunks of 512 random tokens and a question of 80, one request at a time. Two engines
are up at once and measured in alternation: stock vLLM with prefix caching, and picbench. For `full`
nothing of the prompt is cached; `prefix` sends the same chunks in another order, of which a prefix
cache reuses nothing; the other arms have their chunks cached, too, from another order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
from picbench.measure.engine.interleaved import ArmFigures, Measure, run_interleaved
from picbench.measure.engine.random_tokens import random_tokens
from picbench.measure.report import save, spread
from picbench.output import markdown, provenance
from picbench.output.figures.context_figure import draw_context
from picbench.workloads import models

#: Tokens of a chunk, as in the paper, and of the question after all chunks.
CHUNK, QUESTION = 512, 80

#: Chunks of a prompt: 1k to 50k tokens.
CHUNKS = (2, 4, 8, 16, 24, 32, 48, 64, 80, 98)

#: Arms of the PIC engine. Chunk KV is in the pool, so that no tier is in the way of what is
#: measured: it is shared, and copied within the pool for CacheBlend.
ARMS = ("naive", "cacheblend:r=0.15", "epic:k=16:copy=shared", "mepic")


def ttft(engine: Engine, name: str, *, chunks: int) -> dict[str, float]:
    """Milliseconds to the first token of one prompt length, by arm."""
    return dict(_stock(engine, name, chunks) if engine.config.stock else _pic(engine, name, chunks))


def _stock(engine: Engine, name: str, count: int) -> Iterator[tuple[str, float]]:
    chunks = _draw(name, count)
    yield f"full {count}", _served(engine, "prefix", chunks, f"{name} full")
    yield f"prefix {count}", _served(engine, "prefix", _rotated_left(chunks), f"{name} prefix")


def _pic(engine: Engine, name: str, count: int) -> Iterator[tuple[str, float]]:
    chunks = _draw(name, count)
    for arm in ARMS:
        _served(engine, arm, chunks, f"{name} {arm} before")
        yield f"{arm} {count}", _served(engine, arm, _rotated_left(chunks), f"{name} {arm}")


def _draw(name: str, count: int) -> list[Chunk]:
    return [Chunk(tokens=random_tokens(CHUNK, f"{name} {i}")) for i in range(count)]


def _rotated_left(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Another order for certain: orders that begin alike would share what follows from it."""
    return [*chunks[1:], chunks[0]]


def _served(engine: Engine, algorithm: str, chunks: Sequence[Chunk], name: str) -> float:
    question = Text(tokens=random_tokens(QUESTION, name))
    request = Request([*chunks, question], algorithm)
    [result] = engine.generate([request], max_tokens=1, ignore_eos=True)
    return result.timings.ttft * 1e3


def measures(chunks: Sequence[int]) -> dict[str, Measure]:
    """A measure for each length of the context."""
    return {f"{count} chunks": partial(ttft, chunks=count) for count in chunks}


def curves(found: ArmFigures) -> dict[str, dict[int, list[float]]]:
    """Milliseconds by arm and tokens of the prompt, repeat by repeat."""
    lines: dict[str, dict[int, list[float]]] = {}
    for figures in found.values():
        for key, values in figures.items():
            arm, count = key.rsplit(" ", 1)
            lines.setdefault(arm, {})[int(count) * CHUNK + QUESTION] = values
    return lines


def write(found: ArmFigures, facts: Mapping[str, Any], output: Path) -> None:
    """Write ``context.json``, ``context.md`` and the figure."""
    lines = curves(found)
    document = {"schema": 1, "provenance": facts, "ttft_ms": lines}
    save(output / "context", document, render(lines, facts))
    draw_context(lines, _caption(facts), output / "context")


def render(lines: Mapping[str, Mapping[int, Sequence[float]]], facts: Mapping[str, Any]) -> str:
    """The table as a Markdown page."""
    head = ["prompt tokens", *lines]
    rows = [
        [f"{tokens:,}", *(spread(lines[arm].get(tokens), 1) for arm in lines)]
        for tokens in sorted({tokens for line in lines.values() for tokens in line})
    ]
    return "\n".join(
        [
            "# Time to the first token against the length of the context",
            "",
            _caption(facts),
            "",
            "Milliseconds from the request's arrival; median (lowest - highest).",
            "",
            markdown.table(head, rows, right=0),
            "",
        ]
    )


def _caption(facts: Mapping[str, Any]) -> str:
    return (
        f"{facts['model']}, {facts['dtype']}: times, not answers; {facts['gpu']}, "
        f"driver {facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}, commit "
        f"{facts['commit']}. Chunks of {CHUNK} random tokens, all of them cached but for `full`, "
        f"one request at a time, n={facts['repeats']}. The form of EPIC's Figure 9."
    )


def measure(
    model: str, device: str, repeats: int, longest: int, commit: str | None, output: Path
) -> None:
    """Measure both engines at all lengths up to `longest` chunks, and write what was found."""
    found_model = models.resolve(model)
    counts = [count for count in CHUNKS if count <= longest]
    context = counts[-1] * CHUNK + QUESTION + 16
    config = EngineConfig(
        model=str(found_model.path),
        device=device,
        dtype="bfloat16",
        context=context,
        batch_tokens=8192,
        kv_blocks=context // BLOCK_SIZE * len(ARMS),
        max_requests=8,
        tiers="",
    )
    arms = {"stock": replace(config, stock=True, algorithm="prefix"), "picbench": config}
    found = run_interleaved(arms, measures(counts), repeats)
    facts = provenance.facts(*provenance.ENGINE, device=device, commit=commit) | {
        "model": found_model.label,
        "dtype": config.dtype,
        "repeats": repeats,
    }
    write(found, facts, output)

"""Throughput of one engine on several GPUs against one: chunks are warm, the load is steady."""

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
from picbench.measure.engine.interleaved import Found, run_interleaved
from picbench.measure.engine.random_tokens import random_tokens
from picbench.measure.report import save, spread, update_summary
from picbench.output import markdown, provenance
from picbench.workloads import models

#: Distinct chunks, chunks of a request, tokens of a chunk and of a question, and of a reply.
POOL, CHUNKS, CHUNK, QUESTION, REPLY = 128, 64, 504, 80, 128

#: Requests in all, for each of those in flight: filling and draining are a small part of it.
ROUNDS = 2


def serve(engine: Engine, name: str, *, concurrency: int) -> dict[str, float]:
    """Serve requests in a closed loop, over the same chunks in every repeat.

    Chunks are warm in all repeats but the first, which is not kept.
    """
    pool = [Chunk(tokens=random_tokens(CHUNK, f"chunk {i}")) for i in range(POOL)]
    draw = random.Random("requests")
    picked = [draw.sample(pool, CHUNKS) for _ in range(ROUNDS * concurrency)]
    asked = [
        Request([*chunks, Text(tokens=random_tokens(QUESTION, f"{name} {i}"))], "mepic")
        for i, chunks in enumerate(picked)
    ]
    began = time.perf_counter()
    results = engine.generate(asked, max_tokens=REPLY, ignore_eos=True, concurrency=concurrency)
    took = time.perf_counter() - began
    first = median(result.timings.ttft for result in results)
    return {"tokens_per_s": len(results) * REPLY / took, "ttft_ms": first * 1e3}


def measure(
    model: str,
    device: str,
    workers: int,
    concurrency: int,
    repeats: int,
    commit: str | None,
    output: Path,
) -> None:
    """Measure one GPU and several in alternation; write a page and the summary's figure."""
    found_model = models.resolve(model)
    config = EngineConfig(
        model=str(found_model.path),
        device=device,
        dtype="bfloat16",
        context=CHUNKS * CHUNK + QUESTION + REPLY,
        batch_tokens=8192,
        kv_blocks=12_000,
        max_requests=concurrency,
        tiers="",
    )
    arms = {"1": config, str(workers): replace(config, tensor_parallel=workers)}
    found = run_interleaved(arms, {"serve": partial(serve, concurrency=concurrency)}, repeats)
    facts = provenance.facts(*provenance.ENGINE, device=device, commit=commit) | {
        "model": found_model.label,
        "dtype": config.dtype,
        "concurrency": concurrency,
        "repeats": repeats,
    }
    write(found, facts, output)


def write(found: Found, facts: Mapping[str, Any], output: Path) -> None:
    """Write ``scaling-N.json``, ``scaling-N.md`` and ``tpN_scaling``; N GPUs against one."""
    workers = max(found, key=int)
    document = {"schema": 1, "provenance": facts, "found": found}
    save(output / f"scaling-{workers}", document, render(found, facts))
    update_summary(output, {f"tp{workers}_scaling": scaling(found)})


def scaling(found: Found) -> float:
    """Throughput of the most GPUs over that of one; medians."""
    one, several = (median(found[n]["tokens_per_s"]) for n in sorted(found, key=int))
    return several / one


def render(found: Found, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    rows = [
        (name, spread(figures["tokens_per_s"], 0), spread(figures["ttft_ms"], 0))
        for name, figures in found.items()
    ]
    lines = [
        "# One engine on several GPUs",
        "",
        f"mepic on {facts['model']}, {facts['dtype']}: times, not answers; "
        f"{facts['gpu']}, driver {facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}, "
        f"commit {facts['commit']}. {facts['concurrency']} requests in flight, {CHUNKS} of {POOL} "
        f"warm chunks of {CHUNK} tokens each, questions of {QUESTION}, replies of {REPLY} tokens; "
        f"both engines are up and alternate; median (lowest - highest), n={facts['repeats']}.",
        "",
        markdown.table(("GPUs", "tokens generated a second", "TTFT p50, ms"), rows, right=0),
        "",
        f"Throughput: {scaling(found):.2f} times that of one GPU.",
        "",
    ]
    return "\n".join(lines)

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
from picbench.measure.engine_pairs import Found, compete
from picbench.measure.engine_report import spread
from picbench.measure.gpu_provenance import facts_of
from picbench.measure.kernels.gpu_facts import update
from picbench.measure.random_tokens import Tokens
from picbench.output.run_directory import write_json
from picbench.workloads import models

#: Distinct chunks, chunks of a request, tokens of a chunk and of a question, and of a reply.
POOL, CHUNKS, CHUNK, QUESTION, REPLY = 128, 64, 504, 80, 128

#: Requests in all, for each of those in flight: filling and draining are a small part of it.
ROUNDS = 2


def serve(engine: Engine, name: str, *, concurrency: int) -> dict[str, float]:
    """Serve requests in a closed loop. All turns have the same chunks: but the first they are warm.

    Measures' first turns are for warming up.
    """
    tokens = Tokens(1000)
    pool = [Chunk(tokens=tokens.draw(CHUNK, f"chunk {i}")) for i in range(POOL)]
    draw = random.Random("requests")
    picked = [draw.sample(pool, CHUNKS) for _ in range(ROUNDS * concurrency)]
    asked = [
        Request([*chunks, Text(tokens=tokens.draw(QUESTION, f"{name} {i}"))], "mepic")
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
    """Measure one GPU and several in turns; write a page and the summary's figure."""
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
    found = compete(arms, {"serve": partial(serve, concurrency=concurrency)}, repeats)
    facts = facts_of(device, commit) | {
        "model": found_model.label,
        "dtype": config.dtype,
        "concurrency": concurrency,
        "repeats": repeats,
    }
    write(found, facts, output)


def write(found: Found, facts: Mapping[str, Any], output: Path) -> None:
    """Write ``scaling-N.json``, ``scaling-N.md`` and ``tpN_scaling``; N GPUs against one."""
    workers = max(found, key=int)
    output.mkdir(parents=True, exist_ok=True)
    document = {"schema": 1, "provenance": facts, "found": found}
    write_json(output / f"scaling-{workers}.json", document)
    page = output / f"scaling-{workers}.md"
    page.write_text(render(found, facts), encoding="utf-8")
    update(output / "summary.json", {f"tp{workers}_scaling": scaling(found)})


def scaling(found: Found) -> float:
    """Throughput of the most GPUs over that of one; medians."""
    one, several = (median(found[n]["tokens_per_s"]) for n in sorted(found, key=int))
    return several / one


def render(found: Found, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    lines = [
        "# One engine on several GPUs",
        "",
        f"mepic on {facts['model']}, {facts['dtype']}: times, not answers; "
        f"{facts['gpu']}, driver {facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}, "
        f"commit {facts['commit']}. {facts['concurrency']} requests in flight, {CHUNKS} of {POOL} "
        f"warm chunks of {CHUNK} tokens each, questions of {QUESTION}, replies of {REPLY} tokens; "
        f"both engines are up and take turns; median (lowest - highest), n={facts['repeats']}.",
        "",
        "| GPUs | tokens generated a second | TTFT p50, ms |",
        "| ---: | ---: | ---: |",
        *(
            f"| {name} | {spread(figures['tokens_per_s'], 0)} | {spread(figures['ttft_ms'], 0)} |"
            for name, figures in found.items()
        ),
        "",
        f"Throughput: {scaling(found):.2f} times that of one GPU.",
        "",
    ]
    return "\n".join(lines)

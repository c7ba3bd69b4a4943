"""Times the PIC engine against stock vLLM on one GPU, in alternation.

Plain requests (prefix caching on, nothing cached): what the engine costs when PIC does nothing.
Warm chunks: a prompt of 64 chunks whose KV is cached, against stock vLLM without any of it. Prompts
are random tokens, so a model without weights will do: these are times, not answers.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.measure.engine.interleaved import ArmFigures, Measure, run_interleaved
from picbench.measure.engine.random_tokens import random_tokens
from picbench.measure.report import save, spread, update_summary
from picbench.output import markdown, provenance
from picbench.workloads import models

#: 64 chunks and their surroundings make a prompt of 32k tokens.
CHUNKS, CHUNK_TOKENS = 64, 504

_ROWS = {
    "ttft_ms": "TTFT of one plain request of 2,048 tokens, ms",
    "tpot_ms": "time per output token of it, ms",
    "tokens_per_s": "64 plain requests of 1,024 + 128 tokens, tokens/s",
    "warm_ttft_ms": "TTFT of 64 warm chunks and a question, 32k tokens, ms",
    "warm_tpot_ms": "time per output token of it, ms",
    "hit_ttft_ms": "TTFT of a prefix hit that leaves as many new tokens, ms",
}


def plain(engine: Engine, name: str) -> dict[str, float]:
    """One request of 2,048 tokens alone, then 64 of 1,024 at once; 128 tokens out."""
    alone = _plain(random_tokens(2048, f"alone {name}"))
    many = [_plain(random_tokens(1024, f"{name} {i}")) for i in range(64)]
    engine.reset()
    [one] = engine.generate([alone], max_tokens=128, ignore_eos=True)
    engine.reset()
    all_of_them = engine.generate(many, max_tokens=128, ignore_eos=True)
    took = max(result.timings.e2e for result in all_of_them)
    return {
        "ttft_ms": one.timings.ttft * 1e3,
        "tpot_ms": _tpot(one),
        "tokens_per_s": len(many) * (1024 + 128) / took,
    }


def warm(engine: Engine, name: str) -> dict[str, float]:
    """A prompt of 64 chunks that the engine has seen in another order; 64 tokens out."""
    chunks = [Chunk(tokens=random_tokens(CHUNK_TOKENS, f"chunk {i}")) for i in range(CHUNKS)]
    algorithm = None if engine.config.stock else "mepic"
    if not engine.config.stock:
        engine.generate([Request([*chunks, _question("")], algorithm)], max_tokens=1)
    random.Random(name).shuffle(chunks)
    asked = Request([*chunks, _question(name)], algorithm)
    [result] = engine.generate([asked], max_tokens=64, ignore_eos=True)
    return {"warm_ttft_ms": result.timings.ttft * 1e3, "warm_tpot_ms": _tpot(result)}


def hit(engine: Engine, name: str) -> dict[str, float]:
    """The same prompt with all but as many tokens cached as MEPIC recomputes (stock vLLM only)."""
    if not engine.config.stock:
        return {}
    linked = CHUNKS * 16
    common = random_tokens(CHUNKS * CHUNK_TOKENS - linked, "common")
    engine.generate([_plain(common)], max_tokens=1)
    asked = _plain((*common, *random_tokens(linked + 80, name)))
    [result] = engine.generate([asked], max_tokens=2, ignore_eos=True)
    return {"hit_ttft_ms": result.timings.ttft * 1e3}


MEASURES: dict[str, Measure] = {"plain": plain, "warm": warm, "hit": hit}


def _plain(tokens: tuple[int, ...]) -> Request:
    return Request([Text(tokens=tokens)], algorithm="prefix")


def _question(name: str) -> Text:
    return Text(tokens=random_tokens(80, f"question {name}"))


def _tpot(result: Result) -> float:
    return (result.timings.tpot or 0.0) * 1e3


def measure(model: str, repeats: int, commit: str | None, output: Path) -> None:
    """Measure both engines, print medians with their spread, and write what was found."""
    found_model = models.resolve(model)
    config = EngineConfig(
        model=str(found_model.path),
        device="cuda",
        dtype="bfloat16",
        context=36_864,
        batch_tokens=8192,
        max_requests=64,
    )
    stock = replace(config, stock=True, algorithm="prefix")
    found = run_interleaved({"stock": stock, "picbench": config}, MEASURES, repeats)
    _show(found)
    facts = provenance.facts(*provenance.GPU, device=config.device, commit=commit)
    write(found, facts | {"rounds": repeats, "seed": 0, "model": found_model.name}, output)


def write(found: ArmFigures, facts: Mapping[str, Any], output: Path) -> None:
    """Write ``engine-comparison.json``, ``engine-comparison.md`` and the summary's figures."""
    document = {"schema": 1, "provenance": facts, "found": found}
    save(output / "engine-comparison", document, render(found, facts))
    update_summary(output, ratios(found))


def ratios(found: ArmFigures) -> dict[str, dict[str, float]]:
    """The figures for `results/gpu/summary.json`: medians, picbench over stock vLLM.

    `speedup_vs_full` is the other way round: full recompute's TTFT over warm chunks'.
    """
    stock, ours = ({k: median(v) for k, v in found[arm].items()} for arm in ("stock", "picbench"))
    return {
        "pic_off": {
            "throughput_ratio": ours["tokens_per_s"] / stock["tokens_per_s"],
            "ttft_ratio": ours["ttft_ms"] / stock["ttft_ms"],
            "tpot_ratio": ours["tpot_ms"] / stock["tpot_ms"],
        },
        "warm_32k": {
            "speedup_vs_full": stock["warm_ttft_ms"] / ours["warm_ttft_ms"],
            "ratio_vs_prefix_hit": ours["warm_ttft_ms"] / stock["hit_ttft_ms"],
        },
    }


def render(found: ArmFigures, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown; `facts` are its provenance."""
    figures = ratios(found)
    warm, off = figures["warm_32k"], figures["pic_off"]
    rows = [
        (text, *(spread(found[arm].get(key), 2, counted=True) for arm in ("stock", "picbench")))
        for key, text in _ROWS.items()
    ]
    lines = [
        "# The engine against stock vLLM on a GPU",
        "",
        f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}, vLLM {facts['vllm']} "
        f"(FlashAttention-3, CUDA graphs, torch.compile),\ncommit {facts['commit']}. "
        f"{facts['model']}, dummy weights, bfloat16: times, not answers. Both engines at once, "
        "in alternation,\nin processes of their own; median (lowest - highest).",
        "",
        markdown.table(("", "stock vLLM", "picbench"), rows, right=1),
        "",
        f"Plain requests: TTFT {off['ttft_ratio']:.3f}, time per output token "
        f"{off['tpot_ratio']:.3f}, throughput {off['throughput_ratio']:.3f} of stock vLLM's. "
        f"Warm chunks (mepic):\n{warm['speedup_vs_full']:.1f} times faster to the first token "
        f"than full recompute, {warm['ratio_vs_prefix_hit']:.2f} of a prefix hit's time.",
    ]
    return "\n".join(lines) + "\n"


def _show(found: ArmFigures) -> None:
    for name, rows in found.items():
        for key, values in rows.items():
            ends = f"{min(values):.2f} .. {max(values):.2f}"
            print(f"{name:9} {key:13} {median(values):10.2f}   ({ends}, n={len(values)})")

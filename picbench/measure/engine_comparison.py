"""Times the PIC engine against stock vLLM on one GPU, in turns.

    python -m picbench.measure.engine_comparison --model DIR [--repeats 5] [--output results/gpu]

Plain requests (prefix caching on, nothing cached): what the engine costs when PIC does nothing.
Warm chunks: a prompt of 64 chunks whose KV is cached, against stock vLLM without any of it. Prompts
are random tokens, so a model without weights will do: these are times, not answers.
"""

import argparse
import json
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.measure.engine_pairs import Found, Measure, compete
from picbench.measure.engine_report import ratios, render
from picbench.measure.kernels.facts import commit
from picbench.measure.kernels.gpu_facts import provenance, update
from picbench.measure.random_tokens import Tokens

#: 64 chunks and their surroundings make a prompt of 32k tokens.
CHUNKS, CHUNK_TOKENS = 64, 504


def plain(engine: Engine, name: str) -> dict[str, float]:
    """One request of 2,048 tokens alone, then 64 of 1,024 at once; 128 tokens out."""
    tokens = Tokens(1000)
    alone = _plain(tokens.draw(2048, f"alone {name}"))
    many = [_plain(tokens.draw(1024, f"{name} {i}")) for i in range(64)]
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
    tokens = Tokens(1000)
    chunks = [Chunk(tokens=tokens.draw(CHUNK_TOKENS, f"chunk {i}")) for i in range(CHUNKS)]
    algorithm = None if engine.config.stock else "mepic"
    if not engine.config.stock:
        engine.generate([Request([*chunks, _question(tokens, "")], algorithm)], max_tokens=1)
    random.Random(name).shuffle(chunks)
    asked = Request([*chunks, _question(tokens, name)], algorithm)
    [result] = engine.generate([asked], max_tokens=64, ignore_eos=True)
    return {"warm_ttft_ms": result.timings.ttft * 1e3, "warm_tpot_ms": _tpot(result)}


def hit(engine: Engine, name: str) -> dict[str, float]:
    """The same prompt with all but as many tokens cached as MEPIC recomputes (stock vLLM only)."""
    if not engine.config.stock:
        return {}
    tokens = Tokens(1000)
    linked = CHUNKS * 16
    common = tokens.draw(CHUNKS * CHUNK_TOKENS - linked, "common")
    engine.generate([_plain(common)], max_tokens=1)
    asked = _plain((*common, *tokens.draw(linked + 80, name)))
    [result] = engine.generate([asked], max_tokens=2, ignore_eos=True)
    return {"hit_ttft_ms": result.timings.ttft * 1e3}


MEASURES: dict[str, Measure] = {"plain": plain, "warm": warm, "hit": hit}


def _plain(tokens: tuple[int, ...]) -> Request:
    return Request([Text(tokens=tokens)], algorithm="prefix")


def _question(tokens: Tokens, name: str) -> Text:
    return Text(tokens=tokens.draw(80, f"question {name}"))


def _tpot(result: Result) -> float:
    return (result.timings.tpot or 0.0) * 1e3


def _show(found: Found) -> None:
    for name, rows in found.items():
        for key, values in rows.items():
            median = statistics.median(values)
            spread = f"{min(values):.2f} .. {max(values):.2f}"
            print(f"{name:9} {key:13} {median:10.2f}   ({spread}, n={len(values)})")


def main() -> int:
    """Parse the command line, race, and print medians with their spread."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a Llama in Hugging Face's format")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--output", type=Path, help="also write race.json and race.md here")
    parser.add_argument("--name", help="what to call the model, instead of its folder")
    parser.add_argument("--commit", default=None, help="what to call the code, without a checkout")
    given = parser.parse_args()
    config = EngineConfig(
        model=given.model,
        device="cuda",
        dtype="bfloat16",
        context=36_864,
        batch_tokens=8192,
        max_requests=64,
    )
    stock = replace(config, stock=True, algorithm="prefix")
    found = compete({"stock": stock, "picbench": config}, MEASURES, given.repeats)
    _show(found)
    if given.output:
        facts = provenance(given.commit or commit(), given.repeats, 0)
        save(given.output, found, {**facts, "model": given.name or Path(given.model).name})
    return 0


def save(output: Path, found: Found, facts: dict[str, Any]) -> None:
    """Write a race's measurements, its page, and its part of ``summary.json``."""
    output.mkdir(parents=True, exist_ok=True)
    document = {"schema": 1, "provenance": facts, "found": found}
    (output / "race.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    (output / "race.md").write_text(render(found, facts), "utf-8")
    update(output / "summary.json", ratios(found))


if __name__ == "__main__":
    sys.exit(main())

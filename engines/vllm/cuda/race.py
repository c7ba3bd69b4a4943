"""Times the PIC engine against stock vLLM on one GPU, in turns.

    python -m picbench.engines.vllm.cuda.race --model DIR [--repeats 5] [--output results/gpu]

Plain requests (prefix caching on, nothing cached): what the engine costs when PIC does nothing.
Warm chunks: a prompt of 64 chunks whose KV is cached, against stock vLLM without any of it. Prompts
are random tokens, so a model without weights will do: these are times, not answers.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.engines.vllm.cuda.report import ratios, render
from picbench.engines.vllm.cuda.tokens import Tokens
from picbench.kernels.bench.facts import commit
from picbench.kernels.bench.gpu.facts import provenance, update

#: 64 chunks and their surroundings make a prompt of 32k tokens.
CHUNKS, CHUNK_TOKENS = 64, 504

Measure = Callable[[Engine, str], dict[str, float]]


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


def race(arms: dict[str, EngineConfig], repeats: int) -> dict[str, dict[str, list[float]]]:
    """All measurements of all arms, in turns; the first turn of each is for warming up.

    Every engine lives in a process of its own, and waits while another one runs.
    """
    context = get_context("spawn")
    pipes: dict[str, Any] = {}
    processes = []
    for name, config in arms.items():
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=_serve, args=(theirs, config), daemon=True))
        processes[-1].start()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in arms}
    for name, pipe in pipes.items():
        print(name, pipe.recv(), flush=True)
    for measure, turn in product(MEASURES, range(repeats + 1)):
        for name, pipe in pipes.items():
            pipe.send((measure, f"{measure} {turn}"))
            for key, value in pipe.recv().items():
                if turn:
                    found[name].setdefault(key, []).append(value)
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(None)
        process.join()
    return found


def _serve(pipe: Any, config: EngineConfig) -> None:
    """An arm's process: measure what is asked for until nothing is."""
    with Engine(config) as engine:
        pipe.send(engine.describe())
        while (asked := pipe.recv()) is not None:
            measure, name = asked
            pipe.send(MEASURES[measure](engine, name))


def _plain(tokens: tuple[int, ...]) -> Request:
    return Request([Text(tokens=tokens)], algorithm="prefix")


def _question(tokens: Tokens, name: str) -> Text:
    return Text(tokens=tokens.draw(80, f"question {name}"))


def _tpot(result: Result) -> float:
    return (result.timings.tpot or 0.0) * 1e3


def _show(found: dict[str, dict[str, list[float]]]) -> None:
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
    found = race({"stock": stock, "picbench": config}, given.repeats)
    _show(found)
    if given.output:
        facts = provenance(given.commit or commit(), given.repeats, 0)
        save(given.output, found, {**facts, "model": Path(given.model).name})
    return 0


def save(output: Path, found: dict[str, dict[str, list[float]]], facts: dict[str, Any]) -> None:
    """Write a race's measurements, its page, and its part of ``summary.json``."""
    output.mkdir(parents=True, exist_ok=True)
    document = {"schema": 1, "provenance": facts, "found": found}
    (output / "race.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    (output / "race.md").write_text(render(found, facts), "utf-8")
    update(output / "summary.json", ratios(found))


if __name__ == "__main__":
    sys.exit(main())

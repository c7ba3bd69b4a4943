"""What plain requests pay for picbench's CPU attention, against stock vLLM's.

Implementations run interleaved in random order. Two ratios to stock are given: of the fastest runs,
which other work on the machine disturbs least, and in brackets the median and quartiles of the
ratios paired within a round. Outputs are checked before anything is timed: against the float64
reference on small cases, and against stock on the measured one.
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from torch import Tensor

from picbench.kernels.cpu.attention import store
from picbench.kernels.cpu.reference import attend_reference
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.shape import HeadShape
from picbench.measure.kernels.cpu_cases import (
    AttentionCase,
    Implementation,
    arms,
    caches_of,
    cases,
    description,
    draw,
    slots_of,
)
from picbench.measure.kernels.right_first import require_right
from picbench.measure.kernels.scene import relative_error
from picbench.measure.kernels.timing import paired
from picbench.measure.report import Spread, save
from picbench.output import markdown, provenance

_SAMPLE_SECONDS = 0.004
_MIN_ROUNDS = 5
_PREPARED = 9
_FACTS = ("cpu", "threads", "machine", "capability", "python", "torch", "vllm", "commit", "load")


def verify(shape: HeadShape, seed: int) -> None:
    """Compares all arms with the reference on small cases; raises InvalidRun on a difference."""
    small = (("prefill", shape, 1, 70, 70), ("decode", shape, 3, 1, 75))
    for case in (AttentionCase(*values) for values in small):
        inputs = draw(case, seed)
        cache = caches_of(case, inputs.table.numel(), BLOCK_SIZE)[0]
        for slots in slots_of(inputs.table, case.context, BLOCK_SIZE):
            store(inputs.key, inputs.value, cache, slots)
        expected = attend_reference(
            inputs.query,
            cache,
            **description(case, inputs.table),
            rope=inputs.rope,
            scale=shape.head_size**-0.5,
        )
        for name, arm in arms(case, inputs).items():
            _require_close(f"{name} against the reference", case, arm.layer(0), expected)


def _require_close(what: str, case: AttentionCase, found: Tensor, expected: Tensor) -> None:
    errors = [relative_error(found, expected.double())]
    require_right(f"{what} in {case}", errors, case.shape.dtype)


def measure(case: AttentionCase, rounds: int, seconds: float, seed: int) -> dict[str, Any]:
    """Times all arms of a case; microseconds a layer, ratios to stock.

    Stops after `rounds`, or after `seconds` once there are five.
    """
    inputs = draw(case, seed)
    compared = arms(case, inputs)
    expected = compared["stock"].layer(0).clone()
    for name, arm in compared.items():
        _require_close(f"{name} against stock", case, arm.layer(0), expected)
    samples = _interleave(case, compared, rounds, seconds, seed)
    stock = samples["stock"]
    return {
        "case": _describe(case),
        "layer_us": {name: asdict(Spread.of(times)) for name, times in samples.items()},
        "paired_ratio": {name: asdict(paired(times, stock)) for name, times in samples.items()},
        "ratio_of_best": {name: min(times) / min(stock) for name, times in samples.items()},
        "prepare_us": {name: _time_prepare(arm) for name, arm in compared.items()},
    }


def _interleave(
    case: AttentionCase, compared: dict[str, Implementation], rounds: int, seconds: float, seed: int
) -> dict[str, list[float]]:
    passes = {name: _passes(arm, case.layers) for name, arm in compared.items()}
    samples: dict[str, list[float]] = {name: [] for name in compared}
    order, shuffler = list(compared), random.Random(seed)
    deadline = time.monotonic() + seconds
    for index in range(rounds):
        if index >= _MIN_ROUNDS and time.monotonic() > deadline:
            break
        shuffler.shuffle(order)
        for name in order:
            samples[name].append(_time(compared[name], case.layers, passes[name]))
    return samples


def _passes(arm: Implementation, layers: int) -> int:
    seconds = _time(arm, layers, 1) * layers / 1e6
    return max(1, math.ceil(_SAMPLE_SECONDS / seconds))


def _time(arm: Implementation, layers: int, passes: int) -> float:
    begin = time.perf_counter()
    for _ in range(passes):
        for index in range(layers):
            arm.layer(index)
    return (time.perf_counter() - begin) / (passes * layers) * 1e6


def _time_prepare(arm: Implementation) -> float:
    times = []
    for _ in range(_PREPARED):
        begin = time.perf_counter()
        arm.prepare()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e6


def _describe(case: AttentionCase) -> dict[str, Any]:
    shape = asdict(case.shape) | {"dtype": str(case.shape.dtype).removeprefix("torch.")}
    return {**asdict(case), "shape": shape, "layers": case.layers}


def bench(
    output: Path,
    rounds: int,
    seed: int,
    *,
    seconds: float = 20.0,
    work: Sequence[str] = (),
    commit: str | None = None,
) -> str:
    """Check and time all cases, or those of some `work`, at most `seconds` each.

    Writes ``attention.json`` and ``attention.md`` and returns the table. Raises InvalidRun where an
    output is wrong.
    """
    results = _run([c for c in cases() if not work or c.name in work], rounds, seconds, seed)
    facts = provenance.facts(*_FACTS, commit=commit)
    facts |= {"seed": seed, "rounds": rounds, "weights": "none: random queries, keys and values"}
    document = {"schema": 1, "provenance": facts, "results": results}
    save(output / "attention", document, report(document))
    return table(results)


def _run(
    grid: Sequence[AttentionCase], rounds: int, seconds: float, seed: int
) -> list[dict[str, Any]]:
    for shape in dict.fromkeys(case.shape for case in grid):
        verify(shape, seed)
    results = []
    for index, case in enumerate(grid):
        click.echo(f"{index + 1}/{len(grid)} {_describe(case)}", err=True)
        results.append(measure(case, rounds, seconds, seed))
    return results


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as a Markdown table: ratios of the fastest runs, and paired medians."""
    counts = ("requests", "new", "context")
    head = ("heads", "type", "work", *counts, "stock us", "in place", "without RoPE")
    return markdown.table(head, map(_cells, results))


def _cells(result: dict[str, Any]) -> list[str]:
    case, shape = result["case"], result["case"]["shape"]
    return [
        f"{shape['num_heads']}/{shape['num_kv_heads']}x{shape['head_size']}",
        shape["dtype"],
        case["name"],
        *(str(case[name]) for name in ("requests", "new", "context")),
        f"{result['layer_us']['stock']['best']:.0f}",
        *(_ratio(result, name) for name in ("in_place", "unrotated")),
    ]


def report(document: dict[str, Any]) -> str:
    """The Markdown page of a run: what was measured where, and the table."""
    run = document["provenance"]
    return (
        "# CPU attention against stock vLLM\n\n"
        "One layer's whole attention path (store, then attend) for plain requests. Ratios to stock "
        "are of the\nfastest runs; in brackets the median and quartiles of ratios paired within a "
        "round. `in place`: keys are\nrotated before they are stored. `without RoPE`: keys are "
        "rotated when they are read.\nThe engine serves plain requests in place; chunks "
        "are cached without RoPE, and so is everything with\n`keys_without_rope`.\n\n"
        f"{run['cpu']} ({run['capability']}), {run['threads']} threads, torch {run['torch']}, "
        f"vLLM {run['vllm']}, random inputs,\nseed {run['seed']}, "
        f"at most {run['rounds']} rounds, commit {run['commit'][:12]}.\n\n"
        f"{table(document['results'])}\n"
    )


def _ratio(result: dict[str, Any], arm: str) -> str:
    rounds = result["paired_ratio"][arm]
    spread = f"{rounds['median']:.2f}, {rounds['q25']:.2f}-{rounds['q75']:.2f}"
    return f"{result['ratio_of_best'][arm]:.2f} ({spread})"

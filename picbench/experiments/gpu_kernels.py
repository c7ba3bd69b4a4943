"""Checks and times the CUDA kernels on the GPU of this machine.

Writes kernels.json and kernels.md, and the kernels' figures of summary.json. Cases that an earlier
run with the same versions and commit has measured are kept, so that it can be interrupted.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from picbench.errors import ConfigError
from picbench.experiments import kernel_cases
from picbench.experiments.kernel_cases import interleave, paired
from picbench.experiments.page import Spread, save, update_summary
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.shape import HeadShape
from picbench.store import provenance
from picbench.tables import table as markdown

# Llama-3.1-8B's and Mistral-7B's.
SHAPE = HeadShape(32, 8, 128, torch.bfloat16)

# The ways in which link may be served, both timed where both can.
_WAYS = ("in place", "copied")


def measure_decode(case: kernel_cases.DecodeCase, rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times one decode case; speeds relative to FlashAttention-3."""
    samples = interleave(kernel_cases.arms(case, seed), rounds, seed)
    base = samples["fa3"]
    return {
        "kind": "decode",
        "requests": case.requests,
        "context": case.context,
        "chunk": case.chunk,
        "bytes": case.nbytes,
        "ms": _spreads(samples),
        "speed_vs_fa3": {name: asdict(paired(base, own)) for name, own in samples.items()},
    }


def measure_link(case: kernel_cases.LinkCase, rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times one link case; time relative to FlashAttention-3."""
    arms = kernel_cases.link_arms(case, seed)
    samples = interleave(arms.attend, rounds, seed)
    return {
        "kind": "link",
        "form": case.form,
        "new": case.new,
        "context": case.context,
        "served_by": arms.served_by,
        "ms": _spreads(samples),
        "prepare_ms": arms.prepare_ms,
        "time_vs_fa3": asdict(paired(samples["link"], samples["fa3"])),
    }


def _spreads(samples: dict[str, list[float]]) -> dict[str, Any]:
    return {name: asdict(Spread.of(times)) for name, times in samples.items()}


def summarise(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the target's cases: speed of decode, time of link, ours over the reference."""
    decoding = [
        row["speed_vs_fa3"][kernel_cases.WITH_ROPE]["median"]
        for row in results
        if row["kind"] == "decode" and row["requests"] >= 16
    ]
    linking = [row["time_vs_fa3"]["median"] for row in results if row["kind"] == "link"]
    found = {"decode_vs_fa3": decoding, "link_vs_fa3": linking}
    return {name: statistics.median(values) for name, values in found.items() if values}


def bench(
    output: Path,
    rounds: int,
    seed: int,
    *,
    work: Sequence[str] = (),
    commit: str | None = None,
) -> None:
    """Check and time what was not measured before, or of it only some `work`.

    Writes kernels.json, kernels.md and figures.
    Raises ConfigError without FlashAttention-3, InvalidRun where an output is wrong.
    """
    if not flash.covers(SHAPE):
        raise ConfigError(
            "the reference, FlashAttention-3, does not run here",
            hint="install picbench[cuda] on a Hopper GPU",
        )
    run = provenance.facts(*provenance.GPU, device="cuda", commit=commit) | {
        "rounds": rounds,
        "seed": seed,
        "workspace_bytes": kernel_cases.WORKSPACE_BYTES,
        "weights": "none: random queries, keys and values",
    }
    path = output / "kernels.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    results = kept["results"] if kept.get("provenance") == run else []
    known = {row["case"] for row in results}
    for name, time_case in _work(rounds, seed):
        if name in known or (work and name.split()[0] not in work):
            continue
        click.echo(name, err=True)
        results.append({"case": name} | time_case())
        torch.cuda.empty_cache()
        document = {"schema": 1, "provenance": run, "results": results}
        save(output / "kernels", document, report(document))
    update_summary(output, summarise(results))


def _work(rounds: int, seed: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for case in kernel_cases.cases(SHAPE):
        name = f"decode {case.requests} x {case.context} in {case.chunk}"
        yield name, partial(measure_decode, case, rounds, seed)
    for one in kernel_cases.link_cases(SHAPE):
        name = f"link {one.form} {one.new} over {one.context}"
        yield name, partial(measure_link, one, rounds, seed)


def report(document: dict[str, Any]) -> str:
    """The Markdown page of a run: what was measured where, and a table a kernel."""
    run = document["provenance"]
    results = document["results"]
    return (
        "# CUDA kernels against FlashAttention-3\n\n"
        "One layer's attention, random keys, values and queries, CUDA graphs replayed in random "
        "order within a round.\nTimes are medians; ratios are medians paired within a round, "
        "quartiles in brackets. Every measured kernel was\nchecked on the measured inputs before: "
        "relative error against float64 under 1e-2.\n\n"
        f"{run['gpu']}, driver {run['driver']}, CUDA {run['cuda']}, torch {run['torch']}, Triton "
        f"{run['triton']}, vLLM {run['vllm']} (FlashAttention-3),\n32 heads, 8 KV heads, head size "
        f"128, bfloat16, blocks of 16, seed {run['seed']}, {run['rounds']} rounds, commit "
        f"{run['commit']}.\n\n"
        "## Decode\n\n"
        "Requests of chunks whose first blocks were recomputed; FlashAttention-3 reads as many\n"
        "keys of plain requests, with vLLM's settings under CUDA graphs. Speed against it: more\n"
        "is better. `with RoPE`: keys are cached as their chunk was compiled, and the query is\n"
        "re-rotated (served). `without RoPE`: keys are rotated when they are read. `per chunk`:\n"
        "FlashAttention-3 over a sequence for each chunk, outputs merged.\n\n"
        f"{_decode_table(results)}\n\n"
        "## Link and prefill\n\n"
        "Time of all that attention needs, copies of keys too, against FlashAttention-3 over a\n"
        "plain request with as many new tokens at its end: less is better. `runs`: blocks of 16\n"
        "new tokens at the head of each chunk and a question; they see about half of the keys\n"
        "that a tail of as many tokens sees. `tail`: all new tokens at the end. Served by\n"
        "paged prefill in place, or over gathered keys by FlashAttention-3 (FA3) or our tiles.\n"
        "`in place` and `copied`: either way, whichever is served; `prepared` is the host's time\n"
        "for a step, before its first layer.\n"
        "Workspace: "
        f"{run['workspace_bytes'] >> 20} MiB.\n\n"
        f"{_link_table(results)}\n"
    )


def _decode_table(results: Sequence[dict[str, Any]]) -> str:
    counts = ("requests", "context", "chunk")
    arms = (kernel_cases.WITH_ROPE, kernel_cases.WITHOUT_ROPE, kernel_cases.PER_CHUNK)
    return markdown.table(
        (*counts, "FA3 ms", "FA3 TB/s", "with RoPE", "without RoPE", "per chunk"),
        [
            [
                *(str(row[name]) for name in counts),
                f"{row['ms']['fa3']['median']:.3f}",
                f"{row['bytes'] / row['ms']['fa3']['median'] / 1e9:.2f}",
                *(_spread(row["speed_vs_fa3"][arm]) for arm in arms),
            ]
            for row in _of(results, "decode")
        ],
    )


def _link_table(results: Sequence[dict[str, Any]]) -> str:
    return markdown.table(
        (
            *("form", "new", "context", "served by", "FA3 ms", "ours ms", "ours / FA3"),
            *("in place ms", "copied ms", "prepared in place ms", "prepared copied ms"),
        ),
        [
            [
                *(str(row[name]) for name in ("form", "new", "context", "served_by")),
                *(f"{row['ms'][arm]['median']:.3f}" for arm in ("fa3", "link")),
                _spread(row["time_vs_fa3"]),
                *(_ms(row["ms"].get(arm, {}).get("median")) for arm in _WAYS),
                *(_ms(row["prepare_ms"].get(arm)) for arm in _WAYS),
            ]
            for row in _of(results, "link")
        ],
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _of(results: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in results if row["kind"] == kind]


def _spread(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['q25']:.2f}-{ratio['q75']:.2f})"

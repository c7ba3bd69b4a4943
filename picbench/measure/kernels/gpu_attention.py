"""Checks and times the CUDA kernels on the GPU of this machine.

    python -m picbench.kernels.bench.gpu --output results/gpu

Writes kernels.json and kernels.md, and the kernels' figures of summary.json. Cases that an earlier
run with the same versions and commit has measured are kept, so that it can be interrupted.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from picbench.errors import ConfigError, PicBenchError
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.shape import HeadShape
from picbench.measure.kernels import decode_cases, link_cases
from picbench.measure.kernels.facts import commit as checkout
from picbench.measure.kernels.gpu_facts import provenance, update
from picbench.measure.kernels.gpu_report import report
from picbench.measure.kernels.timing import Spread, interleave, paired

# Llama-3.1-8B's and Mistral-7B's.
SHAPE = HeadShape(32, 8, 128, torch.bfloat16)
KINDS = ("decode", "link")


def measure_decode(case: decode_cases.DecodeCase, rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times one decode case; speeds relative to FlashAttention-3."""
    samples = interleave(decode_cases.arms(case, seed), rounds, seed)
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


def measure_link(case: link_cases.LinkCase, rounds: int, seed: int) -> dict[str, Any]:
    """Checks and times one link case; time relative to FlashAttention-3."""
    arms, served = link_cases.arms(case, seed)
    samples = interleave(arms, rounds, seed)
    return {
        "kind": "link",
        "form": case.form,
        "new": case.new,
        "context": case.context,
        "served_by": served,
        "ms": _spreads(samples),
        "time_vs_fa3": asdict(paired(samples["link"], samples["fa3"])),
    }


def _spreads(samples: dict[str, list[float]]) -> dict[str, Any]:
    return {name: asdict(Spread.of(times)) for name, times in samples.items()}


def summarise(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the target's cases: speed of decode, time of link, ours over the reference."""
    decoding = [
        row["speed_vs_fa3"]["turned"]["median"]
        for row in results
        if row["kind"] == "decode" and row["requests"] >= 16
    ]
    linking = [row["time_vs_fa3"]["median"] for row in results if row["kind"] == "link"]
    found = {"decode_vs_fa3": decoding, "link_vs_fa3": linking}
    return {name: statistics.median(values) for name, values in found.items() if values}


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=Path("results/gpu"))
@click.option("--only", multiple=True, type=click.Choice(KINDS), default=KINDS)
@click.option("--rounds", type=click.IntRange(min=5), default=21, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--commit", default=None, help="Default: this checkout's.")
def main(output: Path, only: Sequence[str], rounds: int, seed: int, commit: str | None) -> None:
    """Runs the command."""
    try:
        bench(output, rounds, seed, only=only, commit=commit)
    except PicBenchError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


def bench(
    output: Path,
    rounds: int,
    seed: int,
    *,
    only: Sequence[str] = KINDS,
    commit: str | None = None,
) -> None:
    """Check and time what was not measured before; write kernels.json, kernels.md and figures.

    Raises ConfigError without FlashAttention-3, InvalidRun where an output is wrong.
    """
    if not flash.covers(SHAPE):
        raise ConfigError(
            "the reference, FlashAttention-3, does not run here",
            hint="install picbench[cuda] on a Hopper GPU",
        )
    run = provenance(commit or checkout(), rounds, seed) | {
        "workspace_bytes": link_cases.WORKSPACE_BYTES,
        "weights": "none: random queries, keys and values",
    }
    output.mkdir(parents=True, exist_ok=True)
    path = output / "kernels.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    results = kept["results"] if kept.get("provenance") == run else []
    known = {row["case"] for row in results}
    for name, work in _work(only, rounds, seed):
        if name in known:
            continue
        click.echo(name, err=True)
        results.extend({"case": name} | row for row in work())
        torch.cuda.empty_cache()
        document = {"schema": 1, "provenance": run, "results": results}
        path.write_text(json.dumps(document, indent=1) + "\n")
        (output / "kernels.md").write_text(report(document))
    update(output / "summary.json", summarise(results))


def _work(
    only: Sequence[str], rounds: int, seed: int
) -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    if "decode" in only:
        for case in decode_cases.cases(SHAPE):
            name = f"decode {case.requests} x {case.context} in {case.chunk}"
            yield name, partial(_one, measure_decode, case, rounds, seed)
    if "link" in only:
        for one in link_cases.cases(SHAPE):
            name = f"link {one.form} {one.new} over {one.context}"
            yield name, partial(_one, measure_link, one, rounds, seed)


def _one(
    measure: Callable[[Any, int, int], dict[str, Any]], case: Any, rounds: int, seed: int
) -> list[dict[str, Any]]:
    return [measure(case, rounds, seed)]


if __name__ == "__main__":
    main()

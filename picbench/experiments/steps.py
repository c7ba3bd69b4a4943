"""The steps of `picbench measure all`: checks first, and no measurement after a check that fails.

Each step takes minutes and can be run alone. One that is done leaves a note with the commit that it
was done at, so that the same command continues where it was stopped.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from picbench.errors import ConfigError, InvalidRun, closest
from picbench.files import write_whole
from picbench.run.measurements import AllSteps, Outcome
from picbench.store import provenance
from picbench.workloads import models
from picbench.workloads.testbed import model_path

#: `picbench reproduce` measures their figures.
PAPERS = ("mepic", "epic", "minipic", "cacheblend")

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckStep:
    """A command that is run on a host with `gpus` GPUs or more."""

    name: str
    summary: str
    command: Command
    gpus: int = 1


def measure(settings: AllSteps) -> Outcome:
    """Run all steps, or list them; see `run_steps`."""
    found = steps(settings.output, settings.runs, settings.commit)
    if settings.list:
        return Outcome("\n".join(f"{step.name:12} {step.summary}" for step in found))
    commit = settings.commit or provenance.checkout()
    run_steps(found, settings.runs, settings.only, commit, redo=settings.redo)
    return Outcome()


def run_steps(
    found: Sequence[CheckStep], runs: Path, only: Sequence[str], commit: str, *, redo: bool
) -> None:
    """Run the steps that are not done at this commit. Raises InvalidRun at the first that fails."""
    names = [step.name for step in found]
    for name in only:
        if name not in names:
            raise ConfigError(f"`only` {name}: no such step", hint=closest(name, names))
    gpus = len(provenance.gpus())
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        gpus = min(gpus, len(list(filter(None, visible.split(",")))))
    for step in found:
        note = runs / f"{step.name}.done"
        if only and step.name not in only:
            continue
        if step.gpus > gpus:
            click.echo(f"{step.name}: not run, it needs {step.gpus} GPUs and there are {gpus}")
        elif not redo and note.exists() and json.loads(note.read_bytes())["commit"] == commit:
            click.echo(f"{step.name}: done before (--redo repeats it)")
        else:
            _run(step, note, commit)


def _run(step: CheckStep, note: Path, commit: str) -> None:
    click.echo(f"{step.name}: {step.summary}")
    began = time.monotonic()
    if subprocess.run(step.command, check=False).returncode != 0:
        words = " ".join(step.command)
        raise InvalidRun(f"step {step.name} failed: {words}", hint="nothing after it was run")
    took = time.monotonic() - began
    note.parent.mkdir(parents=True, exist_ok=True)
    done = {"commit": commit, "seconds": round(took, 1)}
    write_whole(note, (json.dumps(done) + "\n").encode())
    click.echo(f"{step.name}: ok, {took:,.0f} s")


def steps(output: Path, runs: Path, commit: str | None) -> list[CheckStep]:
    """All steps; results go to `output`, what they are made from to `runs`."""
    named = ("--commit", commit) if commit else ()
    where = ("--output", str(output), *named)
    tests = ("-q", "-p", "no:cacheprovider", "tests/kernels/cuda/device")
    found = [
        CheckStep("kernels-ok", "kernels against float64, on the GPU", _python("pytest", *tests)),
        *_checks(where),
        *_measurements(where),
    ]
    grid = output.parent / "break_even" / output.name
    at_grid = ("--device", "cuda", "--output", str(grid), *named)
    check = ("profile", *at_grid, "--grid", str(grid / "grid.json"))
    found += [
        _step("break-even", "where chunks pay, over a grid of traffic", "break-even", *at_grid),
        _step("profile", "what picbench profile predicts, against engines", *check),
    ]
    # The papers' figures are over scores that were measured before, where they are.
    scores = output.parent / "testbed" / "algorithms"
    known = ("--scores", str(scores)) if scores.is_dir() else ()
    for paper in PAPERS:
        flags = ("--device", "cuda", "--output", str(runs / paper), *named, *known)
        command = _python("picbench", "reproduce", paper, *flags)
        found.append(CheckStep(f"paper-{paper}", f"what {paper}'s figures show", command))
    return found


def _checks(where: Command) -> Iterator[CheckStep]:
    oracle = ("oracle", "--model", str(model_path()))
    eager = ("--dtype", "float32", "--eager")
    for dtype, flags in {"float32": eager, "bfloat16": ("--dtype", "bfloat16")}.items():
        said = f"the engine against the oracle, {dtype}"
        yield _step(f"engine-{dtype}", said, *oracle, *flags)
        said = f"six data sets against the testbed's card, {dtype}"
        yield _step(f"accuracy-{dtype}", said, "accuracy", *where, "--dtype", dtype)
    said = "a batch of all algorithms against each request alone, float32"
    yield _step("alone", said, "algorithms", "alone", *where)
    said = "a tiny model of each architecture against the oracle"
    yield _step("architectures", said, "architectures", *where, "--eager", "--jobs", "4")
    # The testbed model's heads cannot be divided among four.
    small = ("oracle", "--model", str(models.resolve("shape:small").path))
    for gpus, check in {2: oracle, 4: small}.items():
        said = f"an engine on {gpus} GPUs against the oracle"
        divided = (*check, *eager, "--tensor-parallel", str(gpus))
        yield _step(f"engine-tp{gpus}", said, *divided, gpus=gpus)
    # The engine as it is served: with graphs and scheduling ahead, short of memory.
    storms = {"float32": ("float32", 1), "bfloat16": ("bfloat16", 1), "tp2": ("float32", 2)}
    for name, (dtype, gpus) in storms.items():
        said = f"a storm in a starved pool against a large one, {dtype}, {gpus} GPU(s)"
        flags = ("--device", "cuda", "--dtype", dtype, "--tensor-parallel", str(gpus))
        yield _step(
            f"storm-{name}", said, "storm", *where, *flags, "--preemptions", "100", gpus=gpus
        )


def _measurements(where: Command) -> Iterator[CheckStep]:
    for name, said in {
        "kernels": "kernels against FlashAttention-3",
        "shared-decode": "decode that reads shared chunks once",
        "engine-comparison": "the engine against stock vLLM",
        "host-tier": "chunks in host memory: right, then how fast",
        "small-steps": "TTFT where few tokens are computed",
        "decode-load": "decoding of 64 requests that share chunks",
        "load-report": "loads of picbench and of stock vLLM, repeated",
    }.items():
        yield _step(name, said, name, *where)
    said = "decoding by how many requests share a chunk"
    yield _step("decode-sharing", said, "decode-load", "--sharing", *where)
    for gpus in (2, 4):
        flags = ("scaling", *where, "--workers", str(gpus))
        yield _step(f"scaling-{gpus}", f"throughput on {gpus} GPUs", *flags, gpus=gpus)


def _step(name: str, summary: str, *words: str, gpus: int = 1) -> CheckStep:
    """A command of `picbench measure`. With --debug an engine that fails shows its log's end."""
    return CheckStep(name, summary, _python("picbench", "measure", *words, "--debug"), gpus)


def _python(module: str, *arguments: str) -> Command:
    return (sys.executable, "-m", module, *arguments)

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

#: Measurements on one GPU: name, what it is about, and the command where that is not the name.
_ON_ONE_GPU = (
    ("kernels", "kernels against FlashAttention-3"),
    ("shared-decode", "decode that reads shared chunks once"),
    ("engine-comparison", "the engine against stock vLLM"),
    ("host-tier", "chunks in host memory: right, then how fast"),
    ("small-steps", "TTFT where few tokens are computed"),
    ("decode-load", "decoding of 64 requests that share chunks"),
    ("decode-sharing", "decoding by how many requests share a chunk", "decode-load", "--sharing"),
    ("load-report", "loads of picbench and of stock vLLM, repeated"),
)

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


def steps(output: Path, runs: Path, commit: str | None) -> list[CheckStep]:
    """All steps; results go to `output`, what they are made from to `runs`."""
    where = ("--output", str(output), *_named(commit))
    return [
        *_checks(where),
        *_measurements(where),
        *_grid(output.parent / "break_even" / output.name, commit),
        *_papers(output.parent, runs, commit),
    ]


def run_steps(
    found: Sequence[CheckStep], runs: Path, only: Sequence[str], commit: str, *, redo: bool
) -> None:
    """Run the steps that are not done at this commit. Raises InvalidRun at the first that fails."""
    _check_names(found, only)
    gpus = _visible_gpus()
    for step in found:
        note = runs / f"{step.name}.done"
        if only and step.name not in only:
            continue
        if step.gpus > gpus:
            click.echo(f"{step.name}: not run, it needs {step.gpus} GPUs and there are {gpus}")
        elif _is_done(note, commit) and not redo:
            click.echo(f"{step.name}: done before (--redo repeats it)")
        else:
            _run(step, note, commit)


def _visible_gpus() -> int:
    """How many GPUs a program may use here."""
    found = len(provenance.gpus())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if chosen is None else min(found, len(list(filter(None, chosen.split(",")))))


def _is_done(note: Path, commit: str) -> bool:
    return note.exists() and json.loads(note.read_bytes())["commit"] == commit


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


def _checks(where: Command) -> Iterator[CheckStep]:
    kernels = ("-q", "-p", "no:cacheprovider", "tests/kernels/cuda/device")
    oracle, eager = ("oracle", "--model", str(model_path())), ("--dtype", "float32", "--eager")
    yield CheckStep(
        "kernels-ok", "kernels against float64, on the GPU", _python("pytest", *kernels)
    )
    for dtype, flags in {"float32": eager, "bfloat16": ("--dtype", "bfloat16")}.items():
        said = f"the engine against the oracle, {dtype}"
        yield CheckStep(f"engine-{dtype}", said, _measure(*oracle, *flags))
        said = f"six data sets against the testbed's card, {dtype}"
        scores = _measure("accuracy", *where, "--dtype", dtype)
        yield CheckStep(f"accuracy-{dtype}", said, scores)
    said = "a batch of all algorithms against each request alone, float32"
    yield CheckStep("alone", said, _measure("algorithms", "alone", *where))
    said = "a tiny model of each architecture against the oracle"
    tiny = _measure("architectures", *where, "--eager", "--jobs", "4")
    yield CheckStep("architectures", said, tiny)
    # The testbed model's heads cannot be divided among four.
    small = ("oracle", "--model", str(models.resolve("shape:small").path))
    for gpus, check in {2: oracle, 4: small}.items():
        divided = _measure(*check, *eager, "--tensor-parallel", str(gpus))
        said = f"an engine on {gpus} GPUs against the oracle"
        yield CheckStep(f"engine-tp{gpus}", said, divided, gpus)
    # The engine as it is served: with graphs and scheduling ahead, short of memory.
    storms = {"float32": ("float32", 1), "bfloat16": ("bfloat16", 1), "tp2": ("float32", 2)}
    for name, (dtype, gpus) in storms.items():
        flags = ("--device", "cuda", "--dtype", dtype, "--tensor-parallel", str(gpus))
        storm = _measure("storm", *where, *flags, "--preemptions", "100")
        said = f"a storm in a starved pool against a large one, {dtype}, {gpus} GPU(s)"
        yield CheckStep(f"storm-{name}", said, storm, gpus)


def _measurements(where: Command) -> Iterator[CheckStep]:
    for name, summary, *command in _ON_ONE_GPU:
        yield CheckStep(name, summary, _measure(*(command or [name]), *where))
    for gpus in (2, 4):
        scaling = _measure("scaling", *where, "--workers", str(gpus))
        yield CheckStep(f"scaling-{gpus}", f"throughput on {gpus} GPUs", scaling, gpus)


def _grid(output: Path, commit: str | None) -> Iterator[CheckStep]:
    """Where chunks pay, and whether predictions from that hold."""
    where = ("--device", "cuda", "--output", str(output), *_named(commit))
    measured = _measure("break-even", *where)
    yield CheckStep("break-even", "where chunks pay, over a grid of traffic", measured)
    check = _measure("profile", *where, "--grid", str(output / "grid.json"))
    yield CheckStep("profile", "what picbench profile predicts, against engines", check)


def _papers(results: Path, runs: Path, commit: str | None) -> Iterator[CheckStep]:
    """The papers' figures, over scores that were measured before, where they are."""
    scores = results / "testbed" / "algorithms"
    known = ("--scores", str(scores)) if scores.is_dir() else ()
    for paper in PAPERS:
        where = ("--device", "cuda", "--output", str(runs / paper), *_named(commit))
        command = _python("picbench", "reproduce", paper, *where, *known)
        yield CheckStep(f"paper-{paper}", f"what {paper}'s figures show", command)


def _measure(*words: str) -> Command:
    # With --debug an engine that fails shows the end of its log.
    return _python("picbench", "measure", *words, "--debug")


def _named(commit: str | None) -> tuple[str, ...]:
    return ("--commit", commit) if commit else ()


def _python(module: str, *arguments: str) -> Command:
    return (sys.executable, "-m", module, *arguments)


def _check_names(found: Sequence[CheckStep], only: Sequence[str]) -> None:
    names = [step.name for step in found]
    for name in only:
        if name not in names:
            raise ConfigError(f"`only` {name}: no such step", hint=closest(name, names))

"""The steps of `picbench measure all`: checks first, and no measurement after a check that fails.

Each step takes minutes and can be run alone. One that is done leaves a note with the commit that it
was done at, so that the same command continues where it was stopped.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path

import click

from picbench.errors import ConfigError, InvalidRun, closest
from picbench.files import write_json
from picbench.run.measurements import MEASUREMENTS, AllSteps, Outcome
from picbench.store import provenance
from picbench.workloads import models
from picbench.workloads.testbed import model_path

#: `picbench reproduce` measures their figures.
PAPERS = ("mepic", "epic", "minipic", "cacheblend")

#: Measurements that need no flags of their own.
PLAIN = (
    *("kernels", "shared-decode", "engine-comparison", "host-tier", "small-steps"),
    *("decode-load", "load-report"),
)


@dataclass(frozen=True, slots=True)
class CheckStep:
    """A command that is run on a host with `gpus` GPUs or more."""

    name: str
    summary: str
    command: tuple[str, ...]
    gpus: int = 1


def measure(settings: AllSteps) -> Outcome:
    """Run the steps that are not done at this commit, or list all of them.

    Raises InvalidRun at the first that fails.
    """
    found = steps(settings.output, settings.runs, settings.commit)
    if settings.list:
        return Outcome("\n".join(f"{step.name:18} {step.summary}" for step in found))
    names = [step.name for step in found]
    for name in settings.only:
        if name not in names:
            raise ConfigError(f"`only` {name}: no such step", hint=closest(name, names))
    commit, gpus = settings.commit or provenance.checkout(), len(provenance.gpus())
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        gpus = min(gpus, len(list(filter(None, visible.split(",")))))
    for step in found:
        if settings.only and step.name not in settings.only:
            continue
        note = settings.runs / f"{step.name}.done"
        before = json.loads(note.read_bytes())["commit"] if note.exists() else None
        if step.gpus > gpus:
            click.echo(f"{step.name}: not run, it needs {step.gpus} GPUs and there are {gpus}")
        elif before == commit and not settings.redo:
            click.echo(f"{step.name}: done before (--redo repeats it)")
        else:
            click.echo(f"{step.name}: {step.summary}")
            began = time.monotonic()
            if subprocess.run(step.command, check=False).returncode != 0:
                failed = f"step {step.name} failed: {' '.join(step.command)}"
                raise InvalidRun(failed, hint="nothing after it was run")
            took = round(time.monotonic() - began, 1)
            write_json(note, {"commit": commit, "seconds": took})
            click.echo(f"{step.name}: ok, {took:,.0f} s")
    return Outcome()


def steps(output: Path, runs: Path, commit: str | None) -> list[CheckStep]:
    """All steps; results go to `output`, what they are made from to `runs`."""
    python, named = (sys.executable, "-m"), ("--commit", commit) if commit else ()
    where = ("--output", str(output), *named)
    tests = (*python, "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/cuda/device")
    found = [CheckStep("kernels-ok", "Compare kernels with float64, on the GPU.", tests)]
    about = {each.name: (getdoc(each.settings) or "").split("\n")[0] for each in MEASUREMENTS}

    def add(name: str, measurement: str, *flags: str, gpus: int = 1) -> None:
        # With --debug an engine that fails shows its log's end.
        command = (*python, "picbench", "measure", *measurement.split(), *flags, "--debug")
        found.append(CheckStep(name, about[measurement], command, gpus))

    model, eager = ("--model", str(model_path())), ("--dtype", "float32", "--eager")
    for dtype, flags in {"float32": eager, "bfloat16": ("--dtype", "bfloat16")}.items():
        add(f"engine-{dtype}", "oracle", *model, *flags)
        add(f"accuracy-{dtype}", "accuracy", *where, "--dtype", dtype)
    add("alone", "algorithms alone", *where)
    add("architectures", "architectures", *where, "--eager", "--jobs", "4")
    # The testbed model's heads cannot be divided among four.
    small = ("--model", str(models.resolve("shape:small").path))
    for gpus, checked in {2: model, 4: small}.items():
        flags = (*checked, *eager, "--tensor-parallel", str(gpus))
        add(f"engine-tp{gpus}", "oracle", *flags, gpus=gpus)
    # The engine as it is served: with graphs and scheduling ahead, short of memory.
    storms = {"float32": ("float32", 1), "bfloat16": ("bfloat16", 1), "tp2": ("float32", 2)}
    for name, (dtype, gpus) in storms.items():
        flags = ("--dtype", dtype, "--tensor-parallel", str(gpus), "--preemptions", "100")
        add(f"storm-{name}", "storm", *where, "--device", "cuda", *flags, gpus=gpus)
    for name in PLAIN:
        add(name, name, *where)
    add("decode-sharing", "decode-load", "--sharing", *where)
    for gpus in (2, 4):
        add(f"scaling-{gpus}", "scaling", *where, "--workers", str(gpus), gpus=gpus)
    grid, gpu = output.parent / "break_even" / output.name, ("--device", "cuda")
    there = (*gpu, "--output", str(grid), *named)
    add("break-even", "break-even", *there)
    add("profile", "profile", *there, "--grid", str(grid / "grid.json"))
    # The papers' figures are over scores that were measured before, where they are.
    scores = output.parent / "testbed" / "algorithms"
    known = ("--scores", str(scores)) if scores.is_dir() else ()
    for paper in PAPERS:
        flags = (*gpu, "--output", str(runs / paper), *named, *known)
        command = (*python, "picbench", "reproduce", paper, *flags)
        found.append(CheckStep(f"paper-{paper}", f"Measure what {paper}'s figures show.", command))
    return found

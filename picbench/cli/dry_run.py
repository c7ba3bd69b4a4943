"""What `picbench run --dry-run` prints: what would run, with estimates."""

from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rich.table import Table
from rich.text import Text

from picbench.experiments.sweep_run import estimate_run
from picbench.run.job import RUNS, Job
from picbench.run.progress import minutes
from picbench.run.result import load_of, print_all, skipped_rows
from picbench.store.manifest import FINAL
from picbench.store.reader import read_run
from picbench.store.writer import MANIFEST
from picbench.tables.run import gib

_UNSET = {"columns": "LongBench's", "prompts": "picbench's own"}


def print_plan(job: Job, stream: TextIO) -> None:
    """What a run would do: arms, settings, requests, sizes."""
    table = Table(show_header=False, box=None)
    for name, value in _plan(job):
        table.add_row(name, Text(value))
    print_all(stream, "dry run: no engine was started, nothing was written", table)


def _plan(job: Job) -> Iterator[tuple[str, str]]:
    """(name, value) of everything that a dry run tells."""
    facts, sizes = job.facts, job.sizes
    for arm in job.arms:
        where = "stock vLLM" if arm.stock else "the PIC engine"
        yield "arm", f"{arm.name} on {arm.algorithm if arm.endpoint else where}"
    yield "model", job.workload.model.label
    for name in (
        "dataset",
        "data",
        "columns",
        "seed",
        "concurrency",
        "dtype",
        "device",
        "tensor_parallel",
        "eager",
        "on_bad_row",
        "prompts",
        "scoring",
        "drop",
    ):
        yield f"--{name.replace('_', '-')}", _setting(name, getattr(job.config, name))
    if job.config.requests:
        yield "--requests", job.config.requests
    yield "chat template", "around prompts" if job.workload.chat else "none"
    yield from (("rows", line) for line in skipped_rows(job))
    yield "requests", f"{facts.samples} to each of {len(job.arms)} arms"
    yield "load", load_of(job)
    yield "repeats", str(job.config.repeats)
    yield "cache", job.config.cache or "kept between requests"
    yield "preloaded", f"{len(job.workload.preload)} chunks"
    yield "prompt tokens", f"{facts.mean_tokens:,.0f} mean, {facts.max_tokens:,} longest"
    yield "output tokens", f"{max(s.max_tokens for s in job.workload.samples):,} at most"
    yield "chunks", f"{facts.chunks:,}, {facts.unique_chunks:,} distinct"
    yield "reusable", f"{facts.reuse:.1%} of prompt tokens are in a chunk seen before"
    yield "truncated", f"{facts.truncated} of {facts.samples} prompts"
    yield "context", f"{sizes.context:,} tokens"
    yield (
        "KV blocks",
        f"{sizes.pool:,} in the pool; the longest request needs {sizes.longest:,}, "
        f"all distinct chunks {sizes.chunks:,}",
    )
    yield from _estimates(job)
    yield from (("note", note) for note in job.notes)
    yield "fingerprint", job.fingerprint
    yield "output", f"{job.output}{_state(job.output)}"


def _estimates(job: Job) -> Iterator[tuple[str, str]]:
    found = estimate_run(job, RUNS)
    yield (
        "all tokens",
        f"{found.prompt_tokens:,} of prompts, {found.output_tokens:,} of replies at most, over all "
        "arms and repeats",
    )
    known = found.pool_bytes is not None
    yield "KV memory", f"{gib(found.pool_bytes or 0)} GiB, all pools" if known else "not known"
    if found.seconds is None:
        yield "time", f"not known: no run of this model with these settings here in {RUNS}/"
    else:
        yield (
            "time",
            (
                f"{minutes(found.seconds)} (minutes:seconds), as arms took for a prompt token in "
                f"earlier runs ({found.runs}); starts of engines are not in it"
            ),
        )


def _state(output: Path) -> str:
    """What a run would do with a directory that is there."""
    if not (output / MANIFEST).exists():
        return ""
    status = read_run(output).manifest["status"]
    return (
        f" ({status}: would only be shown)" if status in FINAL else f" ({status}: would be resumed)"
    )


def _setting(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return _UNSET.get(name, "none") if value is None else str(value)

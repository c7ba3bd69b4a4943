"""What a run prints on stdout, and what `picbench show` prints of its directory."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from picbench.engines.algorithms import Registry, Reuse
from picbench.engines.config import BLOCK_SIZE
from picbench.errors import ConfigError
from picbench.run.job import Job
from picbench.settings import RunConfig
from picbench.store.reader import Run, read_run
from picbench.store.summary import ArmSummary
from picbench.tables.metrics import metrics_shown
from picbench.tables.run import cache_lines, memory_lines, run_table, server_lines, stalled, verdict
from picbench.tables.table import WIDTH, PipedConsole


def print_result(
    job: Job,
    arms: Mapping[str, ArmSummary],
    stream: TextIO,
    worded: Callable[[str], str] = str,
) -> None:
    """A line for each arm, what reuse gains and loses, and what the numbers mean.

    `worded` puts flags for fields into what is advised.
    """
    facts = job.facts
    print_all(
        stream,
        f"{facts.dataset}{_rows_label(job)}, {facts.samples} requests an arm, "
        f"{job.workload.model.label}, {load_of(job)}, "
        f"pool {job.sizes.pool} blocks",
        run_table(arms),
        *verdict(arms, [arm.name for arm in job.arms if arm.reuse is Reuse.CHUNKS]),
        *map(worded, notes(job)),
        *map(worded, cache_lines(job.config.cache, arms)),
        *stalled(arms),
        *memory_lines(arms),
        *server_lines(arms),
        *traffic(arms),
        *map(worded, slow_tiers(arms)),
        *late_kernels(arms),
    )


def load_of(job: Job) -> str:
    """How requests are sent."""
    arrivals = job.workload.arrivals
    if arrivals is None:
        return f"concurrency {job.config.concurrency}"
    return f"{len(arrivals)} arrivals in {max(arrivals):.1f} s, {job.running} running at most"


def _rows_label(job: Job) -> str:
    return " (synthetic rows)" if job.workload.synthetic else ""


def traffic(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """What went through tiers, an arm a line."""
    for name, arm in arms.items():
        moved = [
            f"{tier} {_megabytes(m.loaded_bytes)} loaded, {_megabytes(m.stored_bytes)} stored"
            for tier, m in arm.moved.items()
            if m.loaded_bytes or m.stored_bytes
        ]
        if moved:
            yield f"{name}: {'; '.join(moved)}"


def slow_tiers(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """What to do about tiers that slow an arm, an arm a line."""
    for name, arm in arms.items():
        times = arm.step_times
        if times.slow:
            took = f"{name}: tiers took {times.share:.0%} of the arm's steps"
            yield f'{took}: `tiers=""` serves without'


def late_kernels(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """Kernels that were compiled while requests waited for them, an arm a line."""
    for name, arm in arms.items():
        if arm.compiled:
            kernels = ", ".join(sorted(kernel.rpartition(".")[2] for kernel in arm.compiled))
            yield f"{name}: {sum(arm.compiled.values())} kernels were compiled meanwhile: {kernels}"


def _megabytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def notes(job: Job) -> Iterator[str]:
    """What the columns mean, and what they do not mean in this run."""
    model = job.workload.model
    if not model.meaningful:
        yield f"* {model.weights} weights: accuracy not meaningful"
    yield from skipped_rows(job)
    if job.config.drop:
        yield (
            "Prompts lack passages (`drop`): full does not know them either; KV that was compiled "
            "with context=document does."
        )
    yield from _reordered(job)
    yield "TTFT vs full: geometric mean over paired requests."
    yield "tokens/s: prompt and output tokens over the arm's own busy time."
    if job.workload.arrivals:
        yield "Open loop: latency counts from arrival; makespan is from 0 to the last token."
        yield (
            "Each arm served all requests before the next one did: if the machine got slower or "
            "faster meanwhile, ratios between arms have that in them."
        )
    if job.objectives:
        yield f"goodput: requests that met {job.config.slo}, by the second."
    yield f"blocks: most that running requests held at a time, of {BLOCK_SIZE} tokens."
    yield (
        "tokens: shares of the prompts; reused from the cache, and computed: the rest, and chunks "
        "that were compiled to be reused."
    )


def _reordered(job: Job) -> Iterator[str]:
    """A line about arms whose prompts are not those of the others."""
    names = [arm.name for arm in job.arms if arm.reorders]
    if names:
        samples = job.workload.samples
        fixed = sum(sample.ordered for sample in samples)
        yield (
            f"{', '.join(names)}: prompts have their chunks in another order, each once, and "
            f"nothing tells the model the order that was given; {fixed} of {len(samples)} are "
            "consecutive text and stay as they are."
        )


def skipped_rows(job: Job) -> Iterator[str]:
    """A line about malformed rows, where there are any."""
    skipped = job.workload.skipped
    if skipped:
        yield f"malformed rows left out: {len(skipped)}, the first: {skipped[0]}"


def print_all(stream: TextIO, *parts: RenderableType) -> None:
    """Print in the width of a terminal, or in lines of WIDTH characters."""
    console = PipedConsole(file=stream, width=None if stream.isatty() else WIDTH, highlight=False)
    for part in parts:
        console.print(part, markup=False)


def print_overview(run: Run, stream: TextIO) -> None:
    """The state of a run, its table, its settings, and where its numbers come from."""
    arms = arms_of(run)
    print_all(
        stream,
        _lines([("run", str(run.path)), *_state(run)]),
        *([run_table(arms), *verdict(arms, [*_reusing(run)])] if arms else ()),
        *stalled(arms),
        *server_lines(arms),
        _lines([*_results(arms), *_settings(run), *_provenance(run)]),
    )


def arms_of(run: Run) -> dict[str, ArmSummary]:
    """The summaries of a run; none where it was stopped before it measured anything."""
    try:
        return dict(run.summary)
    except ConfigError:
        return {}


def _lines(facts: list[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in facts:
        table.add_row(name, Text(value))
    return table


def _state(run: Run) -> Iterator[tuple[str, str]]:
    manifest = run.manifest
    workload = manifest["workload"]
    yield "status", " - ".join(filter(None, (manifest["status"], manifest["reason"])))
    for attempt in manifest["attempts"]:
        done = f", after {attempt['done']} requests" if attempt["done"] else ""
        again = f", {attempt['replayed']} served again" if attempt["replayed"] else ""
        end = attempt["ended"] or "no end (killed, or running)"
        yield "attempt", f"{attempt['began']} to {end}: {attempt['status']}{done}{again}"
    yield "requests", f"{workload['samples']} to each of {len(manifest['arms'])} arms"
    yield "data set", workload["dataset"] + (" (synthetic rows)" if workload["synthetic"] else "")
    yield "model", f"{manifest['model']['name']} ({manifest['model']['weights']} weights)"
    yield "cache", manifest["cache"]
    yield "fingerprint", manifest["fingerprint"]
    yield "schema", str(run.manifest["schema"])


def _results(arms: Mapping[str, ArmSummary]) -> Iterator[tuple[str, str]]:
    for name, arm in arms.items():
        if arm.outcomes:
            yield (
                f"outcomes of {name}",
                ", ".join(f"{n} {what}" for what, n in arm.outcomes.items()),
            )


def _settings(run: Run) -> Iterator[tuple[str, str]]:
    """Settings that are not the default, and the sizes that were chosen."""
    for name, value in run.manifest["config"].items():
        known = RunConfig.model_fields.get(name)
        chosen = tuple(value) if isinstance(value, list) else value
        if known is None or known.is_required() or chosen != known.get_default():
            yield name, ",".join(value) if isinstance(value, list) else str(value)
    sizes = run.manifest["sizes"]
    yield "context", f"{sizes['context']:,} tokens"
    yield "KV blocks", f"{sizes['pool']:,} in the pool of each arm"


def _provenance(run: Run) -> Iterator[tuple[str, str]]:
    found = run.manifest["provenance"]
    git = found.get("git") or {}
    if git:
        yield "commit", git["commit"] + (", changed" if git["dirty"] else "")
    yield "packages", ", ".join(f"{name} {known}" for name, known in found["packages"].items())
    yield "python", f"{found['python']} on {found['platform']}"
    yield "CPU", f"{found['cpu']['model']}, {found['cpu']['cores']} cores"
    for gpu in found["gpus"]:
        yield "GPU", f"{gpu['name']}, driver {gpu['driver']}, {gpu['memory']}"
    yield from found["environment"].items()
    yield "command", " ".join(found["command"])


def _reusing(run: Run) -> Iterator[str]:
    """Arms that reuse chunks, as far as their algorithms are installed here."""
    registry = Registry()
    for name, arm in run.manifest["arms"].items():
        with suppress(ConfigError):
            if registry.parse(arm["algorithm"]).reuse is Reuse.CHUNKS:
                yield name


def status_line(path: Path, exit_code: int) -> str:
    """One line of JSON about the run directory `path`, whose command ends with `exit_code`.

    Times are in milliseconds; null is what was not measured.
    """
    run = read_run(path)
    return json.dumps(
        {
            "run": str(path),
            "status": run.manifest["status"],
            "exit_code": exit_code,
            "fingerprint": run.manifest["fingerprint"],
            "arms": {name: headline(arm) for name, arm in arms_of(run).items()},
        }
    )


def headline(arm: ArmSummary) -> dict[str, Any]:
    """The main numbers of an arm."""
    metrics = metrics_shown([arm], "status")
    return {"provenance": arm.provenance} | {metric.name: metric.known(arm) for metric in metrics}

"""What a run prints on stdout."""

from collections.abc import Iterator, Mapping
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from picbench.config import flag
from picbench.engines.config import BLOCK_SIZE
from picbench.job import Job
from picbench.summary import ArmSummary
from picbench.workloads.bundled import BUNDLED

#: Characters in a line where output is not a terminal.
WIDTH = 140

NOTHING = "-"


def print_result(job: Job, arms: Mapping[str, ArmSummary], stream: TextIO) -> None:
    """A line for each arm, and below them what a reader must know about the numbers."""
    facts = job.facts
    print_all(
        stream,
        f"{facts.dataset}{_rows_label(job)}, {facts.samples} requests an arm, "
        f"{job.workload.model.label}, concurrency {job.config.concurrency}, "
        f"pool {job.sizes.pool} blocks",
        result_table(arms, job.workload.metric),
        *notes(job),
    )


def _rows_label(job: Job) -> str:
    return " (synthetic rows)" if job.config.data == BUNDLED else ""


def print_plan(job: Job, stream: TextIO) -> None:
    """What a run would do: arms, settings, requests, sizes."""
    table = Table(show_header=False, box=None)
    for name, value in plan(job):
        table.add_row(name, Text(value))
    print_all(stream, "dry run: no engine was started, nothing was written", table)


def result_table(arms: Mapping[str, ArmSummary], metric: str) -> Table:
    """The table of a run's result."""
    table = Table()
    table.add_column("arm", no_wrap=True)
    for heading in (
        "requests",
        "TTFT p50\nms",
        "TTFT p90\nms",
        "TTFT\nvs full",
        "TPOT\nms",
        "tokens/s",
        metric,
        "blocks\npeak",
        "tokens\nreused",
        "tokens\ncomputed",
    ):
        table.add_column(heading, justify="right")
    for name, arm in arms.items():
        table.add_row(*(Text(cell) for cell in (name, *cells(arm))))
    return table


def cells(arm: ArmSummary) -> tuple[str, ...]:
    """The numbers of one arm, as text."""
    ttft = arm.ttft_ms
    ratio = arm.ttft_vs_full
    mean = arm.score.mean
    return (
        f"{arm.requests - arm.failed}/{arm.requests}" if arm.failed else str(arm.requests),
        _number(ttft.p50 if ttft else None),
        _number(ttft.p90 if ttft else None),
        NOTHING if ratio is None else f"{ratio.geomean:.2f}x",
        _number(arm.tpot_ms),
        NOTHING if arm.throughput_tok_s is None else f"{arm.throughput_tok_s:,.0f}",
        NOTHING if mean is None else f"{mean:.3f}{'' if arm.score.meaningful else '*'}",
        f"{arm.blocks.peak_referenced:,.0f}",
        _share(arm.tokens.reused, arm.tokens.prompt),
        _share(arm.computed_tokens, arm.tokens.prompt),
    )


def notes(job: Job) -> Iterator[str]:
    """What the columns mean, and what they do not mean in this run."""
    model = job.workload.model
    if not model.meaningful:
        yield f"* {model.weights} weights: accuracy not meaningful"
    yield "TTFT vs full: geometric mean over paired requests."
    yield "tokens/s: prompt and output tokens over the arm's own busy time."
    yield f"blocks: most that running requests held at a time, of {BLOCK_SIZE} tokens."
    yield (
        "tokens: shares of the prompts; reused from the cache, and computed: the rest, and chunks "
        "that were compiled to be reused."
    )


def plan(job: Job) -> Iterator[tuple[str, str]]:
    """(name, value) of everything that a dry run tells."""
    facts, sizes = job.facts, job.sizes
    for arm in job.arms:
        yield "arm", f"{arm.name} on {'stock vLLM' if arm.stock else 'the PIC engine'}"
    yield "model", job.workload.model.label
    for name in ("dataset", "data", "seed", "concurrency", "dtype", "on_bad_row", "prompts"):
        yield flag(name), _setting(getattr(job.config, name))
    yield "requests", f"{facts.samples} to each of {len(job.arms)} arms"
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
    yield "fingerprint", job.fingerprint
    yield "output", str(job.output)


def print_all(stream: TextIO, *parts: RenderableType) -> None:
    """Print on a terminal in its width, elsewhere in lines of WIDTH characters."""
    console = Console(file=stream, width=None if stream.isatty() else WIDTH, highlight=False)
    for part in parts:
        console.print(part, markup=False)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.1f}"


def _setting(value: object) -> str:
    return "picbench's own" if value is None else str(value)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else NOTHING

"""What a run prints on stdout."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from picbench.engines.algorithms import Reuse
from picbench.engines.config import BLOCK_SIZE
from picbench.output.summary import ArmSummary, Percentiles
from picbench.output.verdict import verdict
from picbench.run.job import Job

#: Characters in a line where output is not a terminal.
WIDTH = 140

NOTHING = "-"


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
        result_table(arms, job.workload.metric),
        *verdict(arms, [arm.name for arm in job.arms if arm.reuse is Reuse.CHUNKS]),
        *map(worded, notes(job)),
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


def result_table(arms: Mapping[str, ArmSummary], metric: str) -> Table:
    """The table of a run's result; arms in an open loop have columns of their own."""
    table = Table()
    table.add_column("arm", no_wrap=True)
    columns = _columns(arms.values(), metric)
    for heading in columns:
        table.add_column(heading, justify="right")
    for name, arm in arms.items():
        table.add_row(
            *(Text(cell) for cell in (name, *(column(arm) for column in columns.values())))
        )
    return table


def _columns(arms: Collection[ArmSummary], metric: str) -> dict[str, Callable[[ArmSummary], str]]:
    """What is shown of an arm, by heading."""
    open_loop = any(arm.makespan_s is not None for arm in arms)
    tail = "p95" if open_loop else "p90"
    columns: dict[str, Callable[[ArmSummary], str]] = {
        "requests": _requests,
        "TTFT p50\nms": lambda arm: _number(_at(arm.ttft_ms, "p50")),
        f"TTFT {tail}\nms": lambda arm: _number(_at(arm.ttft_ms, tail)),
        "TTFT\nvs full": _ratio,
        "TPOT\nms": lambda arm: _number(arm.tpot_ms),
    }
    if open_loop:
        columns["makespan\ns"] = lambda arm: _number(arm.makespan_s)
    if any(arm.goodput_req_s is not None for arm in arms):
        columns["goodput\nreq/s"] = lambda arm: _number(arm.goodput_req_s)
    return columns | {
        "tokens/s": lambda arm: _number(arm.throughput_tok_s, digits=0),
        metric: _score,
        "blocks\npeak": lambda arm: _number(arm.blocks.peak_referenced, digits=0),
        "tokens\nreused": lambda arm: _share(arm.tokens.reused, arm.tokens.prompt),
        "tokens\ncomputed": lambda arm: _share(arm.computed_tokens, arm.tokens.prompt),
    }


def _at(percentiles: Percentiles | None, name: str) -> float | None:
    return getattr(percentiles, name, None)


def _requests(arm: ArmSummary) -> str:
    return f"{arm.requests - arm.failed}/{arm.requests}" if arm.failed else str(arm.requests)


def _ratio(arm: ArmSummary) -> str:
    return NOTHING if arm.ttft_vs_full is None else f"{arm.ttft_vs_full.geomean:.2f}x"


def _score(arm: ArmSummary) -> str:
    if arm.score.mean is None:
        return NOTHING
    return f"{arm.score.mean:.3f}{'' if arm.score.meaningful else '*'}"


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
    yield "TTFT vs full: geometric mean over paired requests."
    yield "tokens/s: prompt and output tokens over the arm's own busy time."
    if job.workload.arrivals:
        yield "Open loop: latency counts from arrival; makespan is from 0 to the last token."
    if job.objectives:
        yield f"goodput: requests that met {job.config.slo}, by the second."
    yield f"blocks: most that running requests held at a time, of {BLOCK_SIZE} tokens."
    yield (
        "tokens: shares of the prompts; reused from the cache, and computed: the rest, and chunks "
        "that were compiled to be reused."
    )


def skipped_rows(job: Job) -> Iterator[str]:
    """A line about malformed rows, where there are any."""
    skipped = job.workload.skipped
    if skipped:
        yield f"malformed rows left out: {len(skipped)}, the first: {skipped[0]}"


def print_all(stream: TextIO, *parts: RenderableType) -> None:
    """Print on a terminal in its width, elsewhere in lines of WIDTH characters."""
    console = Console(file=stream, width=None if stream.isatty() else WIDTH, highlight=False)
    for part in parts:
        console.print(part, markup=False)


def _number(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else NOTHING

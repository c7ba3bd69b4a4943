"""What a dry run of a sweep prints."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.table import Table
from rich.text import Text

from picbench.output.result_table import print_all
from picbench.output.tables.arm_columns import NOTHING
from picbench.run.progress import minutes
from picbench.sweep.sweep_plan import MISSING, PlannedCell, TimeEstimate


def print_sweep_plan(planned: Sequence[PlannedCell], stream: TextIO) -> None:
    """The cells, what there is of them, and what is left to do; what the columns mean."""
    estimate = TimeEstimate(planned)
    table = Table()
    table.add_column("cell", overflow="fold")
    for heading in ("state", "requests", "prompt\ntokens", "output\ntokens", "KV blocks"):
        table.add_column(heading, justify="right")
    table.add_column("KV pools\nMiB", justify="right")
    table.add_column("time left\nmin:s", justify="right")
    for cell in planned:
        table.add_row(*map(Text, _row(cell, estimate)))
    print_all(
        stream,
        "dry run: no engine was started, nothing was written",
        table,
        *_notes(planned, estimate),
    )


def _row(cell: PlannedCell, estimate: TimeEstimate) -> Iterator[str]:
    arms = len(cell.arms)
    yield cell.cell.name
    yield _state(cell)
    yield f"{cell.requests:,} x {arms} arms"
    yield f"{cell.prompt_tokens * arms:,}"
    yield f"{cell.output_tokens * arms:,}"
    yield f"{cell.pool:,}"
    yield NOTHING if cell.pool_bytes is None else f"{cell.pool_bytes / 2**20:,.1f}"
    yield _time(estimate.seconds(cell))


def _state(cell: PlannedCell) -> str:
    if cell.ended:
        return f"{cell.state}: kept"
    return cell.state if cell.state == MISSING else f"{cell.state}: will be resumed"


def _time(seconds: float | None) -> str:
    return NOTHING if seconds is None else minutes(seconds)


def _notes(planned: Sequence[PlannedCell], estimate: TimeEstimate) -> Iterator[str]:
    states = Counter(map(_state, planned))
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    open_cells = [cell for cell in planned if not cell.ended]
    requests = sum(cell.requests * len(cell.arms) for cell in open_cells)
    tokens = sum(cell.tokens_left(arm) for cell in open_cells for arm in cell.arms)
    yield (
        f"{len(planned)} cells: {counts}; those to run have {requests:,} requests, of which "
        f"{tokens:,} prompt tokens are left"
    )
    yield "requests, prompt tokens, output tokens (at most): of all arms of a cell."
    yield (
        "KV pools: of all arms of a cell, which are there at the same time, in the type of the "
        "model or the settings."
    )
    if not estimate.cells:
        yield "time left: not known before a cell is measured."
        return
    counted = f"{estimate.cells} measured {'cell' if estimate.cells == 1 else 'cells'}"
    total = sum(estimate.seconds(cell) or 0.0 for cell in open_cells)
    yield (
        f"time left: {minutes(total)} in all, by each arm's busy seconds a prompt token in "
        f"{counted}; starts of engines are not in it."
    )

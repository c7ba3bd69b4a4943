"""A sweep, cell by cell: each is a run of its own, with its own engines."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import pandas as pd
from rich.table import Table
from rich.text import Text

from picbench.errors import ConfigError, PicBenchError
from picbench.experiments.sweep import (
    MISSING,
    ArmRates,
    MeasuredWork,
    PlannedCell,
    SweepCell,
    TimeEstimate,
    pool_bytes,
    work_of,
)
from picbench.files import check_place, write_json, write_whole
from picbench.run.job import Job, prepare
from picbench.run.progress import Progress, minutes
from picbench.run.result import arms_of, headline, print_all
from picbench.run.session import Services, execute
from picbench.store import provenance
from picbench.store.reader import Run, read_run
from picbench.store.summary import ArmSummary, labels_of
from picbench.store.writer import MANIFEST
from picbench.tables.run import arms_frame, arms_table, short_caption, warnings_of
from picbench.tables.table import NOTHING

#: What a sweep's folder is recognised by: its cells, and the settings in which they differ.
SWEEP = "sweep.json"

#: Opens the display of so many requests.
Display = Callable[[int], AbstractContextManager[Progress]]


@dataclass(frozen=True, slots=True)
class CellResult:
    """How far a cell is: the status of its run, or ``failed`` or ``missing`` where there is none.

    `reason` says why it is not complete, as far as that is known.
    """

    cell: SweepCell
    status: str
    reason: str | None
    run: Run | None

    @property
    def arms(self) -> Mapping[str, ArmSummary]:
        """The summaries of what was measured."""
        return arms_of(self.run) if self.run else {}

    @property
    def complete(self) -> bool:
        """Whether all its requests were measured, and mean something."""
        return self.status == "complete"


def open_sweep(name: str, cells: Sequence[SweepCell], folder: Path) -> None:
    """Make the folder of a sweep and say in it what its cells are.

    Raises ConfigError where it has something else in it.
    """
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    settings = {cell.name: {**cell.settings, "repeat": cell.repeat} for cell in cells}
    write_json(folder / SWEEP, {"name": name, "cells": settings})


def check_folder(folder: Path) -> None:
    """ConfigError unless the folder is absent below another, empty, or a sweep's."""
    try:
        check_place(folder)
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise _unwritable(folder, error) from error
    if taken and not (folder / SWEEP).is_file():
        raise ConfigError(
            f"`output` {folder}: exists and is not a sweep's", hint="name a new folder"
        )


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"`output` {folder}: cannot be written: {error.strerror}", hint="name another folder"
    )


class SweepRun:
    """Runs cells one after another, and knows how far all of them are.

    `display` shows a cell's progress, `say` prints a line.
    """

    def __init__(
        self,
        planned: Sequence[PlannedCell],
        services: Services,
        display: Display,
        say: Callable[[str], None],
    ) -> None:
        self._planned = planned
        self._services = services
        self._display = display
        self._say = say
        self._ended: dict[str, CellResult] = {}

    @property
    def results(self) -> list[CellResult]:
        """All cells, in the grid's order; those that were not run by now as they are on disk."""
        cells = (plan.cell for plan in self._planned)
        return [self._ended.get(cell.name) or read_cell(cell) for cell in cells]

    def __iter__(self) -> Iterator[CellResult]:
        """Run the cells that have not ended, and yield every cell as it is then.

        A cell that fails does not stop the others. Whatever else stops the sweep, the cell under
        way keeps its results.
        """
        for number, plan in enumerate(self._planned, 1):
            reason = None if plan.ended else self._run(number, plan)
            result = read_cell(plan.cell, reason)
            if not result.complete:
                self._say(f"{plan.cell.name}: {result.status}: {result.reason}")
            self._ended[plan.cell.name] = result
            yield result

    def _run(self, number: int, plan: PlannedCell) -> str | None:
        """Why a cell failed; None where it ended."""
        try:
            with self._display(plan.requests * len(plan.arms)) as progress:
                progress.say(f"cell {number} of {len(self._planned)}: {plan.cell.name}")
                config = plan.cell.config
                job = prepare(config, self._services.load, self._services.memory)
                execute(job, self._services.launch, progress)
        except PicBenchError as error:
            return plan.cell.reason(error)
        for line in self._services.files(plan.cell.path):
            self._say(f"{plan.cell.name}: {line}")
        return None


def read_cell(cell: SweepCell, reason: str | None = None) -> CellResult:
    """A cell as its directory has it; `reason` is that of an error which was just raised."""
    if not (cell.path / MANIFEST).exists():
        return CellResult(cell, MISSING if reason is None else "failed", reason, None)
    run = read_run(cell.path)
    status = run.manifest["status"]
    if status == "partial":
        arms = run.summary.values()
        failed, total = sum(arm.failed for arm in arms), sum(arm.requests for arm in arms)
        reason = f"{failed} of {total} requests failed"
    return CellResult(cell, status, reason or run.manifest["reason"], run)


def sweep_line(folder: Path, results: Sequence[CellResult], exit_code: int) -> str:
    """One line of JSON about a sweep whose command ends with `exit_code`; see `status_line`."""
    cells = [
        {
            "cell": result.cell.name,
            "run": str(result.cell.path) if result.run else None,
            "status": result.status,
            "reason": result.reason,
            "arms": {name: headline(arm) for name, arm in result.arms.items()},
        }
        for result in results
    ]
    return json.dumps({"sweep": str(folder), "exit_code": exit_code, "cells": cells})


#: The latest runs that are looked at.
_LATEST = 20

#: Settings with which an arm is faster or slower.
_DECISIVE = ("model", "dtype", "device", "tensor_parallel", "eager", "concurrency")


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """Tokens of all arms and repeats, bytes of all pools, and seconds of all arms together.

    `output_tokens` are those of replies as long as they may be. Seconds are None without one of
    `runs`, earlier ones of the same model and settings on the same hardware; bytes where the
    model's configuration does not tell them. Starts of engines are not in the seconds.
    """

    prompt_tokens: int
    output_tokens: int
    pool_bytes: int | None
    seconds: float | None
    runs: int


def estimate_run(job: Job, runs: Path) -> RunEstimate:
    """Estimate a job from its requests and from the runs below `runs`."""
    samples, times = job.workload.samples, job.config.repeats
    prompt = times * sum(sample.prompt_tokens for sample in samples)
    output = times * sum(sample.max_tokens for sample in samples)
    earlier = list(islice(_alike(job, runs), _LATEST))
    rates = ArmRates(earlier)
    return RunEstimate(
        prompt_tokens=prompt * len(job.arms),
        output_tokens=output * len(job.arms),
        pool_bytes=pool_bytes(job),
        seconds=sum(prompt * rates.of(arm.name) for arm in job.arms) if rates.known else None,
        runs=len(earlier),
    )


def _alike(job: Job, folder: Path) -> Iterator[Mapping[str, MeasuredWork]]:
    """What arms did in runs that are comparable in speed, the latest first."""
    here = provenance.collect()
    for manifest in sorted(folder.glob(f"*/{MANIFEST}"), reverse=True):
        try:
            run = read_run(manifest.parent)
            if _same(job, run, here):
                yield work_of(run)
        except (PicBenchError, KeyError):  # A run that cannot be read tells nothing.
            continue


def _same(job: Job, run: Run, here: Mapping[str, Any]) -> bool:
    config, known = job.config.model_dump(), run.manifest["config"]
    then = run.manifest["provenance"]
    return (
        run.manifest["status"] == "complete"
        and (then["cpu"]["model"], then["gpus"]) == (here["cpu"]["model"], here["gpus"])
        and all(known[name] == config[name] for name in _DECISIVE)
    )


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


CSV = "sweep.csv"
MARKDOWN = "sweep.md"


@dataclass(frozen=True, slots=True)
class SweepTable:
    """The results of a sweep's cells, in the grid's order."""

    name: str
    results: Sequence[CellResult]

    def write(self, folder: Path) -> None:
        """Write both files; readers find the old ones or the new ones."""
        write_whole(folder / CSV, sweep_frame(self.results).to_csv(index=False).encode())
        write_whole(folder / MARKDOWN, self.markdown().encode())

    def markdown(self) -> str:
        """What the cells differ in and the columns of a run's table; then what is not complete."""
        measured = [result.run for result in self.results if result.run and result.arms]
        blocks = [
            self._caption(),
            *dict.fromkeys(map(short_caption, measured)),
            self._table(),
            *(f"{r.cell.name}: {r.status}: {r.reason}" for r in self.results if not r.complete),
            *warnings_of(measured),
        ]
        return "\n\n".join(blocks) + "\n"

    def _caption(self) -> str:
        states = Counter(result.status for result in self.results)
        counts = ", ".join(f"{count} {status}" for status, count in states.items())
        return f"Sweep {self.name}: {len(self.results)} cells, {counts}."

    def _table(self) -> str:
        axes = self._axes()
        rows = [
            ([*(_cell_text(_axis(result, axis)) for axis in axes), label], result.arms[name])
            for result in self.results
            for name, label in labels_of(result.arms).items()
        ]
        return arms_table(rows, [*axes, "arm"]).markdown(right=len(axes) + 1, plain=True)

    def _axes(self) -> list[str]:
        """What cells differ in."""
        repeated = any(result.cell.repeat > 1 for result in self.results)
        return [*self.results[0].cell.settings, *(["repeat"] if repeated else [])]


def sweep_frame(results: Sequence[CellResult]) -> pd.DataFrame:
    """A row for each cell and arm, one for a cell that has none.

    The cell, its values of the grid as ``grid_kv_blocks``, its status, then the arm and all numbers
    of its summary; empty where there is none.
    """
    rows = [row for result in results for row in _rows(result)]
    return pd.DataFrame(rows).convert_dtypes()


def _rows(result: CellResult) -> Iterator[dict[str, Any]]:
    head = {
        "cell": result.cell.name,
        **{f"grid_{name}": value for name, value in result.cell.settings.items()},
        "repeat": result.cell.repeat,
        "status": result.status,
        "reason": result.reason,
    }
    if result.run is None or not result.arms:
        yield head | {"arm": None}
        return
    for row in arms_frame(result.run).to_dict("records"):
        yield head | {str(name): value for name, value in row.items()}


def _axis(result: CellResult, axis: str) -> Any:
    return result.cell.repeat if axis == "repeat" else result.cell.settings[axis]


def _cell_text(value: Any) -> str:
    return NOTHING if value is None else str(value).replace("|", "\\|")

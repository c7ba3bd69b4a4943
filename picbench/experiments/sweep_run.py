"""A sweep, cell by cell: each is a run of its own, with its own engines."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

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
    work_of_arm,
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
from picbench.tables.table import NOTHING, Column, Shown, Table, Value

#: What a sweep's folder is recognised by, with its cells and their settings; and its tables.
SWEEP, CSV, MARKDOWN = "sweep.json", "sweep.csv", "sweep.md"

#: Of earlier runs, the latest that are looked at, and settings that make an arm faster or slower.
_LATEST = 20
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
    _, prompt, output = work_of_arm(job)
    rates = ArmRates(itertools.islice(_alike(job, runs), _LATEST))
    seconds = sum(prompt * rates.of(arm.name) for arm in job.arms) if rates.known else None
    arms = len(job.arms)
    return RunEstimate(prompt * arms, output * arms, pool_bytes(job), seconds, rates.known)


def _alike(job: Job, folder: Path) -> Iterator[Mapping[str, MeasuredWork]]:
    """What arms did in runs that are comparable in speed, the latest first."""
    here, config = provenance.collect(), job.config.model_dump()
    for manifest in sorted(folder.glob(f"*/{MANIFEST}"), reverse=True):
        try:
            run = read_run(manifest.parent)
            then, known = run.manifest["provenance"], run.manifest["config"]
            if (
                run.manifest["status"] == "complete"
                and (then["cpu"]["model"], then["gpus"]) == (here["cpu"]["model"], here["gpus"])
                and all(known[name] == config[name] for name in _DECISIVE)
            ):
                yield work_of(run)
        except (PicBenchError, KeyError):  # A run that cannot be read tells nothing.
            continue


def print_sweep_plan(planned: Sequence[PlannedCell], stream: TextIO) -> None:
    """The cells, what there is of them, and what is left to do; what the columns mean."""
    estimate = TimeEstimate(planned)
    rows: list[list[Value]] = []
    for cell in planned:
        arms, seconds = len(cell.arms), estimate.seconds(cell)
        pools = None if cell.pool_bytes is None else cell.pool_bytes / 2**20
        left = None if seconds is None else Shown(minutes(seconds), seconds)
        tokens = (cell.prompt_tokens * arms, cell.output_tokens * arms)
        requests = f"{cell.requests:,} x {arms} arms"
        rows.append([cell.cell.name, cell.fate, requests, *tokens, cell.pool, pools, left])
    head = (
        *("cell", "state", "requests", "prompt\ntokens", "output\ntokens", "KV blocks"),
        *("KV pools\nMiB", "time left\nmin:s"),
    )
    table = Table("Cells", [*map(Column, head)], rows)
    said = "dry run: no engine was started, nothing was written"
    print_all(stream, said, table, *_plan_notes(planned, estimate))


def _plan_notes(planned: Sequence[PlannedCell], estimate: TimeEstimate) -> Iterator[str]:
    states = Counter(cell.fate for cell in planned)
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


def open_sweep(name: str, cells: Sequence[SweepCell], folder: Path) -> None:
    """Make the folder of a sweep and say in it what its cells are.

    Raises ConfigError where it has something else in it.
    """
    check_folder(folder)
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    settings = {cell.name: {**cell.settings, "repeat": cell.repeat} for cell in cells}
    write_json(folder / SWEEP, {"name": name, "cells": settings})


def check_folder(folder: Path) -> None:
    """ConfigError unless the folder is absent below another, empty, or a sweep's."""
    with _writable(folder):
        check_place(folder)
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken and not (folder / SWEEP).is_file():
        raise ConfigError(
            f"`output` {folder}: exists and is not a sweep's", hint="name a new folder"
        )


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"`output` {folder}: cannot be written: {error.strerror}"
        raise ConfigError(message, hint="name another folder") from error


class SweepRun:
    """Runs cells one after another, and knows how far all of them are.

    `display` shows the progress of so many requests, `say` prints a line.
    """

    def __init__(
        self,
        planned: Sequence[PlannedCell],
        services: Services,
        display: Callable[[int], AbstractContextManager[Progress]],
        say: Callable[[str], None],
    ) -> None:
        self._planned, self._services = planned, services
        self._display, self._say = display, say
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
                job = prepare(plan.cell.config, self._services.load, self._services.memory)
                execute(job, self._services.launch, progress)
        except PicBenchError as error:
            return plan.cell.reason(error)
        for line in self._services.files(plan.cell.path):
            self._say(f"{plan.cell.name}: {line}")
        return None


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


def write_sweep(name: str, results: Sequence[CellResult], folder: Path) -> None:
    """Write the tables of a sweep's cells; readers find the old ones or the new ones."""
    write_whole(folder / CSV, sweep_frame(results).to_csv(index=False).encode())
    write_whole(folder / MARKDOWN, sweep_markdown(name, results).encode())


def sweep_markdown(name: str, results: Sequence[CellResult]) -> str:
    """What the cells differ in and the columns of a run's table; then what is not complete."""
    measured = [result.run for result in results if result.run and result.arms]
    states = Counter(result.status for result in results)
    counts = ", ".join(f"{count} {status}" for status, count in states.items())
    axes = [*results[0].cell.settings]
    if any(result.cell.repeat > 1 for result in results):
        axes.append("repeat")
    rows = [
        ([*(_at(result.cell, axis) for axis in axes), label], result.arms[name])
        for result in results
        for name, label in labels_of(result.arms).items()
    ]
    blocks = [
        f"Sweep {name}: {len(results)} cells, {counts}.",
        *dict.fromkeys(map(short_caption, measured)),
        arms_table(rows, [*axes, "arm"]).markdown(right=len(axes) + 1, plain=True),
        *(f"{r.cell.name}: {r.status}: {r.reason}" for r in results if not r.complete),
        *warnings_of(measured),
    ]
    return "\n\n".join(blocks) + "\n"


def _at(cell: SweepCell, axis: str) -> str:
    value = cell.repeat if axis == "repeat" else cell.settings[axis]
    return NOTHING if value is None else str(value)


def sweep_frame(results: Sequence[CellResult]) -> pd.DataFrame:
    """A row for each cell and arm, one for a cell that has none.

    The cell, its values of the grid as ``grid_kv_blocks``, its status, then the arm and all numbers
    of its summary; empty where there is none.
    """
    rows: list[dict[str, Any]] = []
    for result in results:
        head = {
            "cell": result.cell.name,
            **{f"grid_{name}": value for name, value in result.cell.settings.items()},
            "repeat": result.cell.repeat,
            "status": result.status,
            "reason": result.reason,
        }
        measured = result.run is not None and result.arms
        found = arms_frame(result.run).to_dict("records") if measured else [{"arm": None}]
        rows += ({**head, **row} for row in found)
    return pd.DataFrame(rows).convert_dtypes()

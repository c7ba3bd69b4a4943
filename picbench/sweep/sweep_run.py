"""A sweep, cell by cell: each is a run of its own, with its own engines."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from picbench.errors import ConfigError, PicBenchError
from picbench.output.json_file import write_json
from picbench.output.run_directory import MANIFEST
from picbench.output.run_reader import Run, read_run
from picbench.output.store.overview import arms_of
from picbench.output.store.status_line import headline
from picbench.output.summary import ArmSummary
from picbench.run.job import prepare
from picbench.run.progress import Progress
from picbench.run.session import Services, execute
from picbench.sweep.sweep_cell import SweepCell
from picbench.sweep.sweep_plan import MISSING, PlannedCell
from picbench.whole_files import check_place

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

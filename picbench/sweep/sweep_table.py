"""sweep.csv and sweep.md: all cells of a sweep in one table, a row for each cell and arm."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from picbench.output import markdown
from picbench.output.summary import labels_of
from picbench.output.tables.arm_columns import NOTHING, arm_columns
from picbench.output.tables.frames import arms_frame
from picbench.output.tables.table_formats import plain, short_caption, warnings_of
from picbench.sweep.sweep_run import CellResult
from picbench.whole_files import write_whole

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
        arms = [
            (result, label, result.arms[name])
            for result in self.results
            for name, label in labels_of(result.arms).items()
        ]
        metrics = dict.fromkeys(arm.score.metric for _, _, arm in arms)
        columns = arm_columns([arm for _, _, arm in arms], "/".join(metrics))
        axes = self._axes()
        head = [*axes, "arm", *(column.title for column in columns)]
        rows = [
            [
                *(_cell_text(_axis(result, axis)) for axis in axes),
                label,
                *(plain(column.value(arm), column.digits) for column in columns),
            ]
            for result, label, arm in arms
        ]
        return markdown.table(head, rows, right=len(axes) + 1)

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

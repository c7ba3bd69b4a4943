"""A table that is written as Markdown, CSV and JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from picbench.output import markdown
from picbench.whole_files import write_whole

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class MeanCell:
    """A mean and its deviation, None of a single value; `digits` are shown in Markdown."""

    mean: float
    deviation: float | None = None
    digits: int = 2


Cell = str | float | int | MeanCell | None


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table: `name` for files, `title` above it, `notes` below.

    Cells are numbers, means, text, or None where nothing was measured.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    def frame(self) -> "pd.DataFrame":
        """The cells as they are; a column of means has its deviations in one more, ``... sd``."""
        import pandas as pd

        columns = {
            name: values
            for index, column in enumerate(self.columns)
            for name, values in _numbers(column, [row[index] for row in self._checked()])
        }
        # Counts beside which some are missing would become fractions.
        return pd.DataFrame(
            {
                name: pd.Series(values, dtype="Int64" if _are_counts(values) else None)
                for name, values in columns.items()
            }
        )

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [
            f"### {self.title}",
            "",
            markdown.table(self.columns, [[_text(cell) for cell in row] for row in self.rows]),
            "",
            *(f"{note}  " for note in self.notes),
        ]
        return "\n".join(lines).rstrip() + "\n"

    def write(self, folder: Path) -> None:
        """Write ``name.md``, and ``name.csv`` and ``name.json`` with the frame's numbers."""
        folder.mkdir(parents=True, exist_ok=True)
        base = folder / self.name
        frame = self.frame()
        write_whole(base.with_suffix(".md"), self.markdown().encode())
        write_whole(base.with_suffix(".csv"), frame.to_csv(index=False).encode())
        content = {
            "title": self.title,
            "rows": json.loads(frame.to_json(orient="records", double_precision=15)),
            "notes": list(self.notes),
        }
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        write_whole(base.with_suffix(".json"), text.encode())

    def _checked(self) -> Sequence[Sequence[Cell]]:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a row of {self.name} has not {len(self.columns)} cells")
        return self.rows


def _numbers(column: str, cells: Sequence[Cell]) -> Iterator[tuple[str, list[Cell]]]:
    """A column for a frame, and one of deviations where its cells have any."""
    yield column, [cell.mean if isinstance(cell, MeanCell) else cell for cell in cells]
    if any(isinstance(cell, MeanCell) for cell in cells):
        yield (
            f"{column} sd",
            [cell.deviation if isinstance(cell, MeanCell) else None for cell in cells],
        )


def _are_counts(values: Sequence[Cell]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, int) for value in known)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, MeanCell):
        text = f"{cell.mean:,.{cell.digits}f}"
        return text if cell.deviation is None else f"{text} ± {cell.deviation:,.{cell.digits}f}"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if cell.is_integer() else f"{cell:,.2f}"
    return str(cell)

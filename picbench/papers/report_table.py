"""A table that is written as Markdown, CSV and JSON."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from picbench.output import markdown

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table: `name` for files, `title` above it, `notes` below.

    Cells are numbers, text, or None where nothing was measured.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

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
        """Write ``name.md``, ``name.csv`` and ``name.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        base = folder / self.name
        base.with_suffix(".md").write_text(self.markdown(), encoding="utf-8")
        with base.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self.columns, *self.rows])
        content = {
            "title": self.title,
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "notes": list(self.notes),
        }
        base.with_suffix(".json").write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if cell.is_integer() else f"{cell:,.2f}"
    return str(cell)

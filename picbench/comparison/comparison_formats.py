"""The formats of a comparison: text, JSON, Markdown."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from picbench.comparison.arm_comparison import ArmComparison
from picbench.comparison.comparison_rows import (
    TextTable,
    arm_notes,
    counter_table,
    flip_table,
    heading,
    metric_table,
    quantile_table,
    run_notes,
)
from picbench.comparison.run_comparison import RunComparison
from picbench.output.markdown import table as markdown_table
from picbench.output.result_table import WIDTH

#: Of the JSON document; it changes when a field goes or changes its meaning.
SCHEMA = 1


def comparison_document(comparison: RunComparison) -> dict[str, Any]:
    """The comparison as JSON values, with every flipped sample."""
    return {"schema": SCHEMA, **asdict(comparison)}


def comparison_json(comparison: RunComparison) -> str:
    """The document on one line."""
    return json.dumps(comparison_document(comparison), allow_nan=False)


def comparison_markdown(comparison: RunComparison) -> str:
    """Headings, tables and notes in Markdown."""
    return "\n\n".join(_markdown(comparison)) + "\n"


def comparison_text(comparison: RunComparison, width: int = WIDTH) -> str:
    """Tables and notes for a terminal."""
    console = Console(width=width, highlight=False, no_color=True)
    with console.capture() as captured:
        for part in _text(comparison):
            console.print(part, markup=False)
    return captured.get()


#: By the name that users give.
FORMATS: Mapping[str, Callable[[RunComparison], str]] = {
    "text": comparison_text,
    "json": comparison_json,
    "markdown": comparison_markdown,
    "github": comparison_markdown,
}


def _markdown(comparison: RunComparison) -> Iterator[str]:
    yield f"## {comparison.after} against {comparison.before}"
    for arm in comparison.arms:
        yield f"### {heading(comparison, arm)}"
        for table in _tables(comparison, arm):
            cells = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
            yield markdown_table(table.head, cells, right=1)
        yield from arm_notes(comparison, arm)
    yield "\n".join(f"- {note}" for note in run_notes(comparison))


def _text(comparison: RunComparison) -> Iterator[str | Text | Table]:
    if comparison.before != comparison.after:
        yield f"before: {comparison.before}\nafter:  {comparison.after}"
    for arm in comparison.arms:
        yield f"\n{heading(comparison, arm)}"
        for table in _tables(comparison, arm):
            yield _rich(table)
        yield from arm_notes(comparison, arm)
    yield ""
    yield from run_notes(comparison)


def _tables(comparison: RunComparison, arm: ArmComparison) -> Iterator[TextTable]:
    tables = (
        metric_table(comparison, arm),
        quantile_table(arm),
        counter_table(arm),
        flip_table(arm),
    )
    for table in tables:
        if table.rows:
            yield table


def _rich(table: TextTable) -> Table:
    found = Table()
    found.add_column(table.head[0], no_wrap=True)
    for name in table.head[1:]:
        found.add_column(name, justify="right")
    for row in table.rows:
        found.add_row(*(Text(cell) for cell in row))
    return found

"""Tables in Markdown."""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from picbench.metrics import arm_columns
from picbench.store.summary import ArmSummary, labels_of


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int | None = None) -> str:
    """A table with a line for each row; columns from number `right` on are aligned to the right."""
    left = len(head) if right is None else right
    rule = ["---" if column < left else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


class PipedConsole(Console):
    """A console that raises BrokenPipeError where its reader went away.

    rich itself then exits with 1, which for picbench is a regression.
    """

    def on_broken_pipe(self) -> None:
        """See `Console`."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


#: Names of arms are folded to lines of so many characters. No fewer, or "(simulated)" would be cut.
_NAME = len("(simulated)")

#: Longer than any line.
_UNLIMITED = 10_000


@dataclass(frozen=True, slots=True)
class ArmTable:
    """An arm a row; where lines are too short for that, an arm a column, as many as fit.

    Names are folded, and numbers are not: a number that is cut is another number. Arms in an open
    loop have columns of their own.
    """

    arms: Mapping[str, ArmSummary]
    metric: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich's Console Protocol."""

        def fits(table: Table) -> bool:
            unlimited = options.update(max_width=_UNLIMITED)
            return Measurement.get(console, unlimited, table).maximum <= options.max_width

        if fits(self._rows(folded=True)):
            yield self._rows()
            return
        left = list(self.arms)
        while left:
            counts = range(len(left), 1, -1)
            count = next((n for n in counts if fits(self._columns(left[:n], folded=True))), 1)
            yield self._columns(left[:count])
            left = left[count:]

    def _rows(self, *, folded: bool = False) -> Table:
        table = Table()
        table.add_column("arm", overflow="fold", max_width=_NAME if folded else None)
        columns = arm_columns(self.arms.values(), self.metric)
        for column in columns:
            table.add_column(column.heading, justify="right", no_wrap=True)
        labels = labels_of(self.arms)
        for name, arm in self.arms.items():
            cells = (labels[name], *(column.text(arm) for column in columns))
            table.add_row(*map(Text, cells))
        return table

    def _columns(self, names: Sequence[str], *, folded: bool = False) -> Table:
        columns, labels = arm_columns(self.arms.values(), self.metric), labels_of(self.arms)
        table = Table()
        table.add_column("arm", no_wrap=True)
        for name in names:
            width = max(_NAME, *(len(column.text(self.arms[name])) for column in columns))
            heading = Text(labels[name], overflow="fold")
            table.add_column(heading, justify="right", max_width=width if folded else None)
        for column in columns:
            texts = [column.text(self.arms[name]) for name in names]
            cells = (Text(text, no_wrap=True, overflow="ellipsis") for text in texts)
            table.add_row(column.title, *cells)
        return table

"""One table: its columns, its rows and its notes, for a terminal, a page and files."""

import errno
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from picbench.files import write_whole

if TYPE_CHECKING:
    import pandas as pd

#: What stands where nothing was measured.
NOTHING = "-"

#: Names of rows are folded to lines of so many characters. No fewer, or "(simulated)" would be cut.
_NAME = len("(simulated)")

#: Characters of a line where there is no terminal.
WIDTH = 140

_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int) -> str:
    """A bar for a share of `width` characters, to an eighth of one."""
    eighths = round(8 * width * share)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


@dataclass(frozen=True, slots=True)
class Shown:
    """A value as it is shown, and the number that tables are sorted by and files have.

    `deviation` is the standard deviation of a mean; files have it in a column of its own.
    """

    text: str
    number: float | None = None
    deviation: float | None = None


#: A value of a table; None where nothing was measured.
Value = Shown | str | float | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, with line breaks for terminals, and the digits of its numbers.

    Without `digits` whole numbers are shown as they are, others with one digit. `unit` is part of
    the title where values stand without it.
    """

    heading: str
    digits: int | None = None
    unit: str = ""

    @property
    def title(self) -> str:
        """The heading on one line, with the unit."""
        return " ".join(self.heading.split()) + self.unit

    def text(self, value: Value) -> str:
        """A value as it is shown, with commas between thousands; a dash for None."""
        if value is None:
            return NOTHING
        if isinstance(value, Shown):
            return value.text
        return value if isinstance(value, str) else f"{value:,.{self._digits(value)}f}"

    def plain(self, value: Value) -> str:
        """A value for programs: a number without commas and units, a dash for None."""
        found = number_of(value)
        if found is None:
            return NOTHING if value is None else self.text(value)
        return f"{found:.{self._digits(found)}f}"

    def _digits(self, value: float) -> int:
        if self.digits is not None:
            return self.digits
        return 0 if isinstance(value, int) else 1


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns, the first of which names the row; `notes` stand below.

    `name` is that of its files. Raises ValueError if a row has more or fewer values than columns.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a row of {self.title!r} has not {len(self.columns)} values")

    @property
    def head(self) -> list[str]:
        """The titles of the columns."""
        return [column.title for column in self.columns]

    @property
    def numeric(self) -> list[bool]:
        """Which columns have numbers, and are aligned to the right."""
        numbers = [[number_of(value) is not None for value in row] for row in self.rows]
        return [any(row[index] for row in numbers) for index in range(len(self.columns))]

    def texts(self, *, plain: bool = False) -> list[list[str]]:
        """The values as they are shown, or `plain` ones for programs."""
        shown = [column.plain if plain else column.text for column in self.columns]
        return [[text(v) for text, v in zip(shown, row, strict=True)] for row in self.rows]

    def markdown(self, *, right: int | None = None, plain: bool = False) -> str:
        """The table in Markdown, without title and notes, values as shown or `plain`.

        A value may have bars in it. See `table` for `right`.
        """
        rows = [[text.replace("|", "\\|") for text in row] for row in self.texts(plain=plain)]
        return table(self.head, rows, right)

    def section(self, level: int = 3) -> str:
        """The table in Markdown under its title, with its notes, a line each."""
        notes = "".join(f"{note}  \n" for note in self.notes)
        return f"{'#' * level} {self.title}\n\n{self.markdown()}\n\n{notes}".rstrip() + "\n"

    def frame(self) -> "pd.DataFrame":
        """The values as numbers and texts; a mean's deviation has a column ``... sd``."""
        import pandas as pd

        columns: dict[str, list[str | float | None]] = {}
        for index, title in enumerate(self.head):
            values = [row[index] for row in self.rows]
            shown = [value for value in values if isinstance(value, Shown)]
            columns[title] = [_bare(value) for value in values]
            if any(value.deviation is not None for value in shown):
                columns[f"{title} sd"] = [getattr(value, "deviation", None) for value in values]
        return pd.DataFrame({title: _series(values) for title, values in columns.items()})

    def csv(self) -> str:
        """The frame as CSV."""
        return str(self.frame().to_csv(index=False))

    def latex(self) -> str:
        """A LaTeX ``tabular`` with rules of booktabs."""
        import pandas as pd

        aligned = "".join("r" if numbers else "l" for numbers in self.numeric)
        frame = pd.DataFrame(self.texts(plain=True), columns=self.head)
        return str(frame.to_latex(index=False, escape=True, column_format=aligned))

    def document(self) -> dict[str, Any]:
        """Title, rows by column and notes, as JSON values."""
        rows = json.loads(self.frame().to_json(orient="records", double_precision=15))
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}

    def write(self, folder: Path) -> None:
        """Write ``name.md``, ``name.csv`` and ``name.json``."""
        document = json.dumps(self.document(), indent=2, ensure_ascii=False) + "\n"
        for suffix, text in (("md", self.section()), ("csv", self.csv()), ("json", document)):
            write_whole(folder / f"{self.name}.{suffix}", text.encode())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A line for each row; where lines are too short for that, a column for each.

        Names are folded, and numbers are not: a number that is cut is another number. See rich's
        Console Protocol.
        """

        def fits(drawn: RichTable) -> bool:
            unlimited = options.update(max_width=10_000)
            return Measurement.get(console, unlimited, drawn).maximum <= options.max_width

        if fits(self._lines(folded=True)):
            yield self._lines()
            return
        left = self.texts()
        while left:
            counts = range(len(left), 1, -1)
            count = next((n for n in counts if fits(self._turned(left[:n], folded=True))), 1)
            yield self._turned(left[:count])
            left = left[count:]

    def _lines(self, *, folded: bool = False) -> RichTable:
        first, *others = self.columns
        drawn = RichTable()
        drawn.add_column(first.heading, overflow="fold", max_width=_NAME if folded else None)
        for column in others:
            drawn.add_column(column.heading, justify="right", no_wrap=True)
        for row in self.texts():
            drawn.add_row(*map(Text, row))
        return drawn

    def _turned(self, rows: Sequence[Sequence[str]], *, folded: bool = False) -> RichTable:
        drawn = RichTable()
        drawn.add_column(self.columns[0].title, no_wrap=True)
        for name, *values in rows:
            width = max(_NAME, *map(len, values)) if folded else None
            drawn.add_column(Text(name, overflow="fold"), justify="right", max_width=width)
        for title, *values in zip(self.head[1:], *(row[1:] for row in rows), strict=True):
            texts = (Text(value, no_wrap=True, overflow="ellipsis") for value in values)
            drawn.add_row(title, *texts)
        return drawn


def number_of(value: Value) -> float | None:
    """The number of a value, if it has one."""
    if isinstance(value, Shown):
        return value.number
    return None if isinstance(value, str) else value


def _bare(value: Value) -> str | float | None:
    """What files have of a value."""
    if isinstance(value, Shown):
        return value.text if value.number is None else value.number
    return value


def _series(values: Sequence[str | float | None]) -> "pd.Series[Any]":
    """Whole numbers stay whole beside missing ones, which would make them fractions."""
    import pandas as pd

    known = [value for value in values if value is not None]
    whole = bool(known) and all(isinstance(value, int) for value in known)
    return pd.Series(values, dtype="Int64" if whole else None)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int | None = None) -> str:
    """A table in Markdown; columns from number `right` on are aligned to the right."""
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

"""Tables as the page shows them: a text and a sort key for each cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from picbench.statistics.bootstrap import Interval

NOTHING = "-"

#: Ends of intervals of ratios are not told below this, nor above its inverse.
LEAST = 0.01


@dataclass(frozen=True, slots=True)
class HtmlCell:
    """What is shown, and the number to sort by; None sorts by the text, or last among numbers."""

    text: str
    key: float | None = None


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """A table that can be sorted by any column; the first column names the row.

    `labels` say what its numbers are not, such as measured on real rows.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[HtmlCell]]
    notes: Sequence[str] = ()
    labels: Sequence[str] = ()

    @property
    def numeric(self) -> list[bool]:
        """Which columns have numbers, and are aligned to the right."""
        return [
            any(row[column].key is not None for row in self.rows)
            for column in range(len(self.head))
        ]


def text(value: str) -> HtmlCell:
    """A cell without a number."""
    return HtmlCell(value)


def number(value: float | None, pattern: str = "{:,.1f}") -> HtmlCell:
    """A cell with a number, or with none."""
    return HtmlCell(NOTHING) if value is None else HtmlCell(pattern.format(value), float(value))


def share(count: float | None, whole: float) -> HtmlCell:
    """A count in percent of the whole."""
    return number(100 * count / whole if whole and count is not None else None, "{:.1f} %")


def with_interval(value: float | None, interval: Interval | None, pattern: str) -> HtmlCell:
    """A number with the interval of 95 % after it, where there is one."""
    cell = number(value, pattern)
    if value is None or interval is None:
        return cell
    ends = f"{pattern.format(interval.low)} to {pattern.format(interval.high)}"
    return HtmlCell(f"{cell.text} ({ends})", cell.key)


def with_ratio_interval(
    value: float | None, interval: Interval | None, words: str = ""
) -> HtmlCell:
    """A ratio of times with its interval, as `ratio_ends` writes it, and what to know of that."""
    cell = number(value, "{:.2f}x")
    if value is None or interval is None:
        return cell
    return HtmlCell(f"{cell.text} ({ratio_ends(interval)}{words})", cell.key)


def ratio_ends(interval: Interval) -> str:
    """The ends of an interval of ratios; digits far from 1, from too few rounds, say nothing."""
    low = "below 0.01" if interval.low < LEAST else f"{interval.low:.2f}"
    high = "above 100" if interval.high > 1 / LEAST else f"{interval.high:.2f}"
    return f"{low} to {high}"


def flattened(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested JSON values as dotted paths and texts; None and what is empty are left out."""
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found += flattened(value, f"{name}.")
        elif value not in (None, "", [], ()):
            items = value if isinstance(value, list | tuple) else [value]
            found.append((name, ", ".join(map(str, items))))
    return found

"""What every measurement writes: a JSON file, a page, and figures for ``summary.json``."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from picbench.files import locked, write_json, write_whole
from picbench.statistics.significance import paired_ratio
from picbench.store.provenance import write_code
from picbench.tables.table import NOTHING, table

#: Figures by arm and name, a value a round.
Found = Mapping[str, Mapping[str, Sequence[float]]]

#: A table of figures in Markdown; empty if none of them was measured.
DrawnTable = Callable[[Found], str]

#: Names of figures, each with what its column is called and the digits of its values.
Columns = Mapping[str, tuple[str, int]]

#: What a page says first of what was measured on engines; formatted with the facts.
WHERE = (
    "{model}, {dtype}: times, not answers; {gpu}, driver {driver}, vLLM {vllm}, torch {torch}, "
    "commit {commit}."
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, quartiles, smallest value and count of a sample."""

    median: float
    q25: float
    q75: float
    best: float
    n: int

    @classmethod
    def of(cls, sample: Sequence[float]) -> "Spread":
        """Summarises two values or more."""
        q25, median, q75 = statistics.quantiles(sample, n=4, method="inclusive")
        return cls(median, q25, q75, min(sample), len(sample))

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> "Spread":
        """Summarises the ratios of values of the same round."""
        return cls.of(by_round(above, below))

    def text(self, digits: int) -> str:
        """``median (quartile - quartile)``."""
        return _ends(self.median, self.q25, self.q75, digits)


def by_round(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratio of two figures in each round."""
    return [one / other for one, other in zip(above, below, strict=True)]


def spread(values: Sequence[float] | None, digits: int, *, counted: bool = False) -> str:
    """``median (lowest - highest)``, and how many if `counted`; a dash for no values."""
    if not values:
        return NOTHING
    count = f", n={len(values)}" if counted else ""
    return _ends(median(values), min(values), max(values), digits, count)


def _ends(middle: float, low: float, high: float, digits: int, more: str = "") -> str:
    return f"{middle:,.{digits}f} ({low:,.{digits}f} - {high:,.{digits}f}{more})"


def mean_ratio(after: Sequence[float], before: Sequence[float]) -> str:
    """The geometric mean of ratios, round by round, with 95 % by Student's t where it can be."""
    found = paired_ratio(before, after)
    if found.interval is None:
        return f"{found.value:.3f} (n=1)"
    low, high = found.interval.low, found.interval.high
    return f"{found.value:.3f} ({low:.3f} - {high:.3f}, n={found.pairs})"


def spreads(figures: Mapping[str, Sequence[float]], columns: Columns) -> Iterator[str]:
    """The spread of an arm's figures, column by column."""
    for name, (_, digits) in columns.items():
        yield spread(figures[name], digits)


@dataclass(frozen=True, slots=True)
class FigureTable:
    """A row for each figure and a column for each arm; `heading` stands above it.

    `rows` are what figures are called, `columns` what arms are called (none: all, as they are).
    `extra` are columns that were not measured: title, then figure, then text. A figure that no arm
    has got no row.
    """

    rows: Mapping[str, str]
    columns: Mapping[str, str] = field(default_factory=dict)
    digits: int = 1
    counted: bool = False
    heading: str = ""
    head: str = ""
    extra: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __call__(self, found: Found) -> str:
        """See `DrawnTable`."""
        arms, rows = self.columns or {arm: arm for arm in found}, []
        for name, words in self.rows.items():
            measured = [found[arm].get(name) for arm in arms]
            if any(measured):
                texts = (spread(values, self.digits, counted=self.counted) for values in measured)
                rows.append([words, *(column[name] for column in self.extra.values()), *texts])
        drawn = table((self.head, *self.extra, *arms.values()), rows, right=1)
        return paragraphs(self.heading, drawn) if rows else ""


@dataclass(frozen=True, slots=True)
class FigureRatio:
    """A figure of the summary: a median over another, and of several such pairs the largest.

    Each median is of an arm and a figure of it. `group` is where the summary keeps it.
    """

    group: str
    name: str
    pairs: Sequence[tuple[tuple[str, str], tuple[str, str]]]


def ratio_figures(ratios: Sequence[FigureRatio], found: Found) -> dict[str, dict[str, float]]:
    """Those that are measured, by group and name, as ``summary.json`` has them."""
    figures: dict[str, dict[str, float]] = {}
    for ratio in ratios:
        known = [[found[arm].get(name) for arm, name in pair] for pair in ratio.pairs]
        values = [median(a) / median(b) for a, b in known if a and b]
        if len(values) == len(known):
            figures.setdefault(ratio.group, {})[ratio.name] = max(values)
    return figures


def filled(sentences: Sequence[str], figures: Mapping[str, float]) -> Iterator[str]:
    """Sentences with figures in place of their names; those are left out that lack any."""
    for sentence in sentences:
        with suppress(KeyError):
            yield sentence.format_map(figures)


def first_lines(failures: Mapping[str, str]) -> Iterator[str]:
    """What failed, by name, and the first line of its error."""
    for name, error in failures.items():
        yield f"{name} failed: {error.splitlines()[0]}"


def paragraphs(*texts: str) -> str:
    """Texts with an empty line between them; empty ones are left out."""
    return "\n\n".join(text for text in texts if text)


def page(title: str, *texts: str) -> str:
    """A page in Markdown."""
    return paragraphs(f"# {title}", *texts) + "\n"


def save(base: Path, document: Mapping[str, Any], page: str) -> None:
    """Write ``base.json`` and ``base.md``, and beside them which code they are about."""
    write_code(base.parent, document.get("provenance", {}))
    write_json(base.with_name(f"{base.name}.json"), document)
    write_page(base, page)


def write_page(base: Path, page: str) -> None:
    """Write ``base.md``."""
    write_whole(base.with_name(f"{base.name}.md"), page.encode())


def update_summary(folder: Path, figures: Mapping[str, Any]) -> None:
    """Put figures into the folder's ``summary.json`` beside those that it has.

    Several measurements may write below one key: each replaces its own figures there.
    """
    path = folder / "summary.json"
    with locked(path):
        known = json.loads(path.read_text("utf-8")) if path.exists() else {}
        for key, value in figures.items():
            both = isinstance(value, Mapping) and isinstance(known.get(key), Mapping)
            known[key] = {**known[key], **value} if both else value
        write_json(path, known)

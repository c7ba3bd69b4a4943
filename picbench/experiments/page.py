"""What every measurement writes: a JSON file, a page, and figures for ``summary.json``."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picbench.files import locked, write_json, write_whole


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


def spread(values: Sequence[float] | None, digits: int, *, counted: bool = False) -> str:
    """``median (lowest - highest)``, and how many if `counted`; a dash for no values."""
    if not values:
        return "-"
    middle, low, high = (
        f"{number:,.{digits}f}" for number in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low} - {high}{f', n={len(values)}' if counted else ''})"


def save(base: Path, document: Mapping[str, Any], page: str) -> None:
    """Write ``base.json`` and ``base.md``."""
    base.parent.mkdir(parents=True, exist_ok=True)
    write_json(base.with_name(f"{base.name}.json"), document)
    write_whole(base.with_name(f"{base.name}.md"), page.encode())


def update_summary(folder: Path, figures: Mapping[str, Any]) -> None:
    """Put figures into the folder's ``summary.json`` beside those that it has.

    Several measurements may write below one key: each replaces its own figures there.
    """
    path = folder / "summary.json"
    with locked(path):
        known = json.loads(path.read_text("utf-8")) if path.exists() else {}
        for key, value in figures.items():
            before = known.get(key)
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                known[key] = {**before, **value}
            else:
                known[key] = value
        write_json(path, known)

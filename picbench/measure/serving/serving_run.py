"""What measurements of engines under load have in common: settings, and how one goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picbench.measure.serving.rounds_file import RoundsFound
from picbench.measure.serving.served_rounds import RoundsPlan, run_rounds
from picbench.output import provenance
from picbench.workloads import models


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRun:
    """Who serves, and for how many rounds and seconds (0: no limit)."""

    model: str
    device: str
    dtype: str
    rounds: int
    seconds: float
    output: Path
    commit: str | None = None

    def facts(self) -> dict[str, Any]:
        """What is measured, and on what."""
        found = provenance.facts(*provenance.ENGINE, device=self.device, commit=self.commit)
        return found | {"model": models.resolve(self.model).label, "dtype": self.dtype}


def measure_rounds(
    plan: RoundsPlan, write: Callable[[RoundsFound], str], say: Callable[[str], None]
) -> tuple[str, bool]:
    """Measure what is left: the page of all that is measured, and whether nothing is left.

    `write` writes the page after each cell, and returns it. It is empty before any is done.
    """

    def keep(found: RoundsFound) -> str:
        return write(found) if found.cells else ""

    found = run_rounds(plan, say, keep)
    return keep(found), plan.done(found)

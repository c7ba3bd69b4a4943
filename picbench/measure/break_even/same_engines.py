"""Cells of one file must be of engines of one kind, on one kind of machine."""

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from picbench.errors import IncomparableRuns
from picbench.grid.measured_grid import GridFacts


def refuse_other_engines(
    path: Path, there: GridFacts, here: GridFacts, may_differ: Collection[str] = ()
) -> None:
    """Raise IncomparableRuns with the first fact or version in which a file's facts are others.

    Caveats may differ, and what is named.
    """
    read, mine = _named(there), _named(here)
    for name in read | mine:
        if name not in may_differ and read.get(name) != mine.get(name):
            raise IncomparableRuns(
                f"{path}: was measured with {name} {read.get(name)}, here is {mine.get(name)}",
                hint="name another `output`",
            )


def _named(facts: GridFacts) -> dict[str, object]:
    """Versions beside all other facts."""
    found = asdict(facts)
    versions: dict[str, object] = found.pop("versions")
    del found["caveat"]
    return versions | found

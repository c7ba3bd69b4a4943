"""The files beside a run's records that are for readers: table.csv, table.md and figures."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import pandas as pd

from picbench.output.figures.run_figures import draw_memory, draw_scores, draw_ttft
from picbench.output.run_reader import Run, read_run
from picbench.output.tables.frames import ledger_frame, samples_frame
from picbench.output.tables.table_formats import as_csv, as_markdown, caption


def write_run_files(path: Path) -> Iterator[str]:
    """Write a table and figures of the run in `path`, from its records alone.

    Yields a line for each that could not be made: the run is complete without any of them.
    """
    found = _RunFrames(read_run(path))
    for name, write in _WRITERS.items():
        try:
            write(found)
        # Whatever a drawing library raises: what was measured is safe, and must be said to be.
        except Exception as error:
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            yield f"{name} was not made: {type(error).__name__}: {reason}"


class _RunFrames:
    """A run, and the frame of its samples, which two figures need."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def samples(self) -> pd.DataFrame:
        return samples_frame(self.run)

    def file(self, name: str) -> Path:
        return self.run.path / name

    @property
    def caption(self) -> str:
        return caption(self.run)


def _table(found: _RunFrames) -> None:
    found.file("table.csv").write_text(as_csv([found.run]), encoding="utf-8")
    found.file("table.md").write_text(as_markdown([found.run]), encoding="utf-8")


def _ttft(found: _RunFrames) -> None:
    draw_ttft(found.samples, found.caption, found.file("ttft"))


def _memory(found: _RunFrames) -> None:
    draw_memory(ledger_frame(found.run), found.caption, found.file("memory"))


def _scores(found: _RunFrames) -> None:
    draw_scores(found.samples, found.run.summary, found.caption, found.file("accuracy"))


_WRITERS: Mapping[str, Callable[[_RunFrames], None]] = MappingProxyType(
    {"table": _table, "ttft": _ttft, "memory": _memory, "accuracy": _scores}
)

"""The files beside a run's records that are for readers: table.csv, table.md and figures."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import pandas as pd

from picbench.output.figures.run_figures import draw_memory, draw_scores, draw_ttft
from picbench.output.run_reader import Run, read_run
from picbench.output.summary import ArmSummary
from picbench.output.tables.frames import ledger_frame, samples_frame
from picbench.output.tables.stall_lines import figure_labels
from picbench.output.tables.table_formats import as_csv, as_markdown, caption
from picbench.whole_files import FULL_DISK, write_whole


def write_run_files(path: Path) -> Iterator[str]:
    """Write a table and figures of the run in `path`, from its records alone.

    Yields a line for each that could not be made: the run is complete without any of them. Raises
    OSError for a disk that is full: with room, the same command makes them all.
    """
    found = _RunFrames(read_run(path))
    for name, write in _WRITERS.items():
        try:
            write(found)
        # Whatever a drawing library raises: what was measured is safe, and must be said to be.
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL_DISK:
                raise
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            yield f"{name} was not made: {type(error).__name__}: {reason}"


class _RunFrames:
    """A run, and the frame of its samples, which two figures need."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def samples(self) -> pd.DataFrame:
        return self._labelled(samples_frame(self.run))

    @property
    def ledger(self) -> pd.DataFrame:
        return self._labelled(ledger_frame(self.run))

    @cached_property
    def arms(self) -> Mapping[str, ArmSummary]:
        """Summaries by the labels of arms in figures."""
        labels = figure_labels(self.run.summary)
        return {labels[name]: arm for name, arm in self.run.summary.items()}

    def _labelled(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(arm=frame["arm"].replace(figure_labels(self.run.summary)))

    def file(self, name: str) -> Path:
        return self.run.path / name

    @property
    def caption(self) -> str:
        return caption(self.run)


def _table(found: _RunFrames) -> None:
    write_whole(found.file("table.csv"), as_csv([found.run]).encode())
    write_whole(found.file("table.md"), as_markdown([found.run]).encode())


def _ttft(found: _RunFrames) -> None:
    draw_ttft(found.samples, found.caption, found.file("ttft"))


def _memory(found: _RunFrames) -> None:
    stalls = {arm: summary.stalls.steps for arm, summary in found.arms.items() if summary.stalls}
    draw_memory(found.ledger, found.caption, found.file("memory"), stalls)


def _scores(found: _RunFrames) -> None:
    draw_scores(found.samples, found.arms, found.caption, found.file("accuracy"))


_WRITERS: Mapping[str, Callable[[_RunFrames], None]] = MappingProxyType(
    {"table": _table, "ttft": _ttft, "memory": _memory, "accuracy": _scores}
)

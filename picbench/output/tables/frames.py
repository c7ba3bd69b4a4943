"""Runs as frames: a row for each request, scheduler step or arm, numbers as numbers.

pandas takes most of a second to import, so this module is imported where a frame is made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from picbench.engines.ledger import IDLE
from picbench.output.run_directory import MEMORY
from picbench.output.run_reader import Run
from picbench.output.summary import ArmSummary, labels_of
from picbench.output.tables.arm_columns import ArmColumn


def samples_frame(run: Run) -> pd.DataFrame:
    """The rows of samples.jsonl; nested counts are columns such as ``tokens_prompt``."""
    return _flat(run.rows)


def ledger_frame(run: Run) -> pd.DataFrame:
    """The block ledger: arm, step, time in seconds, pool and blocks of each kind.

    `referenced` has the blocks that running requests hold.
    """
    frame = pd.read_parquet(run.path / MEMORY)
    frame["referenced"] = frame["pool"] - frame[list(IDLE)].sum(axis=1)
    return frame


def arms_frame(run: Run) -> pd.DataFrame:
    """What summary.json says of each arm; nested fields are columns such as ``ttft_ms_p50``."""
    frame = _flat(run.summary.values())
    frame.insert(0, "arm", list(run.summary))
    return frame.assign(weights=run.manifest["model"]["weights"])


def shown_frame(arms: Mapping[str, ArmSummary], columns: Sequence[ArmColumn]) -> pd.DataFrame:
    """What is shown of each arm, under the headings of the printed table."""
    values = {column.title: [column.value(arm) for arm in arms.values()] for column in columns}
    return pd.DataFrame({"arm": list(labels_of(arms).values()), **values})


def of_runs(runs: Sequence[Run], frame: Callable[[Run], pd.DataFrame]) -> pd.DataFrame:
    """The frames of several runs, one after the other, with the run's name in front."""
    return pd.concat(
        [frame(run).assign(run=_name(run.path)) for run in runs], ignore_index=True
    ).pipe(lambda whole: whole[["run", *whole.columns.drop("run")]])


def _name(path: Path) -> str:
    return path.resolve().name


def _flat(rows: Any) -> pd.DataFrame:
    """Dataclasses as rows; a field of a nested one becomes a column of its own."""
    frame = pd.json_normalize([asdict(row) for row in rows], sep="_")
    # A map without entries would be a column of its own beside those of its entries elsewhere.
    empty = [name for name in frame if frame[name].map(lambda value: isinstance(value, dict)).any()]
    return frame.drop(columns=empty)

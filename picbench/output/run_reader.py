"""A run directory, read back: rows, summary, and the block ledger as series over time."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pydantic import TypeAdapter

from picbench.engines.ledger import IDLE, KINDS
from picbench.engines.request import Hits, TokenCounts
from picbench.errors import ConfigError
from picbench.output.run_directory import MANIFEST, MEMORY, SAMPLES, SUMMARY
from picbench.output.sample_row import SampleRow
from picbench.output.summary import ArmSummary

Array = npt.NDArray[np.float64]

#: Kinds of block that running requests hold.
HELD = tuple(kind for kind in KINDS if kind not in IDLE)

_DOCUMENT = TypeAdapter(dict[str, Any])
_ARMS = TypeAdapter(dict[str, ArmSummary])


@dataclass(frozen=True, slots=True)
class Series:
    """The block ledger of one arm in one run: a value for each scheduler step.

    `time` is in seconds on the arm's own clock, `blocks` counts blocks by kind, and `pool` is how
    many there are.
    """

    time: Array
    blocks: Mapping[str, Array]
    pool: int

    @property
    def referenced(self) -> Array:
        """Blocks that running requests hold."""
        return np.asarray(self.pool - sum(self.blocks[kind] for kind in IDLE), dtype=np.float64)

    @property
    def resident(self) -> Array:
        """Blocks with KV in them, in use or idle."""
        return np.asarray(self.pool - self.blocks["free"], dtype=np.float64)

    def at_peak(self) -> dict[str, float]:
        """Blocks by kind, of the kinds that are held, when most blocks are referenced."""
        step = int(np.argmax(self.referenced))
        return {kind: float(self.blocks[kind][step]) for kind in HELD}


@dataclass(frozen=True)
class Run:
    """A run directory; everything but the manifest is read when it is first used.

    A run that was killed may have the manifest alone. What is missing raises ConfigError.
    """

    path: Path
    manifest: Mapping[str, Any]

    @cached_property
    def rows(self) -> Sequence[SampleRow]:
        """The rows of all arms, without a torn last one."""
        with _reading(self.path):
            lines = (self.path / SAMPLES).read_bytes().splitlines(keepends=True)
            return [_row(json.loads(line)) for line in lines if line.endswith(b"\n")]

    @cached_property
    def summary(self) -> Mapping[str, ArmSummary]:
        """Aggregates by arm."""
        with _reading(self.path):
            document = _DOCUMENT.validate_json((self.path / SUMMARY).read_bytes())
            return _ARMS.validate_python(document["arms"])

    @cached_property
    def ledger(self) -> Mapping[str, Series]:
        """The block ledger by arm."""
        with _reading(self.path):
            return read_series(self.path / MEMORY)


def read_run(path: Path) -> Run:
    """Read a run directory; ConfigError for what is not one."""
    with _reading(path):
        return Run(path, _DOCUMENT.validate_json((path / MANIFEST).read_bytes()))


def read_series(path: Path) -> dict[str, Series]:
    """The series of each arm in a run's memory.parquet."""
    table = pq.read_table(path)
    names = np.array(table["arm"].to_pylist())
    columns = {name: table[name].to_numpy() for name in ("time", "pool", *KINDS)}
    found: dict[str, Series] = {}
    for arm in dict.fromkeys(names):
        rows = names == arm
        blocks = {kind: columns[kind][rows] for kind in KINDS}
        found[str(arm)] = Series(columns["time"][rows], blocks, int(columns["pool"][rows][0]))
    return found


def _row(values: dict[str, Any]) -> SampleRow:
    tokens, hits = TokenCounts(**values["tokens"]), Hits(**values["hits"])
    return SampleRow(**values | {"tokens": tokens, "hits": hits})


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a run directory", hint="picbench run makes one") from error

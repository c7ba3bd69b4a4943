"""A run directory, read back."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from picbench.engines.request import Hits, TokenCounts
from picbench.errors import ConfigError
from picbench.output.ledger_series import Series, read_series
from picbench.output.run_directory import MANIFEST, MEMORY, SAMPLES, SUMMARY
from picbench.output.sample_row import SampleRow
from picbench.output.summary import ArmSummary

_DOCUMENT = TypeAdapter(dict[str, Any])
_ARMS = TypeAdapter(dict[str, ArmSummary])


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


def _row(values: dict[str, Any]) -> SampleRow:
    tokens, hits = TokenCounts(**values["tokens"]), Hits(**values["hits"])
    return SampleRow(**values | {"tokens": tokens, "hits": hits})


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a run directory", hint="picbench run makes one") from error

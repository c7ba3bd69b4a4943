"""A cell of a sweep: its name, its settings, and where in the file these are."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError, PicBenchError
from picbench.run.config import RunConfig

#: A setting in backticks, with or without a value.
_FIELD = re.compile(r"`([a-z][a-z0-9_]*)(=[^`]*)?`")

#: Longer names are cut, and end in a hash.
_LONGEST = 120

#: What stands for characters that shells and other programs read differently.
_INSTEAD = str.maketrans({",": "+", ":": "_"})


@dataclass(frozen=True, slots=True)
class Places:
    """Where in the file `path` each setting of a cell is, such as ``grid.algo[2]``."""

    path: Path
    settings: Mapping[str, str]

    def put_into(self, text: str) -> str:
        """A message with places instead of settings in backticks, where they are in the file."""
        return _FIELD.sub(self._place, text)

    def _place(self, found: re.Match[str]) -> str:
        name, value = found.groups()
        place = self.settings.get(name)
        if place is None:
            return found[0]
        return place if value is None else f"{place}: {value.removeprefix('=')}"

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put file and places into the ConfigErrors that a cell's settings raise."""
        try:
            yield
        except ConfigError as error:
            hint = self.put_into(error.hint)
            raise ConfigError(f"{self.path}: {self.put_into(error.message)}", hint=hint) from error


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One combination of a grid's values, to be measured for the `repeat`-th time, from 1.

    `settings` has these values as they may be shown, `config` all settings of the run.
    """

    name: str
    settings: Mapping[str, Any]
    repeat: int
    config: RunConfig
    places: Places

    @property
    def path(self) -> Path:
        """The run directory."""
        assert self.config.output is not None
        return Path(self.config.output)

    def reason(self, error: PicBenchError) -> str:
        """An error as the reason why the cell failed, on one line."""
        return " ".join(self.places.put_into(str(error)).split())


def cell_name(settings: Mapping[str, Any], repeat: int) -> str:
    """A name for a folder, the same whatever other cells there are and in whatever order.

    Different cells have different names: a value that cannot be written in one is told apart by a
    hash.
    """
    known = dict(sorted(settings.items()))
    texts = {name: _text(value) for name, value in known.items()}
    name = ",".join(f"{name}={text.translate(_INSTEAD)}" for name, text in texts.items())
    if repeat > 1:
        name += f",repeat={repeat}"
    plain = all(re.fullmatch(r"[A-Za-z0-9.,:=-]+", text) for text in texts.values())
    if plain and len(name) <= _LONGEST:
        return name
    digest = hashlib.sha256(json.dumps([known, repeat]).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9.,+=_-]', '-', name)[:_LONGEST]}-{digest}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

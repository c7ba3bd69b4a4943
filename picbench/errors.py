"""The errors that picbench raises, in one tree.

    PicBenchError           hint: which field or file to change
    ├── ConfigError         exit 2: a field, a file or a request is wrong
    │   └── DataError       exit 2: a row of a data set is wrong (file and line)
    ├── InvalidRun          exit 3: the run's numbers mean nothing, or would mean nothing
    ├── IncomparableRuns    exit 3: two runs did not measure the same thing
    └── EngineError         exit 4: the engine failed after some results were kept

Every package of picbench may raise from here, so nothing is imported that takes time.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import ValidationError


class PicBenchError(Exception):
    """What every error of picbench derives from.

    `message` says what is wrong and where, `hint` what to try. Both name fields in backticks, with
    or without a value (`data=hub`). The command line prints them on one line, with its flags in
    place of the fields, and exits with `exit_code`.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (an arm runs in its own), and the default protocol
        # would lose the keyword-only hint.
        return (partial(type(self), hint=self.hint), (self.message,))


class ConfigError(PicBenchError):
    """A configuration field or a request is wrong."""


class DataError(ConfigError):
    """A row of a data set is malformed; the message names file and line."""


class InvalidRun(PicBenchError):  # noqa: N818
    """A run's numbers mean nothing, or would: its engine gives wrong answers."""

    exit_code = 3


class IncomparableRuns(PicBenchError):  # noqa: N818
    """Two runs did not measure the same thing."""

    exit_code = 3


class EngineError(PicBenchError):
    """The engine failed; results that were written before are kept."""

    exit_code = 4


def check_range(name: str, value: object) -> None:
    """Raise ConfigError for numbers that are not finite, or whole from 2^31 on (seeds: 2^64)."""
    if isinstance(value, dict):
        for key, one in value.items():
            check_range(f"{name}: {key}", one)
    elif isinstance(value, list | tuple):
        for one in value:
            check_range(name, one)
    bits = 64 if name.endswith("seed") else 31
    most = float("inf") if isinstance(value, float) else 1 << bits
    if isinstance(value, int | float) and not abs(value) < most:
        raise ConfigError(f"`{name}`: '{value}' is not a number below 2^{bits}", hint="lower it")


def closest(wrong: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint: the known name nearest to `wrong`, or all of them, each with `prefix`."""
    choices = list(known)
    if near := get_close_matches(wrong, choices, n=1):
        return f"did you mean {prefix + near[0]!r}?"
    return f"there are: {', '.join(prefix + name for name in choices) or 'none'}"


def check_counts(**counts: object) -> None:
    """Raise ConfigError for a named count that is no integer of at least 1; None is not given."""
    for name, count in counts.items():
        if count is None:
            continue
        if not isinstance(count, bool) and isinstance(count, Integral) and int(count) >= 1:
            continue
        hint = f"give `{name}` as an integer, or leave it out"
        raise ConfigError(f"{name} must be at least 1, got {count!r}", hint=hint)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a value was refused: where it is in what was given, pydantic's message, and the value.

    As text it is `field.path: message`, or the message alone where all that was given is refused.
    """

    path: tuple[int | str, ...]
    message: str
    value: object

    @property
    def field(self) -> str:
        """The path with dots; empty for all that was given."""
        return ".".join(map(str, self.path))

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.path else self.message


def first_refusal(error: ValidationError, *, lower: bool = False) -> Refusal:
    """The first of what an error lists, with its message in `lower` case if asked for.

    One is enough: the next is said once it is corrected, and is often only its consequence.
    """
    first = error.errors(include_url=False)[0]
    # What pydantic puts before the message of a ValueError that a schema raises itself.
    message = first["msg"].removeprefix("Value error, ")
    return Refusal(first["loc"], message.lower() if lower else message, first["input"])

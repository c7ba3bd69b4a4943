"""Lists of integers in a request's arguments, which come from JSON."""

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

from picbench.errors import ConfigError


def rows_of_integers(given: Any, name: str, width: int, hint: str) -> Iterator[tuple[int, ...]]:
    """The rows of a list of lists of `width` integers, checked as they are read.

    So a list that is too long for its prompt costs no more than one that fits. Raises ConfigError,
    with `hint`, for anything else.
    """
    if not is_list(given):
        raise ConfigError(f"{name} are {given!r}, not a list", hint=hint)
    for index, row in enumerate(given):
        if not is_list(row) or len(row) != width or not all(map(is_integer, row)):
            raise ConfigError(f"{name}[{index}] is {row!r}", hint=hint)
        yield tuple(map(int, row))


def rows_of_flat(flat: Any, name: str, width: int, hint: str) -> list[tuple[Any, ...]]:
    """A flat list as rows of `width`. Raises ConfigError, with `hint`, if it has no whole rows."""
    if not is_list(flat) or len(flat) % width:
        number = "an even number" if width == 2 else f"a multiple of {width}"
        raise ConfigError(f"{name} needs {number} of integers", hint=hint)
    return [tuple(flat[begin : begin + width]) for begin in range(0, len(flat), width)]


def is_list(value: Any) -> bool:
    """Whether a value is a list, not text."""
    # Nearly all are one of these, and asking an abstract class takes far longer.
    if type(value) in (list, tuple):
        return True
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, not a truth value."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))

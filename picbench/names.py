"""Hints for misspelled names."""

from collections.abc import Iterable
from difflib import get_close_matches


def closest(wrong: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint: the known name nearest to `wrong`, or all of them, each with `prefix`."""
    choices = list(known)
    near = get_close_matches(wrong, choices, n=1)
    if near:
        return f"did you mean {prefix + near[0]!r}?"
    return f"there are: {', '.join(prefix + name for name in choices) or 'none'}"

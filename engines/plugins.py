"""Classes that installed packages add under an entry-point group, and hints for unknown names."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name."""
    return {point.name: point for point in entry_points(group=group)}


def suggest(name: str, known: Iterable[str], listing: str = "one of ") -> str:
    """A hint for an unknown name: the most similar known one, or a listing of all."""
    names = tuple(known)
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else listing + ", ".join(names)

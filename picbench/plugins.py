"""Installed packages: their versions, and the classes that they add under an entry-point group."""

from collections.abc import Callable, Mapping
from importlib import metadata
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from types import MappingProxyType
from typing import TypeVar

from picbench.errors import ConfigError

T = TypeVar("T")


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; raises ConfigError for a name with two meanings."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(
                f"{point.name!r} is {_origin(other)} and {_origin(point)} in the group {group}",
                hint="rename one, or uninstall its package",
            )
    return found


def describe(
    points: Mapping[str, EntryPoint], texts: Callable[[EntryPoint], tuple[str, str]]
) -> list[tuple[str, str, str]]:
    """Each entry point's name and what `texts` says of it; of one that is unusable, why."""
    rows = []
    for name, point in points.items():
        try:
            rows.append((name, *texts(point)))
        except ConfigError as error:
            rows.append((name, str(error), ""))
    return rows


def load_class(
    point: EntryPoint,
    base: type[T],
    fields: Mapping[str, type] = MappingProxyType({}),
    mistake: Callable[[type[T]], str] = lambda _: "",
) -> type[T]:
    """The class that an entry point names.

    Raises ConfigError, with the package, for what cannot be imported, for what is no subclass of
    `base` that implements all its methods, and for a class that lacks one of `fields`, with their
    types, or of which `mistake` says what is wrong ("": nothing).
    """
    where = f"it is {_origin(point)}"
    try:
        kind = point.load()
    except Exception as error:  # whatever a module of another package raises
        what = f"{point.name!r} cannot be loaded: {type(error).__name__}: {error}"
        raise ConfigError(what, hint=where) from error
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(f"{point.name!r} is no subclass of {base.__name__}", hint=where)
    if isabstract(kind):
        lacks = ", ".join(sorted(getattr(kind, "__abstractmethods__", ())))
        raise ConfigError(f"{point.name!r} lacks {lacks}", hint=where)
    missing = [f for f, wanted in fields.items() if not isinstance(getattr(kind, f, None), wanted)]
    if problem := f"its class has no `{missing[0]}`" if missing else mistake(kind):
        raise ConfigError(f"{point.name!r}: {problem}", hint=f"fix {point.value}")
    return kind


def _origin(point: EntryPoint) -> str:
    package = point.dist.name if point.dist is not None else "an unknown package"
    return f"{point.value} of {package}"

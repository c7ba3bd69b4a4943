"""The data sets, found by name through the entry points `picbench.datasets`.

A package adds one by naming its class, a `Dataset`, in that group.
"""

from importlib.metadata import EntryPoint, entry_points

from picbench.errors import ConfigError
from picbench.workloads.datasets.base import Dataset, Reading
from picbench.workloads.names import closest

__all__ = ["Dataset", "Reading", "describe", "find", "names"]

#: What a data set's class must set; the rest of `Dataset` works by itself.
_REQUIRED = ("name", "summary", "metric", "max_tokens", "template")


def names() -> list[str]:
    """Return the names of all data sets, sorted."""
    return sorted(_registered())


def describe() -> dict[str, str]:
    """Return one line about each data set, by name; of one that is unusable, why."""
    return {name: _summary(point) for name, point in sorted(_registered().items())}


def find(name: str) -> Dataset:
    """Return the data set called `name`, or raise ConfigError with the nearest name."""
    registered = _registered()
    if name not in registered:
        raise ConfigError(
            f"`dataset`: no data set is called {name!r}", hint=closest(name, registered)
        )
    return _load(registered[name])


def _summary(point: EntryPoint) -> str:
    try:
        return _load(point).summary
    except ConfigError as error:
        return str(error)


def _load(point: EntryPoint) -> Dataset:
    where = f"it is registered as {point.value}"
    try:
        made = point.load()()
    except Exception as error:  # whatever a module of another package raises
        what = f"data set {point.name!r} cannot be loaded: {type(error).__name__}: {error}"
        raise ConfigError(what, hint=where) from error
    if not isinstance(made, Dataset):
        raise ConfigError(f"data set {point.name!r} is not a Dataset", hint=where)
    lacks = [field for field in _REQUIRED if not hasattr(made, field)]
    if lacks:
        raise ConfigError(f"data set {point.name!r} has no `{lacks[0]}`", hint=where)
    if made.name != point.name:
        what = f"data set {point.name!r} has the name {made.name!r}, and needs its entry point's"
        raise ConfigError(what, hint=where)
    return made


def _registered() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group="picbench.datasets"):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(
                f"data set {point.name!r} is {other.value} and {point.value}",
                hint="rename one, or uninstall its package",
            )
    return found

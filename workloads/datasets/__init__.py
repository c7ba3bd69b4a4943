"""The data sets, found by name through the entry points `picbench.datasets`.

A package adds one by naming its class, a `Dataset`, in that group.
"""

from importlib.metadata import EntryPoint, entry_points

from picbench.errors import ConfigError
from picbench.workloads.datasets.base import Dataset, Reading
from picbench.workloads.names import closest

__all__ = ["Dataset", "Reading", "describe", "find", "names"]


def names() -> list[str]:
    """Return the names of all data sets, sorted."""
    return sorted(_registered())


def describe() -> dict[str, str]:
    """Return one line about each data set, by name."""
    return {name: _load(point).summary for name, point in sorted(_registered().items())}


def find(name: str) -> Dataset:
    """Return the data set called `name`, or raise ConfigError with the nearest name."""
    registered = _registered()
    if name not in registered:
        raise ConfigError(
            f"`dataset`: no data set is called {name!r}", hint=closest(name, registered)
        )
    return _load(registered[name])


def _load(point: EntryPoint) -> Dataset:
    where = f"it is registered as {point.value}"
    try:
        made = point.load()()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"data set {point.name!r} cannot be loaded: {error}", hint=where
        ) from error
    if not isinstance(made, Dataset):
        raise ConfigError(f"data set {point.name!r} is not a Dataset", hint=where)
    return made


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="picbench.datasets")}

"""The data sets, found by name through the entry points `picbench.datasets`.

A package adds one by naming its class, a `Dataset`, in that group.
"""

from importlib.metadata import EntryPoint
from typing import get_args

from picbench.errors import ConfigError, closest
from picbench.plugins import installed, load_class
from picbench.workloads.datasets.base import Dataset, Metric, Reading

__all__ = ["Dataset", "Reading", "describe", "find", "names"]

GROUP = "picbench.datasets"

#: What a data set's class must set; the rest of `Dataset` works by itself.
_REQUIRED = ("name", "summary", "metric", "max_tokens", "template")


def names() -> list[str]:
    """Return the names of all data sets, sorted."""
    return sorted(installed(GROUP))


def describe() -> dict[str, str]:
    """Return one line about each data set, by name; of one that is unusable, why."""
    return {name: _summary(point) for name, point in sorted(installed(GROUP).items())}


def find(name: str) -> Dataset:
    """Return the data set called `name`, or raise ConfigError with the nearest name."""
    registered = installed(GROUP)
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
    kind = load_class(point, Dataset)
    problem, known = "", get_args(Metric)
    if lacks := [field for field in _REQUIRED if not hasattr(kind, field)]:
        problem = f"its class has no `{lacks[0]}`"
    elif kind.metric not in known:
        problem = f"no metric is called {kind.metric!r} (there are: {', '.join(known)})"
    elif kind.name != point.name:
        problem = f"its class has the name {kind.name!r}, which its entry point must have, too"
    if problem:
        raise ConfigError(f"data set {point.name!r}: {problem}", hint=f"fix {point.value}")
    return kind()

"""The data sets, found by name through the entry points `picbench.datasets`.

A package adds one by naming its class, a `Dataset`, in that group.
"""

from importlib.metadata import EntryPoint
from typing import get_args

from picbench import plugins
from picbench.errors import ConfigError, closest
from picbench.plugins import installed, load_class
from picbench.workloads.datasets.base import Dataset, Metric, Reading
from picbench.workloads.prompts.template import Template

__all__ = ["Dataset", "Reading", "describe", "find", "names"]

GROUP = "picbench.datasets"

#: What a data set's class must set; the rest of `Dataset` works by itself.
_REQUIRED = {"name": str, "summary": str, "metric": str, "max_tokens": int, "template": Template}


def names() -> list[str]:
    """Return the names of all data sets, sorted."""
    return sorted(installed(GROUP))


def describe() -> dict[str, str]:
    """Return one line about each data set, by name; of one that is unusable, why."""
    rows = plugins.describe(installed(GROUP), lambda point: (_load(point).summary, ""))
    return {name: text for name, text, _ in sorted(rows)}


def find(name: str) -> Dataset:
    """Return the data set called `name`, or raise ConfigError with the nearest name."""
    registered = installed(GROUP)
    if name not in registered:
        raise ConfigError(
            f"`dataset`: no data set is called {name!r}", hint=closest(name, registered)
        )
    return _load(registered[name])()


def _load(point: EntryPoint) -> type[Dataset]:
    def mistake(kind: type[Dataset]) -> str:
        known = get_args(Metric)
        if kind.metric not in known:
            return f"no metric is called {kind.metric!r} (there are: {', '.join(known)})"
        if kind.name != point.name:
            return f"its class has the name {kind.name!r}, which its entry point must have, too"
        return ""

    return load_class(point, Dataset, _REQUIRED, mistake)

"""Algorithms by name, and their notation.

``epic:k=16:pad=paper`` is an algorithm and its options; after ``auto:`` comes another algorithm.
Any installed package can add one through
the entry-point group ``picbench.algorithms``. Those in ``picbench.controls`` are wrong on purpose:
they can be parsed, and are listed nowhere.
"""

from collections.abc import Iterable
from dataclasses import Field
from functools import cached_property, partial
from importlib.metadata import EntryPoint
from inspect import signature
from typing import Any

from picbench import plugins
from picbench.engines.algorithms.auto import Auto
from picbench.engines.algorithms.base import Algorithm, Reuse
from picbench.engines.algorithms.prefix import Reorder
from picbench.errors import ConfigError, closest
from picbench.plugins import installed, load_class

GROUP, CONTROLS = "picbench.algorithms", "picbench.controls"

#: How many specs a registry remembers: the clients of a server may send any number of them.
_REMEMBERED = 256


class Registry:
    """The algorithms that are installed at its first use; any thread may call it.

    Searching the packages takes milliseconds, so keep one to parse for every request.
    """

    def __init__(self) -> None:
        self._parsed: dict[str, Algorithm] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all algorithms, in alphabetical order: picbench's own, then others."""
        return tuple(self._points)

    def parse(self, spec: str) -> Algorithm:
        """The algorithm of ``name:option=value:...``. Raises ConfigError, with a suggestion."""
        found = self._parsed.get(spec)
        if found is None:
            found = self._parse(spec)
            if len(self._parsed) >= _REMEMBERED:
                self._parsed.clear()
            self._parsed[spec] = found
        return found

    def _parse(self, spec: str) -> Algorithm:
        name, *settings = spec.strip().split(":")
        point = self._points.get(name) or installed(CONTROLS).get(name)
        if point is None:
            raise ConfigError(f"unknown algorithm {name!r}", hint=closest(name, self.names))
        kind = _load(point)
        if issubclass(kind, Auto) and settings:
            reordered, inner = settings[0] == Reorder.name, ":".join(settings)
            inner = inner.removeprefix(Reorder.name).removeprefix(":") if reordered else inner
            chunks = (self._inner(spec, inner),) if inner else ()
            return kind(*chunks, reorders=reordered)
        values: dict[str, Any] = {}
        for setting in settings:
            option, value = _setting(kind, spec, setting)
            if option in values:
                raise ConfigError(f"{spec!r}: {option} is there twice", hint="name it once")
            values[option] = value
        return kind(**values)

    def _inner(self, spec: str, inner: str) -> Algorithm:
        """The algorithm that `spec` has after its name. Raises ConfigError for one of no chunks."""
        found = self.parse(inner)
        if found.reuse is not Reuse.CHUNKS or isinstance(found, Auto):
            raise ConfigError(
                f"{spec!r}: {inner} serves no chunks for auto to choose",
                hint="name one that compiles chunks, as in auto:mepic",
            )
        return found

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        points = sorted(installed(GROUP).items())
        return dict(sorted(points, key=lambda item: not item[1].value.startswith("picbench.")))


def names() -> tuple[str, ...]:
    """Names of all installed algorithms."""
    return Registry().names


def describe() -> list[tuple[str, str, str]]:
    """(name, summary, options) of every installed algorithm; of one that is unusable, why."""
    points = Registry()._points
    return plugins.describe(points, lambda p: (_load(p).summary, _options_text(_load(p))))


def parse(spec: str) -> Algorithm:
    """The algorithm that a spec stands for; see `Registry.parse`."""
    return Registry().parse(spec)


def temperatures(algorithms: Iterable[Algorithm]) -> tuple[float, ...]:
    """The temperatures of algorithms, but for 1."""
    return tuple(sorted({algorithm.layout().temperature for algorithm in algorithms} - {1.0}))


def check_served(algorithm: Algorithm) -> None:
    """Raise ConfigError for an algorithm that changes prompts before engines get them."""
    if algorithm.reorders:
        raise ConfigError(
            f"{algorithm.spec} puts the chunks of prompts in order before an engine gets them",
            hint=f"picbench run does that; engines serve {algorithm.served}",
        )


def _load(point: EntryPoint) -> type[Algorithm]:
    """The class of an algorithm; raises ConfigError for one that could not be named or planned."""
    fields, mistake = {"name": str, "summary": str}, partial(_mistake, point.name)
    return load_class(point, Algorithm, fields, mistake)  # type: ignore[type-abstract]


def _mistake(name: str, kind: type[Algorithm]) -> str:
    """What is wrong with a class that is registered as `name`; "" for nothing."""
    if kind.name != name:
        return f"its class has the name {kind.name!r}, which its entry point must have, too"
    if any(isinstance(value, Field) for value in vars(kind).values()):
        return "its class has options and is no dataclass: put @dataclass(frozen=True) before it"
    plain = [field.name for field in kind.options() if "choices" not in field.metadata]
    if plain:
        return f"its field {plain[0]!r} is not made by `option`, and users cannot set it"
    try:
        signature(kind.plan_chunk).bind(None, 0, 1)
    except TypeError as error:
        return f"its plan_chunk must take the index and the length of a chunk: {error}"
    return ""


def _setting(kind: type[Algorithm], spec: str, setting: str) -> tuple[str, Any]:
    key, equals, text = setting.partition("=")
    options = {option.name: option for option in kind.options()}
    if key in options and not equals:
        raise ConfigError(f"{spec!r}: option {key} of {kind.name} has no value", hint=f"{key}=...")
    if key not in options:
        hint = closest(key, tuple(options)) if options else f"{kind.name} takes no options"
        raise ConfigError(f"{spec!r}: unknown option {setting!r} of {kind.name}", hint=hint)
    return key, _value(options[key], spec, text)


def _value(option: Field[Any], spec: str, text: str) -> Any:
    choices = option.metadata["choices"]
    if isinstance(choices, tuple):
        found = next((choice for choice in choices if text == str(choice)), None)
        allowed = ", ".join(map(str, choices))
    else:
        found, allowed = choices.parse(text), str(choices)
    if found is None:
        raise ConfigError(f"{spec!r}: {option.name}={text} is not possible", hint=f"use {allowed}")
    return found


def _options_text(kind: type[Algorithm]) -> str:
    texts = []
    for option in kind.options():
        choices = option.metadata["choices"]
        values = "|".join(map(str, choices)) if isinstance(choices, tuple) else choices
        texts.append(f"{option.name}={values} (default {option.default})")
    return ", ".join(texts)

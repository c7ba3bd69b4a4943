"""A tier's spec, ``redis://host:6379/0:10GiB?ttl=1h``: its fields, and what kinds check in them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from math import inf
from types import ModuleType
from typing import NoReturn, Self
from urllib.parse import parse_qsl

from picbench.errors import ConfigError, closest

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)")
#: Up to the last @: clients take a password with one in it, or with a slash.
_SECRET = re.compile(r"//[^?]*@")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A parsed tier: ``kind:location:capacity?option=value``.

    `text` is what it was parsed from, without credentials, for messages. `capacity` is in bytes,
    `deadline` in seconds and for every call. All methods raise ConfigError for a wrong field.
    """

    kind: str
    location: str = field(default="", repr=False)  # may hold a password
    capacity: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    deadline: float = 2.0
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The spec that a text stands for; every kind has the option `deadline`."""
        head, _, query = text.partition("?")
        kind, _, place = head.partition(":")
        location, _, last = place.rpartition(":")
        capacity = parse_size(last)
        spec = cls(
            kind=kind,
            location=place if capacity is None else location,
            capacity=capacity,
            options=dict(parse_qsl(query, keep_blank_values=True)),
            text=_SECRET.sub("//***@", text),
        )
        return replace(spec, deadline=spec.seconds("deadline") or spec.deadline)

    def reject(self, problem: str, hint: str) -> NoReturn:
        """Raise ConfigError for this spec."""
        raise ConfigError(f"`tiers` {self.text or self.kind}: {problem}", hint=hint)

    def require_capacity(self) -> int:
        """The capacity in bytes, for kinds that need one."""
        if not self.capacity:
            self.reject("a capacity is missing", f"append one, as in {self.kind}:...:4GiB")
        return self.capacity

    def require_location(self, what: str, example: str) -> str:
        """The location, for kinds that need one."""
        if not self.location:
            self.reject(f"{what} is missing", f"write {example}")
        return self.location

    def refuse_location(self) -> None:
        """For kinds without a location; a malformed size ends up there, too."""
        if self.location:
            self.reject(f"{self.location!r} is not a size", f"write {self.kind}:4GiB, with a unit")

    def check_options(self, *known: str) -> None:
        """Refuse options that are not among `known`."""
        names = (*known, "deadline")
        for name in self.options:
            if name not in names:
                self.reject(f"unknown option {name!r}", closest(name, names))

    def seconds(self, name: str) -> float | None:
        """An option's value in seconds, None if it is not given."""
        if name not in self.options:
            return None
        seconds = _parse_seconds(self.options[name])
        if not seconds:
            problem = f"{name}={self.options[name]} is not a duration"
            self.reject(problem, "write 500ms, 2s, 10m or 1h")
        return seconds

    def size(self, name: str, default: int) -> int:
        """An option's value in bytes."""
        size = parse_size(self.options[name]) if name in self.options else default
        if not size:
            self.reject(f"{name}={self.options[name]} is not a size", "write 64MiB or 4GiB")
        return size

    def import_client(self, module: str) -> ModuleType:
        """The client library of a kind; it is an extra of picbench named like the kind."""
        try:
            return import_module(module)
        except ImportError as error:
            self.reject(f"{error}", f"install it with pip install 'picbench[{self.kind}]'")


def parse_size(text: str) -> int | None:
    """Bytes in ``4GiB``, ``1.5GB``, ``512B``; None for anything else, a bare number included."""
    match = _QUANTITY.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = float(match[1]) * unit if match and unit else inf
    return int(size) if size < inf else None


def _parse_seconds(text: str) -> float | None:
    match = _QUANTITY.fullmatch(text)
    unit = _SECONDS.get(match[2]) if match else None
    seconds = float(match[1]) * unit if match and unit else inf
    return seconds if seconds < inf else None

"""The interface of a tier: a store of bytes by key that may lose them at any time."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from math import inf
from types import ModuleType
from typing import Any, ClassVar, NoReturn, Self, TypeAlias
from urllib.parse import parse_qsl

import numpy as np

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
        if capacity == 0:
            spec.reject("a capacity is missing: it is 0", f"write {kind}:...:4GiB")
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
        seconds = _parse(self.options[name], _SECONDS)
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
    size = _parse(text.upper(), _UNITS)
    return None if size is None else int(size)


def _parse(text: str, units: Mapping[str, float]) -> float | None:
    match = _QUANTITY.fullmatch(text)
    unit = units.get(match[2]) if match else None
    number = float(match[1]) * unit if match and unit else inf
    return number if number < inf else None


Key: TypeAlias = bytes
Buffer: TypeAlias = bytes | bytearray | memoryview

#: What is stored under a key: one buffer, or its parts, one after the other.
Payload: TypeAlias = Buffer | Sequence[Buffer]

#: Makes writable memory of exactly so many bytes; may raise MemoryError.
Allocate: TypeAlias = Callable[[int], memoryview]


def pageable(nbytes: int) -> memoryview:
    """Ordinary memory: the allocator for hosts that nothing reads by DMA."""
    return np.empty(nbytes, np.uint8).data


#: A key that no value has.
_ASKED_FOR = b"?" * 32


class Tier(ABC):
    """Bytes by key. Methods block, may be called from any thread, and take batches.

    Keys are content hashes, so two values under one key are equal and a value never goes stale.
    A tier may drop any value at any time. It raises (OSError or its client's error) when it cannot
    answer; a missing value is an answer. `GuardedTier` adds deadlines, checksums and counters.
    """

    #: The kind's name in specs, and what users read about it.
    kind: ClassVar[str]
    summary: ClassVar[str]
    notation: ClassVar[str]

    #: Whether calls only touch this process's memory, so that they cannot hang.
    immediate: ClassVar[bool] = False

    #: Names this tier in tables and warnings; holds no credentials.
    name: str

    @classmethod  # noqa: B027
    def check(cls, spec: TierSpec) -> Any:
        """Raise ConfigError for a spec that the kind does not take, before anything is started.

        Opens and imports nothing; returns what the kind has use for. Kinds without it are checked
        when they are opened.
        """

    @classmethod
    def probe(cls, spec: TierSpec) -> None:
        """Raise ConfigError for a tier that cannot be used here and now: it is asked for a value.

        Kinds that opening changes look for what they need instead.
        """
        tier = cls.open(spec, pageable)
        try:
            tier.exists([_ASKED_FOR])
        except Exception as error:
            spec.reject(f"cannot be used: {error}", "start it, or name another tier")
        finally:
            tier.close()

    @classmethod
    @abstractmethod
    def open(cls, spec: TierSpec, allocate: Allocate) -> Self:
        """Open the tier of a spec; raises ConfigError for a spec that the kind does not take.

        A store that cannot be reached is no error: it may come back.
        """

    @abstractmethod
    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether a value is there, per key; does not count as use."""

    @abstractmethod
    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        """Keep values; False per item that was not kept: the tier is full, or the item too large.

        What is kept has been copied when this returns. A value that is there already is replaced.
        """

    @abstractmethod
    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        """The values, None per key that is not there; counts as use.

        They stay valid while the caller holds them, and must not be written to: they may be views.
        """

    @abstractmethod
    def delete(self, keys: Sequence[Key]) -> None:
        """Delete values; missing ones are no error."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections; values in shared stores stay."""

"""Checks and values of a tier spec's fields, for the kinds of tiers; all raise ConfigError."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from picbench.engines.chunk_cache.tiers.tier import TierSpec
from picbench.errors import ConfigError

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)")


def parse_size(text: str) -> int | None:
    """Bytes in ``4GiB``, ``1.5GB``, ``512B``; None for anything else, a bare number included."""
    match = _QUANTITY.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    return int(float(match[1]) * unit) if match and unit else None


def parse_seconds(text: str) -> float | None:
    """Seconds in ``500ms``, ``2s``, ``10m``, ``1h``, ``7d``; None for anything else."""
    match = _QUANTITY.fullmatch(text)
    unit = _SECONDS.get(match[2]) if match else None
    return float(match[1]) * unit if match and unit else None


def reject(spec: TierSpec, problem: str, hint: str) -> NoReturn:
    """Raise ConfigError for a spec."""
    raise ConfigError(f"`tiers` {spec.text or spec.kind}: {problem}", hint=hint)


def require_capacity(spec: TierSpec) -> int:
    """The capacity in bytes of a kind that needs one."""
    if not spec.capacity:
        reject(spec, "a capacity is missing", f"append one, as in {spec.kind}:...:4GiB")
    return spec.capacity


def require_location(spec: TierSpec, what: str, example: str) -> str:
    """The location of a kind that needs one."""
    if not spec.location:
        reject(spec, f"{what} is missing", f"write {example}")
    return spec.location


def no_location(spec: TierSpec) -> None:
    """Refuse a location, which is also where a malformed size ends up."""
    if spec.location:
        hint = f"write {spec.kind}:4GiB, with a unit"
        reject(spec, f"{spec.location!r} is not a size", hint)


def check_options(spec: TierSpec, known: Iterable[str] = ()) -> None:
    """Refuse options that are not among `known`."""
    names = [*known, "deadline"]
    for name in spec.options:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "options: " + ", ".join(names)
            reject(spec, f"unknown option {name!r}", hint)


def seconds_option(spec: TierSpec, name: str) -> float | None:
    """An option's value in seconds, None if it is not given."""
    if name not in spec.options:
        return None
    seconds = parse_seconds(spec.options[name])
    if not seconds:
        reject(spec, f"{name}={spec.options[name]} is not a duration", "write 500ms, 2s, 10m or 1h")
    return seconds


def size_option(spec: TierSpec, name: str, default: int) -> int:
    """An option's value in bytes."""
    size = parse_size(spec.options[name]) if name in spec.options else default
    if not size:
        reject(spec, f"{name}={spec.options[name]} is not a size", "write 64MiB or 4GiB")
    return size


def import_client(spec: TierSpec, module: str) -> ModuleType:
    """The client library of a kind; it is an extra of picbench named like the kind."""
    try:
        return import_module(module)
    except ImportError as error:
        reject(spec, f"{error}", f"install it with pip install 'picbench[{spec.kind}]'")

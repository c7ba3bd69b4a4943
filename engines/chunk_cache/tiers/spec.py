"""Tier specs: ``host:4GiB,disk:/path:20GiB,redis://host:6379/0:10GiB?ttl=1h``.

Tiers are listed from the nearest to the farthest, separated by commas. Each is a kind, a location
where the kind has one, a capacity with its unit, and options. Any installed package can add a kind
through the entry-point group ``picbench.tiers``: a subclass of `Tier`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from urllib.parse import parse_qsl

from picbench.engines.chunk_cache.tiers.guarded_tier import GuardedTier
from picbench.engines.chunk_cache.tiers.options import parse_size, reject, seconds_option
from picbench.engines.chunk_cache.tiers.stack import StackLimits, TierStack
from picbench.engines.chunk_cache.tiers.tier import Allocate, Tier, TierSpec, pageable
from picbench.errors import ConfigError

GROUP = "picbench.tiers"

_SECRET = re.compile(r"//[^/@]*@")


def parse_tiers(text: str) -> list[TierSpec]:
    """The tiers that a text lists, nearest first.

    Raises ConfigError for unknown kinds and what cannot be parsed. What only a kind can check
    (paths, its own options) is checked by `open_tiers`.
    """
    points = _points()
    specs = [_parse(item.strip()) for item in text.split(",") if item.strip()]
    for spec in specs:
        if spec.kind not in points:
            reject(spec, f"unknown kind {spec.kind!r}", _suggest(spec.kind, points))
    return specs


def open_tiers(
    specs: Sequence[TierSpec],
    *,
    allocate: Allocate = pageable,
    limits: StackLimits | None = None,
) -> TierStack:
    """Open the tiers of specs; `allocate` makes the memory of host tiers (pinned, for a GPU).

    Raises ConfigError for specs that a kind does not take and for a tier that is listed twice.
    """
    opened: list[GuardedTier] = []
    try:
        for spec in specs:
            opened.append(_open(spec, allocate, [tier.name for tier in opened]))
    except ConfigError:
        for tier in opened:
            tier.close()
        raise
    return TierStack(opened, limits)


def describe_tiers() -> list[tuple[str, str, str]]:
    """(name, summary, notation) of every installed kind; imports no client library."""
    kinds = [(name, _load(point)) for name, point in sorted(_points().items())]
    return [(name, kind.summary, kind.notation) for name, kind in kinds]


def _parse(text: str) -> TierSpec:
    head, _, query = text.partition("?")
    kind, _, place = head.partition(":")
    location, _, last = place.rpartition(":")
    capacity = parse_size(last)
    spec = TierSpec(
        kind=kind,
        location=place if capacity is None else location,
        capacity=capacity,
        options=dict(parse_qsl(query, keep_blank_values=True)),
        text=_SECRET.sub("//***@", text),
    )
    return replace(spec, deadline=seconds_option(spec, "deadline") or spec.deadline)


def _open(spec: TierSpec, allocate: Allocate, taken: Iterable[str]) -> GuardedTier:
    tier = _load(_points()[spec.kind]).open(spec, allocate)
    if tier.name in taken:
        tier.close()
        reject(spec, "this tier is named twice", "name each tier once, nearest first")
    return GuardedTier(tier, deadline=spec.deadline)


def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> type[Tier]:
    kind: type[Tier] = point.load()
    return kind


def _suggest(kind: str, known: Iterable[str]) -> str:
    close = get_close_matches(kind, known, n=1)
    return f"did you mean {close[0]!r}?" if close else "one of " + ", ".join(sorted(known))

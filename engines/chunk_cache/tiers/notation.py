"""The kinds of tiers, and lists of them: ``host:4GiB,disk:/path:20GiB,redis://host:6379/0``.

Tiers are listed from the nearest to the farthest, separated by commas. Each is a kind, a location
where the kind has one, a capacity with its unit, and options. Any installed package can add a kind
through the entry-point group ``picbench.tiers``: a subclass of `Tier`.
"""

from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint

from picbench.engines.chunk_cache.tiers.guarded_tier import GuardedTier
from picbench.engines.chunk_cache.tiers.stack import StackLimits, TierStack
from picbench.engines.chunk_cache.tiers.tier import Allocate, Tier, TierSpec, pageable
from picbench.engines.config import secret
from picbench.errors import ConfigError, closest
from picbench.plugins import describe, installed, load_class

GROUP = "picbench.tiers"

_TWICE = "this tier is named twice", "name each tier once, nearest first"


def parse_tiers(text: str) -> list[TierSpec]:
    """The tiers that a text lists, nearest first.

    Raises ConfigError for unknown kinds, what cannot be parsed, and what a kind does not take. What
    only opening can tell (paths, clients, tiers that are the same one) is checked by `open_tiers`.
    """
    specs = [TierSpec.parse(item.strip()) for item in text.split(",") if item.strip()]
    points = installed(GROUP) if specs else {}
    for spec in specs:
        if spec.kind not in points:
            spec.reject(f"unknown kind {spec.kind!r}", closest(spec.kind, sorted(points)))
        _load(points[spec.kind]).check(spec)
    return specs


def probe_tiers(text: str, block: int = 0) -> list[TierSpec]:
    """The tiers that a text lists. Raises ConfigError unless they can be used here and now.

    They must be reachable, writable, of a possible size with room for a `block` of KV, in bytes,
    and named once. Nothing is left there.
    """
    specs, points = parse_tiers(text), installed(GROUP)
    for place, spec in enumerate(specs):
        if (spec.kind, spec.location) in [(s.kind, s.location) for s in specs[:place]]:
            spec.reject(*_TWICE)
        if spec.capacity is not None and spec.capacity < block:
            spec.reject(f"has no room for a KV block of {block:,} bytes", "raise the capacity")
        _load(points[spec.kind]).probe(spec)
    return specs


def refuse_passwords(text: str) -> None:
    """Raise ConfigError for a password in a text that others see, in `ps` and in logs."""
    for spec in parse_tiers(text):
        if ":" in spec.location.rpartition("@")[0].lstrip("/"):
            hint = "give it in PICBENCH_REDIS_PASSWORD, or a file in PICBENCH_REDIS_PASSWORD_FILE"
            spec.reject("has a password, which others would see", hint)


def without_credentials(text: str) -> str:
    """A text that lists tiers, for messages and files that are passed on."""
    return ",".join(spec.text for spec in parse_tiers(text))


def open_tiers(
    specs: Sequence[TierSpec],
    *,
    allocate: Allocate = pageable,
    limits: StackLimits | None = None,
    taken: Iterable[str] = (),
) -> TierStack:
    """Open the tiers of specs; `allocate` makes the memory of host tiers (pinned, for a GPU).

    Values are sealed with the operator's secret ``HMAC_KEY``, if there is one. Raises ConfigError
    for what a kind does not take, and tiers listed twice or already `taken`.
    """
    own = secret("HMAC_KEY").encode()
    opened: list[GuardedTier] = []
    try:
        for spec in specs:
            opened.append(_open(spec, allocate, [*taken, *(t.name for t in opened)], own))
    except ConfigError:
        for tier in opened:
            tier.close()
        raise
    return TierStack(opened, limits, own)


def describe_tiers() -> list[tuple[str, str, str]]:
    """(name, summary, notation) of every installed kind; imports no client library."""
    points = dict(sorted(installed(GROUP).items()))
    return describe(points, lambda p: (_load(p).summary, _load(p).notation))


def _open(spec: TierSpec, allocate: Allocate, taken: Iterable[str], own: bytes) -> GuardedTier:
    tier = _load(installed(GROUP)[spec.kind]).open(spec, allocate)
    if tier.name in taken:
        tier.close()
        spec.reject(*_TWICE)
    return GuardedTier(tier, deadline=spec.deadline, secret=own)


def _load(point: EntryPoint) -> type[Tier]:
    fields = dict.fromkeys(("kind", "summary", "notation"), str)
    return load_class(point, Tier, fields)  # type: ignore[type-abstract]

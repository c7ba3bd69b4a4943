"""How fast tiers store and fetch chunks.

Every tier is alone in a stack, so that what is timed is what the engine waits for: copying and
sealing, the call with its deadline, checking. A round stores a batch of new values, waits, fetches
it, checks the bytes, and deletes it. Values are random bytes. What was just written is read back
from memory wherever the system caches it, so disk reads are not the device's.
"""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from picbench.engines.chunk_cache.tiers.kinds import open_tiers, parse_tiers
from picbench.engines.chunk_cache.tiers.stack import StackLimits, TierStack
from picbench.engines.chunk_cache.tiers.tier import TierSpec, parse_size
from picbench.errors import ConfigError, InvalidRun
from picbench.experiments.measurements import Outcome, Tiers
from picbench.files import write_json
from picbench.store import provenance
from picbench.tables.table import table

T = TypeVar("T")

#: A tier under batches of values of one size; speeds in GiB/s over the rounds.
Row = dict[str, Any]

_WAIT = 120.0
_WAYS = ("store", "fetch")


def measure(settings: Tiers) -> Outcome:
    """Time all tiers with all sizes; write JSON, if asked to.

    Raises InvalidRun if a tier does not keep or return what was stored.
    """
    rows = [
        time_tier(spec, _size(size), _size(settings.batch), settings.rounds, settings.seed)
        for spec in parse_tiers(settings.tiers)
        for size in settings.sizes.split(",")
    ]
    if settings.output is not None:
        facts = provenance.facts("machine", "cores", "load", "python")
        facts["versions"] = provenance.facts("numpy", "xxhash")
        facts |= {"seed": settings.seed, "values": "random bytes"}
        settings.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(settings.output, {"schema": 1, "provenance": facts, "rows": rows})
    return Outcome(render(rows))


def time_tier(spec: TierSpec, nbytes: int, batch: int, rounds: int, seed: int) -> Row:
    """Time one tier with values of one size, `batch` bytes at a time; the first round is dropped.

    Raises InvalidRun if the tier does not keep or return what was stored.
    """
    values = max(1, batch // nbytes)
    payloads = [np.random.default_rng((seed, i)).bytes(nbytes) for i in range(values)]
    stack = open_tiers([spec], limits=StackLimits(store_bytes=2 * batch + (64 << 20)))
    try:
        times = [_round(stack, spec, payloads, number) for number in range(rounds + 1)][1:]
    finally:
        stack.close()
    stores, fetches = (
        [values * nbytes / 2**30 / seconds for seconds in column]
        for column in zip(*times, strict=True)
    )
    row = {"tier": spec.kind, "nbytes": nbytes, "values": values, "rounds": rounds}
    return row | {"store": _speed(stores), "fetch": _speed(fetches)}


def render(rows: Sequence[Row]) -> str:
    """The rows in Markdown: medians, in brackets slowest and fastest."""
    head = ("tier", "value MiB", "batch", "n", "store GiB/s", "fetch GiB/s")
    lines = (
        (
            row["tier"],
            f"{row['nbytes'] / 2**20:g}",
            *(str(row[name]) for name in ("values", "rounds")),
            *("{median:.2f} ({slowest:.2f}-{fastest:.2f})".format(**row[way]) for way in _WAYS),
        )
        for row in rows
    )
    return table(head, lines)


def _round(
    stack: TierStack, spec: TierSpec, payloads: Sequence[bytes], number: int
) -> tuple[float, float]:
    """Seconds of storing and of fetching one batch."""
    keys = [number.to_bytes(16) + i.to_bytes(16) for i in range(len(payloads))]
    items = list(zip(keys, payloads, strict=True))
    store, kept = _timed(lambda: stack.store(items).result(_WAIT))
    fetch, found = _timed(lambda: stack.fetch([(k, len(p)) for k, p in items]).result(_WAIT))
    stack.delete(keys).result(_WAIT)
    if not all(kept) or any(f is None or f.data != p for f, p in zip(found, payloads, strict=True)):
        raise InvalidRun(
            f"{spec.text} did not keep a batch: {stack.counters()}",
            hint="give it a capacity of some batches in `tiers`, or a longer deadline",
        )
    return store, fetch


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    start = perf_counter()
    result = call()
    return perf_counter() - start, result


def _speed(speeds: Sequence[float]) -> dict[str, float]:
    return {"median": median(speeds), "slowest": min(speeds), "fastest": max(speeds)}


def _size(text: str) -> int:
    size = parse_size(text)
    if not size:
        raise ConfigError(f"`sizes` {text}: not a size", hint="write 1MiB,32MiB")
    return size

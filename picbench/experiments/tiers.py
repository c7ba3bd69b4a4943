"""How fast tiers store and fetch chunks.

Every tier is alone in a stack, so that what is timed is what the engine waits for: copying and
sealing, the call with its deadline, checking. A round stores a batch of new values, waits, fetches
it, checks the bytes, and deletes it. Values are random bytes. What was just written is read back
from memory wherever the system caches it, so disk reads are not the device's.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import numpy as np

from picbench.engines.chunk_cache.tiers.kinds import open_tiers, parse_tiers
from picbench.engines.chunk_cache.tiers.stack import StackLimits, TierStack
from picbench.engines.chunk_cache.tiers.tier import TierSpec, parse_size
from picbench.errors import ConfigError, InvalidRun
from picbench.files import write_json
from picbench.store import provenance
from picbench.tables import table as markdown

T = TypeVar("T")

_WAIT = 120.0


@dataclass(frozen=True, slots=True)
class Speed:
    """GiB/s over the rounds: median, slowest and fastest."""

    median: float
    slowest: float
    fastest: float


@dataclass(frozen=True, slots=True)
class TierSpeeds:
    """A tier under batches of `values` values of `nbytes` bytes; `rounds` is n."""

    tier: str
    nbytes: int
    values: int
    rounds: int
    store: Speed
    fetch: Speed


def measure(spec: TierSpec, nbytes: int, batch: int, rounds: int, seed: int) -> TierSpeeds:
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
    stores, fetches = zip(*times, strict=True)
    return TierSpeeds(
        tier=spec.kind,
        nbytes=nbytes,
        values=values,
        rounds=rounds,
        store=_speed(stores, values * nbytes),
        fetch=_speed(fetches, values * nbytes),
    )


def measure_all(
    tiers: str, sizes: str, batch: str, rounds: int, seed: int, output: Path | None
) -> str:
    """Measure all tiers with all sizes; write JSON to `output`, if any, and return a table."""
    rows = [
        measure(spec, _size(size), _size(batch), rounds, seed)
        for spec in parse_tiers(tiers)
        for size in sizes.split(",")
    ]
    if output is not None:
        facts = provenance.facts("machine", "cores", "load", "python")
        facts["versions"] = provenance.facts("numpy", "xxhash")
        facts |= {"seed": seed, "values": "random bytes"}
        output.parent.mkdir(parents=True, exist_ok=True)
        document = {"schema": 1, "provenance": facts, "rows": [asdict(row) for row in rows]}
        write_json(output, document)
    return table(rows)


def table(rows: Sequence[TierSpeeds]) -> str:
    """The rows in Markdown: medians, in brackets slowest and fastest."""
    head = ("tier", "value MiB", "batch", "n", "store GiB/s", "fetch GiB/s")
    return markdown.table(head, map(_cells, rows))


def _cells(row: TierSpeeds) -> list[str]:
    counts = (f"{row.nbytes / 2**20:g}", str(row.values), str(row.rounds))
    return [row.tier, *counts, _text(row.store), _text(row.fetch)]


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


def _speed(seconds: Sequence[float], nbytes: int) -> Speed:
    speeds = [nbytes / 2**30 / second for second in seconds]
    return Speed(statistics.median(speeds), min(speeds), max(speeds))


def _text(speed: Speed) -> str:
    return f"{speed.median:.2f} ({speed.slowest:.2f}-{speed.fastest:.2f})"


def _size(text: str) -> int:
    size = parse_size(text)
    if not size:
        raise ConfigError(f"`sizes` {text}: not a size", hint="write 1MiB,32MiB")
    return size

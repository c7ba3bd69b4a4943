"""What a server tells in Prometheus' format: its cache, its KV memory, its preemptions."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType

import httpx
from prometheus_client.parser import text_string_to_metric_families

from picbench.store.records import ServerCounts

#: Seconds between looks at how much of a server's KV memory is in use.
INTERVAL = 1.0

#: Seconds that a server has to say it.
_QUICK = 10.0

#: Counters by the field of `ServerCounts`: vLLM's, those of older vLLM, SGLang's.
COUNTERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prompt_tokens": ("vllm:prompt_tokens", "sglang:prompt_tokens"),
        "cached_tokens": ("vllm:prompt_tokens_cached", "sglang:cached_tokens"),
        "queried_tokens": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
        "hit_tokens": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
        "external_hit_tokens": ("vllm:external_prefix_cache_hits",),
        "preemptions": ("vllm:num_preemptions",),
    }
)

#: Gauges of the share of the KV memory that is in use, from 0 to 1.
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")

_NAMES = frozenset(name for names in (*COUNTERS.values(), USAGE) for name in names)

#: Prometheus' suffix of counters, which clients may leave out.
_TOTAL = "_total"


@dataclass(frozen=True, slots=True)
class Scrape:
    """A server's counters at a moment, by the field of `ServerCounts`; sums over its engines.

    `usage` is the largest share of KV memory that one of its engines has in use. What the server
    does not tell is missing, or None.
    """

    counters: Mapping[str, float]
    usage: float | None

    @property
    def empty(self) -> bool:
        """Whether nothing in it is known here."""
        return not self.counters and self.usage is None


def parse_metrics(text: str) -> Scrape:
    """Read Prometheus' text format. Raises ValueError for anything else."""
    found: dict[str, list[float]] = {}
    for name, value in _samples(text.splitlines()):
        found.setdefault(name, []).append(value)
    counters = {}
    for counter, names in COUNTERS.items():
        values = next((found[name] for name in names if name in found), None)
        if values is not None:
            counters[counter] = sum(values)
    usage = next((max(found[name]) for name in USAGE if name in found), None)
    return Scrape(counters, usage)


def _samples(lines: Iterable[str]) -> Iterator[tuple[str, float]]:
    """Names without the suffix, and values. Servers have hundreds of other lines, left unread.

    A value that is no number, as a gauge may be that was never set, tells nothing.
    """
    known = [line for line in lines if line.partition("{")[0].split(" ")[0] in _WRITTEN]
    for family in text_string_to_metric_families("\n".join(known) + "\n"):
        for sample in family.samples:
            if isfinite(sample.value):
                yield sample.name.removesuffix(_TOTAL), sample.value


_WRITTEN = frozenset(form for name in _NAMES for form in (name, name + _TOTAL))


@dataclass(slots=True)
class Counted:
    """What a server counted in a stretch of time; `counts` is None while that is not known."""

    counts: ServerCounts | None = None


@dataclass(slots=True)
class ServerMeter:
    """Reads a server's metrics over `client` at `url`; a server without any is not asked again."""

    client: httpx.AsyncClient
    url: str
    found: bool = field(default=False, init=False)

    async def look(self) -> bool:
        """Whether the server has metrics that are known here."""
        scrape = await self._scrape()
        self.found = scrape is not None and not scrape.empty
        return self.found

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[Counted]:
        """Count what happens in the block, and see how full the KV memory gets meanwhile."""
        counted = Counted()
        if not self.found:
            yield counted
            return
        before = await self._scrape()
        seen: list[float] = []
        watching = asyncio.create_task(self._watch(seen))
        try:
            yield counted
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        after = await self._scrape()
        if before is not None and after is not None:
            seen += [scrape.usage for scrape in (before, after) if scrape.usage is not None]
            counted.counts = _difference(before, after, max(seen, default=None))

    async def _watch(self, seen: list[float]) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            scrape = await self._scrape()
            if scrape is not None and scrape.usage is not None:
                seen.append(scrape.usage)

    async def _scrape(self) -> Scrape | None:
        """None where the server does not answer with metrics: requests are not to fail for it."""
        with suppress(httpx.HTTPError, ValueError):
            response = await self.client.get(self.url, timeout=_QUICK)
            if response.status_code == httpx.codes.OK:
                return parse_metrics(response.text)
        return None


def _difference(before: Scrape, after: Scrape, usage: float | None) -> ServerCounts | None:
    """What was counted in between; None after a restart, which sets all counters back."""
    # A counter with labels is not there before it first counts.
    earlier = before.counters
    counts = {name: round(now - earlier.get(name, 0)) for name, now in after.counters.items()}
    if any(count < 0 for count in counts.values()):
        return None
    return ServerCounts(peak_kv_usage=usage, **counts)

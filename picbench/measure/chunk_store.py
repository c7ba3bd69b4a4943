"""What the chunk cache costs a request on the scheduler's side.

A request for 64 resident chunks is looked up and accounted for (`lookup`, `use`) while 100, 1,000
or 10,000 chunks are resident; then a chunk is evicted as a whole (`evict`). Laying out the
request's plan (`plan`) does not depend on their number. The block pool is vLLM's, without an
engine.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from picbench.engines.algorithms import parse
from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.planning.chunk_pages import PageCache
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.plan import Canonical, Plan
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.engines.vllm.scheduler.evictions import ChunkEvictions, listen
from picbench.engines.vllm.scheduler.pool import Pool
from picbench.measure.report import save
from picbench.output import markdown, provenance

KNOWN = (100, 1_000, 10_000)
CHUNKS = 64
TOKENS = 64
SIZE = 16
#: Tokens of a chunk in the long request whose plan is timed.
LONG = 500


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one operation, over `n` requests."""

    operation: str
    known: int
    chunks: int
    chunk_tokens: int
    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Bench:
    """A scheduler's pool with resident chunks."""

    store: ChunkStore
    block_pool: Any
    canonicals: Sequence[Canonical]


def measure(known: int, repeats: int, seed: int = 0) -> list[Timing]:
    """Time lookups, uses and evictions with `known` resident chunks."""
    bench = _filled(known)
    source = random.Random(seed)
    requests = [source.choices(bench.canonicals, k=CHUNKS) for _ in range(repeats)]
    lookup = [_timed(partial(_mappable, bench.store, request)) for request in requests]
    use = [_timed(partial(bench.store.touch, request)) for request in requests]
    allocate = partial(bench.block_pool.get_new_blocks, 1)
    evict = [_timed(allocate) for _ in range(min(50, known // 2))]
    each = {"lookup": (lookup, CHUNKS), "use": (use, CHUNKS), "evict": (evict, 1)}
    return [_timing(name, known, count, TOKENS, found) for name, (found, count) in each.items()]


def measure_plan(repeats: int) -> list[Timing]:
    """Time laying out a request of 64 long chunks."""
    source = random.Random(0)
    segments = [_chunk(source, LONG) for _ in range(CHUNKS)]
    cache = PageCache()
    cold = [_timed(partial(_plan, segments)) for _ in range(repeats)]
    warm = [_timed(partial(_plan, segments, cache)) for _ in range(repeats + 1)][1:]
    each = {"plan, new chunks": cold, "plan, known chunks": warm}
    return [_timing(name, 0, CHUNKS, LONG, found) for name, found in each.items()]


def measure_all(repeats: int, output: Path) -> str:
    """Measure everything, write ``chunk-store.json`` and ``chunk-store.md``, return the page."""
    timings = [t for known in KNOWN for t in measure(known, repeats)]
    timings += measure_plan(max(3, repeats // 20))
    facts = provenance.facts("cpu", "cores", "python", "vllm", "commit")
    facts["cpu"] += f", {facts.pop('cores')} cores"
    page = render(timings, facts)
    save(output / "chunk-store", {**facts, "timings": [asdict(t) for t in timings]}, page)
    return page


def render(timings: Sequence[Timing], facts: Mapping[str, str]) -> str:
    """The timings as a Markdown page."""
    head = ("operation", "chunks known", "chunks of the request", "tokens a chunk", "ms", "n")
    return (
        "# What the chunk cache costs a request\n\n"
        f"{facts['cpu']}, Python {facts['python']}, vLLM {facts['vllm']}, commit "
        f"{facts['commit']}. Milliseconds on one core, median (5 % - 95 %).\n"
        "`picbench measure chunk-store --output results/cpu`\n\n"
        f"{markdown.table(head, map(_cells, timings), right=1)}\n"
    )


def _filled(known: int) -> Bench:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    source = random.Random(1)
    canonicals = [_plan([_chunk(source, TOKENS)]).canonicals[0] for _ in range(known)]
    block_pool = BlockPool(known * (TOKENS // SIZE) + 1, True, SIZE)
    pool = Pool(block_pool)
    store = ChunkStore(pool, tiers=False)
    listen(block_pool, ChunkEvictions(store, pool))
    for canonical in canonicals:
        blocks = block_pool.get_new_blocks(len(canonical.pages))
        for block, page in zip(blocks, canonical.pages, strict=True):
            name: Any = page.name
            key = make_block_hash_with_group_id(name, 0)
            block_pool._insert_block_hash(key, block, num_tokens=SIZE)
        block_pool.free_blocks(reversed(blocks))
        store.prepare_compile(canonical, "owner")
        store.complete_compile(canonical, (), success=True, shared=True)
    return Bench(store, block_pool, canonicals)


def _chunk(source: random.Random, tokens: int) -> Segment:
    return Segment(tuple(source.randrange(1, 30_000) for _ in range(tokens)), chunk=True)


def _plan(segments: Sequence[Segment], cache: PageCache | None = None) -> Plan:
    prompt = [*segments, Segment((0,))]
    return lay_out(prompt, parse("mepic").plan_chunk, LayoutConfig(SIZE), cache=cache)


def _mappable(store: ChunkStore, request: Sequence[Canonical]) -> bool:
    return all(map(store.is_mappable, request))


def _timed(operation: Callable[[], object]) -> float:
    began = time.perf_counter()
    operation()
    return 1e3 * (time.perf_counter() - began)


def _timing(operation: str, known: int, chunks: int, tokens: int, found: Sequence[float]) -> Timing:
    if len(found) < 20:
        low, high = min(found), max(found)
    else:
        cuts = statistics.quantiles(found, n=20)
        low, high = cuts[0], cuts[-1]
    median = statistics.median(found)
    return Timing(operation, known, chunks, tokens, median, low, high, len(found))


def _cells(t: Timing) -> list[str]:
    spread = f"{t.median:.3f} ({t.low:.3f} - {t.high:.3f})"
    counts = (str(t.known) if t.known else "-", str(t.chunks), str(t.chunk_tokens))
    return [t.operation, *counts, spread, str(t.n)]

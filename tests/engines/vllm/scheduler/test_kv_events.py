"""What routers are told of the pool's blocks."""

from pathlib import Path
from typing import Any

import pytest
from kv_index import KvIndex
from scheduler_bench import Bench, bench
from scheduler_storm import Storm
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.core.sched.scheduler import Scheduler

from picbench.engines.planning.keys import is_canonical
from picbench.engines.vllm.scheduler.pool import key_of

LONG, SHORT = tuple(range(100, 170)), tuple(range(300, 335))


def served(made: Bench, *chunks: tuple[int, ...], **given: Any) -> list[Any]:
    """The events of one request."""
    made.told.clear()
    made.submit(f"request {len(made.ended)}", *chunks, **given)
    made.run()
    return list(made.told)


def test_a_chunk_is_told_by_its_own_tokens_from_its_beginning(llama: Path) -> None:
    made = bench(llama, events=True)
    events = served(made, LONG, SHORT, question=(7, 8, 9))
    assert all(type(event) is BlockStored for event in events)
    # 70 tokens are 4 whole blocks, 35 are 2; a step has 64 slots.
    index = KvIndex()
    index.apply(events)
    assert index.found(LONG) == 4
    assert index.found(SHORT) == 2
    assert index.found(LONG + SHORT) == 4
    assert len(index.places) == 6
    assert {event.medium for event in events} == {"GPU"}
    # In another order, after other text, nothing of them is new.
    assert served(made, SHORT, LONG, question=(7, 8, 9, *range(500, 540))) == []


def test_chunks_that_are_in_use_or_evicted_are_told_as_the_pool_has_them(llama: Path) -> None:
    made, index = bench(llama, events=True, blocks=12), KvIndex()
    index.apply(served(made, LONG))
    events = served(made, tuple(range(700, 800)), max_tokens=20)
    index.apply(events)
    removed = [event for event in events if type(event) is BlockRemoved]
    # The chunk as a whole: its fifth block is not full of tokens.
    assert sum(len(event.block_hashes) for event in removed) == 4
    assert index.found(LONG) == 0
    assert index.found(range(700, 800)) == 6


def test_what_a_tier_loads_is_told(llama: Path) -> None:
    from picbench.engines.chunk_cache.transfers import TransferResults

    made, index = bench(llama, events=True, tiers="host:1MiB"), KvIndex()
    index.apply(served(made, LONG))
    [record] = made.scheduler.chunk_store
    made.step(TransferResults(stored={record.key}))
    assert made.scheduler.reset_prefix_cache()
    made.submit("second", LONG)
    [load] = made.schedule().commands.loads
    made.told.clear()
    made.finish(TransferResults(), loaded={load.request_id})
    made.run()
    cleared, *stored = made.told
    assert type(cleared) is AllBlocksCleared
    assert [event.parent_block_hash for event in stored] == [None]
    index.apply(made.told)
    assert index.found(LONG) == 4


@pytest.mark.parametrize(
    ("algorithm", "known"),
    [("mepic", 2), ("naive:anchor=head", 2), ("epic:k=16", 0), ("cacheblend:r=0.15", 0)],
)
def test_the_text_that_prompts_begin_with_is_told(llama: Path, algorithm: str, known: int) -> None:
    """But where nothing of it is kept for others: after copies, or picked tokens."""
    made, index = bench(llama, events=True), KvIndex()
    lead = tuple(range(500, 540))
    index.apply(served(made, LONG, lead=lead, algorithm=algorithm, max_tokens=30))
    assert (index.found(lead), index.found(LONG)) == (known, 4)
    assert sum(map(len, index.blocks.values())) == known + 4
    # A plain prompt goes on from it.
    plain = (*lead, *range(600, 640))
    index.apply(served(made, question=plain, max_tokens=30))
    assert index.found(plain) == 5


def test_salts_are_told_as_in_stock_vllm(llama: Path) -> None:
    made = bench(llama, events=True)
    events = [*served(made, LONG, salt="a"), *served(made, question=LONG, salt="a")]
    index = KvIndex()
    index.apply(events)
    first = [event.extra_keys for event in events if event.parent_block_hash is None]
    assert [keys[0] for keys in first] == [("a",)] * 2
    assert not any(any(event.extra_keys[event.parent_block_hash is None :]) for event in events)


def test_plain_requests_are_told_as_by_stock_vllm(llama: Path) -> None:
    told = []
    for kind in ("ours", "stock"):
        made = bench(llama, events=True, blocks=12)
        if kind == "stock":
            made = stock(made)
        for first in (100, 200, 100, 300, 400):
            made.submit(
                str(len(made.ended)), question=tuple(range(first, first + 60)), max_tokens=2
            )
            made.run()
        told.append(list(made.told))
    assert told[0] == told[1]
    assert {type(event) for event in told[0]} == {BlockStored, BlockRemoved}


def stock(made: Bench) -> Bench:
    """The same pool with vLLM's own scheduler."""
    ours: Any = made.scheduler
    config = ours.vllm_config
    config.kv_transfer_config = None
    found: Any = Scheduler(config, ours.kv_cache_config, ours.structured_output_manager, 16)
    other = Bench(found, False)
    found.kv_event_publisher = ours.kv_event_publisher
    found.kv_event_publisher.publish = lambda batch: other.told.extend(batch.events)
    return other


@pytest.mark.parametrize("seed", range(4))
def test_after_a_storm_routers_know_what_is_in_the_pool(llama: Path, seed: int) -> None:
    storm, index = Storm(seed, llama, events=True), KvIndex()
    storm.run(60)
    # Events are published with steps.
    storm.bench.submit("last", question=(1, 2, 3))
    storm.bench.run()
    index.apply(storm.bench.told)
    pool = storm.scheduler.kv_cache_manager.block_pool
    keys = {key for key in map(key_of, pool.blocks) if key is not None}
    names = {maybe_convert_block_hash(key): key for key in keys}
    assert index.places.keys() <= names.keys()
    canonical = {name for name, key in names.items() if is_canonical(key)}
    full = {block for chunk in storm.chunks for block in zip(*[iter(chunk)] * 16, strict=False)}
    assert {index.places[name][1] for name in canonical & index.places.keys()} <= full
    # What is not told of chunks are their last blocks, which are not full.
    for record in filter(lambda record: record.whole, storm.scheduler.chunk_store):
        pages = [maybe_convert_block_hash(page) for page in record.pages]
        assert all(page in index.places for page in pages[: record.tokens // 16])
    storm.scheduler.reset_prefix_cache()
    storm.bench.told.clear()
    storm.bench.submit("after", question=(1, 2, 3))
    storm.bench.run()
    index.apply(storm.bench.told)
    assert not index.places

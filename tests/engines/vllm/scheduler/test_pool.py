"""The order of a pool's blocks, and which of them are forgotten."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from picbench.engines.vllm.scheduler.pool import ChunkEvictions, Pool, key_of, listen

BLOCKS = 7
KEYS = [b"%d" % n * 33 for n in range(3)]


@pytest.fixture
def blocks() -> Any:
    return BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)


def cached(blocks: Any, *keys: bytes) -> list[Any]:
    """Blocks with these keys, in use."""
    found = blocks.get_new_blocks(len(keys))
    for block, key in zip(found, keys, strict=True):
        block.set_block_hash(make_block_hash_with_group_id(key, 0), 16)
        blocks.cached_block_hash_to_block.insert(block.block_hash, block)
    return found


def order(blocks: Any) -> list[bytes | None]:
    """The keys of idle blocks, those that are reused first in front."""
    return [key_of(block) for block in blocks.free_block_queue.get_all_free_blocks()]


def test_the_last_of_the_released_blocks_is_reused_first(blocks: Any) -> None:
    pool = Pool(blocks)
    pool.release(cached(blocks, *KEYS))
    assert order(blocks)[-3:] == KEYS[::-1]
    held = [pool.hold(key) for key in KEYS]
    assert pool.available == BLOCKS - 1 - 3
    assert all(map(pool.in_use, KEYS))
    pool.release(held)  # type: ignore[arg-type]
    assert order(blocks)[-3:] == KEYS[::-1]
    assert not any(map(pool.in_use, KEYS))
    assert pool.hold(b"?" * 33) is None


def test_idle_blocks_are_refreshed_and_discarded(blocks: Any) -> None:
    pool = Pool(blocks)
    first, second, third = cached(blocks, *KEYS)
    pool.release([first, second])
    pool.refresh([*KEYS, b"?" * 33])
    assert order(blocks)[-2:] == KEYS[:2]
    pool.discard(KEYS)
    # The next that are reused: forgotten, the one that was discarded last in front.
    idle = blocks.free_block_queue.get_all_free_blocks()
    assert idle[:2] == [second, first]
    assert [*map(pool.resident, KEYS)] == [False, False, True]
    assert third.ref_cnt == 1


def test_a_block_that_is_being_allocated_is_not_discarded(blocks: Any) -> None:
    """It is in no queue any more, and has no reference yet."""
    pool = Pool(blocks)
    pool.release(cached(blocks, *KEYS[:1]))
    [*_, last] = blocks.free_block_queue.get_all_free_blocks()
    blocks.free_block_queue.remove(last)
    pool.discard(KEYS)
    assert pool.resident(KEYS[0])


def test_blocks_of_others_are_not_forgotten(blocks: Any) -> None:
    pool = Pool(blocks)
    mine, both = cached(blocks, *KEYS[:2])
    blocks.touch([both])
    pool.forget([mine.block_id, both.block_id])
    assert [*map(pool.resident, KEYS[:2])] == [False, True]


@pytest.mark.parametrize("copies", [1, 2])
def test_a_page_is_evicted_with_the_last_block_that_holds_it(blocks: Any, copies: int) -> None:
    pool, evicted = Pool(blocks), list[bytes]()
    store: Any = SimpleNamespace(evict=evicted.append)
    listen(blocks, ChunkEvictions(store, pool))
    key, plain = b"c" * 33, b"p" * 32
    found = cached(blocks, *[key] * copies, plain)
    blocks.free_blocks(found)
    blocks.evict_blocks({found[0].block_id, found[-1].block_id})
    assert evicted == ([key] if copies == 1 else [])
    blocks.evict_blocks({block.block_id for block in found})
    assert evicted == [key]


def test_all_blocks_are_forgotten_also_those_in_use(blocks: Any) -> None:
    """Listeners hear of no evictions: of these, chunks would be stored."""
    pool, heard = Pool(blocks), list[str]()
    used, idle, _ = cached(blocks, *KEYS)
    pool.release([idle])
    listener: Any = SimpleNamespace(
        on_block_evicted=lambda block: heard.append("evicted"),
        reset=lambda: heard.append("reset"),
    )
    listen(blocks, listener)
    pool.forget_all()
    assert heard == ["reset"]
    assert not any(map(pool.resident, KEYS))
    assert (used.ref_cnt, pool.available) == (1, BLOCKS - 1 - 2)
    blocks.get_new_blocks(1)
    assert heard == ["reset", "evicted"]

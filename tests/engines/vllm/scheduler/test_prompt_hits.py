"""Lookups of whole prompts find what vLLM's own find, block by block."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scheduler_bench import bench

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.vllm.scheduler.cache_manager import PromptHits
from picbench.engines.vllm.scheduler.pool import Pool

BLOCKS = 6


@pytest.fixture
def manager() -> Any:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    config = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, 512, BLOCK_SIZE, BLOCK_SIZE)


def request(name: str, keys: Sequence[bytes], tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    made = Request(name, list(range(tokens)), SamplingParams(max_tokens=1), None)
    made.block_hashes[:] = keys
    return made


def compute(manager: Any, name: str, keys: Sequence[bytes]) -> Any:
    """A request that computes all of its blocks and keeps them."""
    made = request(name, keys, len(keys) * BLOCK_SIZE)
    assert manager.allocate_slots(made, made.num_tokens) is not None
    return made


def found(hits: PromptHits, manager: Any, asked: Any) -> list[int]:
    """Ids of the cached blocks of a request, by both lookups."""
    blocks, tokens, *rest = hits.find(asked)
    stock_blocks, stock_tokens, boundary = manager.get_computed_blocks(asked)
    assert blocks.blocks == stock_blocks.blocks
    assert (tokens, rest) == (stock_tokens, [boundary, False])
    return list(blocks.get_block_ids()[0])


def test_cached_blocks_are_found_up_to_the_first_that_is_not(manager: Any) -> None:
    hits = PromptHits(manager, Pool(manager.block_pool), BLOCK_SIZE)
    keys = [bytes([n]) * (32 + n % 2) for n in range(BLOCKS)]
    compute(manager, "a", keys)
    compute(manager, "b", keys)  # the same keys in other blocks
    slots = BLOCKS * BLOCK_SIZE
    assert found(hits, manager, request("more", [*keys, b"x" * 32], slots + BLOCK_SIZE)) == [
        *range(1, BLOCKS + 1)
    ]
    assert len(found(hits, manager, request("last token", keys, slots))) == BLOCKS - 1
    other = [*keys[:3], b"x" * 32, *keys[4:]]
    assert len(found(hits, manager, request("other", other, slots))) == 3
    assert found(hits, manager, request("none", [b"x" * 32], slots)) == []
    assert found(hits, manager, request("short", keys, 5)) == []


def test_a_request_that_skips_the_cache_finds_nothing(manager: Any) -> None:
    hits = PromptHits(manager, Pool(manager.block_pool), BLOCK_SIZE)
    keys = [bytes([n]) * 32 for n in range(BLOCKS)]
    compute(manager, "a", keys)
    asked = request("b", keys, 512)
    asked.skip_reading_prefix_cache = True
    assert found(hits, manager, asked) == []


@pytest.mark.parametrize("blocks", [1, BLOCKS])
def test_cached_tokens_are_estimated_as_vllm_does(manager: Any, blocks: int) -> None:
    hits = PromptHits(manager, Pool(manager.block_pool), BLOCK_SIZE)
    made = compute(manager, "a", [bytes([n]) * 32 for n in range(blocks)])
    assert hits.estimate_cached_tokens(made) == manager.estimate_cached_tokens(made) > 0
    unknown = request("b", [], 64)
    assert hits.estimate_cached_tokens(unknown) == manager.estimate_cached_tokens(unknown) == 0


@pytest.mark.parametrize("algorithm", ["naive", "mepic", "epic:k=4", "cacheblend", "prefix"])
def test_hits_are_counted_in_tokens_that_users_sent(llama: Path, algorithm: str) -> None:
    """As in vLLM's other metrics: neither pads nor linked copies, and no requests of compiles."""
    made = bench(llama, counts=True)
    chunks = tuple(range(10, 50)), tuple(range(100, 133))
    for name in ("first", "second"):
        made.submit(name, *chunks, question=(7, 8, 9), algorithm=algorithm)
        made.run()
    made.submit("plain", question=tuple(range(300, 340)))
    made.run()
    prefills = [made.ended[name].prefill_stats for name in ("first", "second", "plain")]
    device = [counts.prefix_cache_stats for counts in made.counted]
    assert sum(counts.requests for counts in device) == 3
    assert sum(counts.queries for counts in device) == 76 + 76 + 40
    hits = sum(counts.hits for counts in device)
    assert hits == sum(prefill.num_cached_tokens for prefill in prefills) > 0
    external = (counts.connector_prefix_cache_stats for counts in made.counted)
    assert not sum(counts.hits for counts in external if counts is not None)

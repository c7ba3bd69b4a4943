"""Lookups of whole prompts find what vLLM's own find, block by block."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_bench import bench
from small_engine import small_config
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from picbench.engines.chunk_cache.transfers import TransferResults
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.engine import Engine
from picbench.engines.planning.keys import is_canonical
from picbench.engines.request import Chunk, Request, Text
from picbench.engines.vllm.scheduler.cache_manager import ChunkTails, PromptHits
from picbench.engines.vllm.scheduler.pool import Pool, key_of

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


@pytest.mark.parametrize(
    ("tier", "source"),
    [("host", "host"), ("disk:/x", "disk"), ("redis://a:6379/0", "external_unspecified")],
)
def test_what_tiers_loaded_is_no_hit_of_the_pool(llama: Path, tier: str, source: str) -> None:
    """As a second engine finds what a first one stored: all of it is external."""
    made, chunk = bench(llama, counts=True, tiers="host:1MiB"), tuple(range(100, 148))
    made.submit("first", chunk)
    made.run()
    [record] = made.scheduler.chunk_store
    made.step(TransferResults(stored={record.key}))
    assert made.scheduler.reset_prefix_cache()
    made.counted.clear()
    made.submit("second", chunk)
    [load] = made.schedule().commands.loads
    served = {load.request_id: {record.key: tier}}
    made.finish(TransferResults(served=served), loaded={load.request_id})
    made.run()
    prefill = made.ended["second"].prefill_stats
    assert (prefill.num_local_cached_tokens, prefill.num_external_cached_tokens) == (0, 48)
    assert sum(counts.prefix_cache_stats.hits for counts in made.counted) == 0
    external = [counts.connector_prefix_cache_stats for counts in made.counted]
    assert sum(counts.hits for counts in external) == 48
    assert [c.hits_by_source for c in external if c.hits] == [{CacheHitSource(source): 48}]


QUESTION = Text(tokens=(7, 8, 9, 10))


@pytest.fixture(scope="module")
def small(llama: Path) -> Iterator[Engine]:
    """An engine whose steps have 24 tokens: chunks are cut into steps, inside blocks, too."""
    with Engine(small_config(llama, 100, 512, tiers="", batch_tokens=24, max_requests=8)) as engine:
        yield engine


def chunk(length: int, first: int = 100) -> Chunk:
    return Chunk(tokens=tuple(range(first, first + length)))


def computed(engine: Engine, request: Request) -> list[int]:
    """Tokens of each step that serves a request."""
    scheduler: Any = engine._running.scheduler
    steps: list[int] = []
    schedule = scheduler.schedule

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        steps.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = noted
    try:
        engine.generate([request], max_tokens=1, ignore_eos=True)
    finally:
        scheduler.schedule = schedule
    return [tokens for tokens in steps if tokens]


def fill(engine: Engine, value: float) -> None:
    """Write a value into every block of the pool."""

    def write(worker: Any) -> None:
        for layer in worker.model_runner.compilation_config.static_forward_context.values():
            layer.kv_cache.fill_(value)

    engine.reset()
    engine._running.engine.collective_rpc(write)


def caches(engine: Engine) -> list[torch.Tensor]:
    """The pool's KV of each layer [blocks, ...]."""

    def read(worker: Any) -> list[torch.Tensor]:
        layers = worker.model_runner.compilation_config.static_forward_context.values()
        return [layer.kv_cache for layer in layers]

    found: list[torch.Tensor] = engine._running.engine.collective_rpc(read)[0]
    return found


@pytest.mark.parametrize("length", [1, 15, 16, 17, 24, 25, 40, 47, 48, 49])
def test_a_compile_computes_the_chunks_tokens_and_no_more(small: Engine, length: int) -> None:
    small.reset()
    request = Request([chunk(length), QUESTION], "naive")
    assert sum(computed(small, request)) == length + 4
    # Its last block counts as full: the chunk is found again as a whole.
    other = Request([Text(tokens=(50, 51)), chunk(length), QUESTION], "naive")
    assert sum(computed(small, other)) == 6


def test_a_request_is_linked_in_the_step_that_ends_its_last_compile(small: Engine) -> None:
    small.reset()
    assert computed(small, Request([chunk(18), QUESTION], "naive")) == [22]
    small.reset()
    assert computed(small, Request([chunk(30), QUESTION], "naive")) == [24, 10]


@pytest.mark.parametrize("algorithm", ["naive", "mepic", "epic:k=16:copy=private"])
def test_what_blocks_held_before_changes_nothing(small: Engine, algorithm: str) -> None:
    request = Request([chunk(21), chunk(38, 300), chunk(5, 600), QUESTION], algorithm)
    answers = []
    for value in (0.0, float("nan"), 1e30):
        fill(small, value)
        [result] = small.generate([request], max_tokens=6, logprobs=3, ignore_eos=True)
        answers.append((result.tokens, result.logprobs))
    assert answers[1:] == answers[:1] * 2
    fill(small, 0.0)


def test_nothing_of_another_request_is_left_in_a_chunks_blocks(small: Engine) -> None:
    fill(small, 3.0)
    small.generate([Request([chunk(21), QUESTION], "naive")], max_tokens=1)
    pool: Any = small._running.scheduler.kv_cache_manager.block_pool
    canonical = (b for b in pool.blocks if (key := key_of(b)) and is_canonical(key))
    last = max(canonical, key=lambda block: block.block_hash_num_tokens).block_id
    for kv in caches(small):
        # Layouts differ; all that is not zero is of the chunk's tokens.
        of_a_slot = kv[last].numel() // BLOCK_SIZE
        assert 0 < kv[last].count_nonzero() <= (21 - BLOCK_SIZE) * of_a_slot
    fill(small, 0.0)


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(lengths, lengths)
def test_requests_find_all_that_they_can(
    small: Engine, first: list[int], second: list[int]
) -> None:
    small.reset()
    for known, asked in (((), first), (first, second)):
        new = {length for length in asked if length not in known}
        segments = [chunk(length, 5 * length) for length in asked]
        tokens = computed(small, Request([*segments, QUESTION], "naive"))
        assert sum(tokens) == sum(new) + 4


class Coordinator:
    """Notes how many tokens are cached."""

    def __init__(self) -> None:
        self.cached: list[int] = []

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        self.cached.append(num_computed_tokens)


@pytest.mark.parametrize(
    ("own", "prompt", "keys", "computed", "cached"),
    [
        (True, 21, 2, 16, 16),
        (True, 21, 2, 21, 32),
        # It lost its blocks and computes again what it had generated, 16 tokens at a time.
        (False, 20, 5, 32, 32),
        (False, 20, 5, 40, 40),
        # It has just generated the last token of its second block.
        (False, 20, 2, 31, 31),
    ],
)
def test_only_a_computed_chunk_ends_inside_a_full_block(
    own: bool, prompt: int, keys: int, computed: int, cached: int
) -> None:
    coordinator, request = (
        Coordinator(),
        SimpleNamespace(request_id="one", num_prompt_tokens=prompt, block_hashes=[b""] * keys),
    )
    known: Any = SimpleNamespace(find={"one": "a job"}.get if own else {}.get)
    tails = ChunkTails(coordinator, known, BLOCK_SIZE)  # type: ignore[arg-type]
    tails.cache_blocks(request, computed)  # type: ignore[arg-type]
    assert coordinator.cached == [cached]


@pytest.mark.parametrize(
    ("before", "tokens", "zeroed"),
    [(0, 40, [9]), (32, 8, [9]), (16, 17, [9]), (0, 32, []), (33, 7, []), (40, 1, [])],
)
def test_a_tail_is_zeroed_by_the_step_that_writes_first_into_it(
    before: int, tokens: int, zeroed: list[int]
) -> None:
    own: Any = SimpleNamespace(num_computed_tokens=before + tokens)
    job = SimpleNamespace(plan=SimpleNamespace(tokens=range(40)), request=own)
    known: Any = SimpleNamespace(find={"own": job}.get)
    tails = ChunkTails(Coordinator(), known, BLOCK_SIZE)  # type: ignore[arg-type]
    output: Any = SimpleNamespace(
        num_scheduled_tokens={"own": tokens, "other": 5}, new_block_ids_to_zero=[3]
    )
    tails.zero_new(output, lambda request: (7, 8, 9))
    assert output.new_block_ids_to_zero == [3, *zeroed]

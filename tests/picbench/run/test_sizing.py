"""Context and pool for a workload."""

from dataclasses import replace

import pytest
from harness_fakes import make_sample
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.algorithms import parse
from picbench.engines.planning.policy import ChunkPolicy
from picbench.errors import ConfigError
from picbench.run.job import CHUNK_EXTRA, SPARE, blocks, measure_sizes
from picbench.workloads.sample import SampleSegment


def test_sizes_by_hand() -> None:
    samples = [make_sample(1, max_tokens=2), make_sample(2, max_tokens=20)]
    sizes = measure_sizes(samples, concurrency=1, context=None, pool=None)
    assert sizes.context == 36 + 20
    assert sizes.longest == 4
    assert sizes.chunks == 3
    assert sizes.pool == 4 + 2 * CHUNK_EXTRA + 3 + SPARE + 1


def test_the_context_has_room_for_what_algorithms_add() -> None:
    [sample] = samples = [make_sample(1, max_tokens=2)]
    length = sample.prompt_tokens + 2

    def context(spec: str, positions: int | None = None) -> int:
        found = measure_sizes(
            samples, [parse(spec)], concurrency=1, context=None, pool=None, positions=positions
        )
        return found.context

    assert [context(spec) for spec in ("full", "naive", "mepic")] == [length] * 3
    assert context("kvlink:n=5") == length + 5 * len(sample.chunks)
    assert context("kvlink:n=5", positions=length + 3) == length + 3
    assert context("epic:k=4:bos=chunk") == length + len(sample.chunks)


def test_the_pool_has_room_for_what_algorithms_add() -> None:
    def pool(*specs: str) -> int:
        algorithms = [parse(spec) for spec in specs]
        samples = [make_sample(1, max_tokens=2)]
        return measure_sizes(samples, algorithms, concurrency=1, context=None, pool=None).pool

    assert pool("full", "naive", "epic", "mepic") == pool()
    assert pool("kvlink:n=500") >= pool() + 500 // 16 - CHUNK_EXTRA


def test_an_algorithm_that_fails_is_no_bug_of_picbench(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object, index: int, length: int) -> ChunkPolicy:
        raise IndexError("no such chunk")

    algorithm = parse("naive")
    monkeypatch.setattr(type(algorithm), "plan_chunk", fails)
    with pytest.raises(ConfigError, match=r"`algo` naive: plan_chunk\(0, .*no such chunk \(test_"):
        measure_sizes([make_sample(1)], [algorithm], concurrency=1, context=None, pool=None)


def test_documents_that_prompts_do_not_show_need_room() -> None:
    """The longest compile is the prompt's first text, a document of 100 tokens, and a chunk."""
    plain = make_sample(1, max_tokens=2)
    lead = SampleSegment("text", "", tuple(range(100)))
    known = [replace(s, before=lead) if s.kind == "chunk" else s for s in plain.segments]
    sample = replace(plain, segments=tuple(known))
    algorithms = [parse("full"), parse("naive:anchored=on:context=document")]
    sizes, bare = (
        measure_sizes([s], algorithms, concurrency=1, context=None, pool=None)
        for s in (sample, plain)
    )
    longest = max(len(chunk.tokens) for chunk in plain.chunks)
    assert sizes.context == len(plain.segments[0].tokens) + 100 + longest
    assert abs(sizes.pool - bare.pool - blocks(100)) <= 1
    both = measure_sizes([plain, sample], algorithms, concurrency=1, context=None, pool=None)
    assert both.chunks == 2 * bare.chunks


def test_what_the_user_says_is_kept() -> None:
    sizes = measure_sizes([make_sample(1)], concurrency=1, context=512, pool=7)
    assert (sizes.context, sizes.pool) == (512, 7)


def test_a_pool_below_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="`kv_blocks` 2: the longest request needs 3"):
        measure_sizes([make_sample(1)], concurrency=1, context=None, pool=2)


@given(st.integers(1, 30), st.integers(1, 64), st.integers(1, 200))
def test_the_pool_is_even_and_holds_what_runs_at_once(
    count: int, concurrency: int, output: int
) -> None:
    samples = [make_sample(n, max_tokens=output) for n in range(count)]
    sizes = measure_sizes(samples, concurrency=concurrency, context=None, pool=None)
    assert sizes.pool % 2 == 0
    assert sizes.pool >= min(count, concurrency) * sizes.longest + sizes.chunks


@given(st.integers(0, 10_000))
def test_blocks_hold_their_tokens_and_no_block_is_empty(tokens: int) -> None:
    assert 0 <= blocks(tokens) * 16 - tokens < 16

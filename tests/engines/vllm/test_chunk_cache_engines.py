"""The chunk cache across engines, one after the other: a process can hold only one at a time."""

from pathlib import Path
from typing import Any

import pytest
from chunk_bench import config, serve

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
from picbench.errors import ConfigError


def test_two_engines_share_chunks_through_a_folder(
    llama: Path, tmp_path: Path, chunks: list[Chunk], question: Text
) -> None:
    tiers = f"disk:{tmp_path}:64MiB"
    requests = [Request([*chunks, question], a) for a in ("mepic", "epic:k=16")]
    with Engine(config(llama, tiers=tiers)) as first:
        expected = [serve(first, request)[0] for request in requests]
        first.drain()
    with Engine(config(llama, tiers=tiers)) as second:
        for request, before in zip(requests, expected, strict=True):
            (found,) = serve(second, request)
            assert found.counts.compile_work == 0
            assert found.tokens == before.tokens


def test_other_weights_do_not_meet_in_a_tier(
    llama: Path, llama3: Path, tmp_path: Path, chunks: list[Chunk], question: Text
) -> None:
    request = Request([*chunks, question], "naive")
    for model in (llama, llama3):
        with Engine(config(model, tiers=f"disk:{tmp_path}:64MiB")) as engine:
            (found,) = serve(engine, request)
            engine.drain()
            assert found.hits.tiers == {}


def test_on_pressure_reject_refuses_before_anything_is_allocated(
    llama: Path, chunks: list[Chunk], question: Text, draw: Any
) -> None:
    requests = [Request([*chunks, Text(tokens=draw(40, i)), question]) for i in range(8)]
    with Engine(config(llama, kv_blocks=64, on_pressure="reject")) as engine:
        results = serve(engine, *requests)
        reasons = [result.finish_reason for result in results]
        assert reasons.count("length") >= 1
        assert reasons.count("rejected") >= 1
        assert engine.preemptions == 0
        assert engine._running.scheduler.linker.idle
        (after,) = serve(engine, requests[0])
    assert after.finish_reason == "length"


def test_a_wrong_policy_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="on_pressure"):
        Engine(config(llama, on_pressure="panic"))
    with pytest.raises(ConfigError, match="`tiers`"):
        Engine(config(llama, tiers="tape:4GiB"))


def test_two_engines_share_chunks_through_redis(
    llama: Path, redis_process: Any, chunks: list[Chunk], question: Text
) -> None:
    tiers = f"host:4MiB,{redis_process.address}:64MiB"
    request = Request([*chunks, question])
    with Engine(config(llama, tiers=tiers)) as first:
        (expected,) = serve(first, request)
        first.drain()
    with Engine(config(llama, tiers=tiers)) as second:
        (found,) = serve(second, request)
    assert found.counts.compile_work == 0
    assert found.tokens == expected.tokens
    assert sum(found.hits.tiers.values()) == sum(-(-len(c.tokens or ()) // 16) for c in chunks)


@pytest.mark.filterwarnings("ignore")
def test_redis_may_die_and_come_back(
    llama: Path, redis_process: Any, chunks: list[Chunk], question: Text
) -> None:
    requests = [Request([*order, question]) for order in (chunks, chunks[::-1], chunks[1:])]
    with Engine(config(llama, tiers=f"{redis_process.address}?deadline=2s")) as engine:
        expected = serve(engine, *requests)
        engine.drain()
        engine.reset(tiers=False)
        redis_process.kill()
        assert [r.tokens for r in serve(engine, *requests)] == [r.tokens for r in expected]
        redis_process.start()
        engine.reset(tiers=False)
        assert [r.tokens for r in serve(engine, *requests)] == [r.tokens for r in expected]
        (tier,) = engine.cache.tiers.values()
        assert tier.failures > 0

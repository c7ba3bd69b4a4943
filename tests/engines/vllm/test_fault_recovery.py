"""What faults and losses leave behind: chunks are resident only if their KV is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ahead_engine import Start
from small_engine import check_drained, small_config

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.chunk_cache.transfers import TransferResults
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.engines.vllm.scheduler.linker import Linker
from picbench.engines.vllm.scheduler.scheduler import PicScheduler
from picbench.engines.vllm.transfer.pool_rows import PoolRows
from picbench.engines.vllm.transfer.tier_client import TierClient
from picbench.errors import EngineError


def engine_with(model: Path, tiers: str, start: Start) -> Engine:
    return start(small_config(model, 60, 256, batch_tokens=128, max_requests=4, tiers=tiers))


@pytest.fixture(scope="module")
def engine(pebble: Path, start: Start) -> Iterator[Engine]:
    """A tier that is too small for any chunk: it refuses all."""
    with engine_with(pebble, "host:1KiB", start) as engine:
        yield engine


@pytest.fixture(scope="module")
def chunks(draw: Any) -> list[Chunk]:
    return [Chunk(tokens=draw(45, 60)), Chunk(tokens=draw(40, 61))]


def request(chunks: list[Chunk], draw: Any, algorithm: str) -> Request:
    return Request([*chunks, Text(tokens=draw(5, 62))], algorithm=algorithm)


def serve(engine: Engine, *requests: Request) -> list[Result]:
    results = engine.generate(requests, max_tokens=4, ignore_eos=True)
    engine.drain()
    return results


@pytest.mark.parametrize("algorithm", ["naive", "mepic"])
def test_a_refused_chunk_that_lost_a_page_is_compiled_again(
    engine: Engine, chunks: list[Chunk], draw: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """EPIC links the first page of the second chunk, so it does not miss it; the next one does."""
    expected = serve(engine, request(chunks[::-1], draw, algorithm))[0].tokens
    engine.reset()
    real, lost = ChunkStore.complete_transfers, list[bool]()

    def complete_transfers(self: ChunkStore, results: TransferResults) -> None:
        for key in results.refused:
            if (canonical := self.get(key).storing) is not None and canonical.unused:
                # What the pool does when it needs a block.
                self._pool.discard(canonical.unused)
                lost.append(any(map(self._pool.resident, canonical.unused)))
        real(self, results)

    with monkeypatch.context() as patch:
        patch.setattr(ChunkStore, "complete_transfers", complete_transfers)
        assert serve(engine, request(chunks, draw, "epic:k=16"))[0].error is None
    assert lost == [False]
    [result] = serve(engine, request(chunks[::-1], draw, algorithm))
    assert result.error is None
    assert result.tokens == expected
    check_drained(engine)


@pytest.mark.parametrize("algorithm", ["mepic", "epic:k=4", "epic:k=4:copy=shared"])
def test_a_compile_that_ends_with_an_error_leaves_no_chunk(
    engine: Engine, chunks: list[Chunk], draw: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    asked = request(chunks, draw, algorithm)
    expected = serve(engine, asked)[0].tokens
    engine.reset()
    real, failed = Linker.on_scheduled, list[bytes]()

    def on_scheduled(self: Linker, request: Any, hit_tokens: int) -> None:
        real(self, request, hit_tokens)
        if (job := self._jobs.find(request.request_id)) is not None and not failed:
            failed.append(job.canonical.key)
            raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Linker, "on_scheduled", on_scheduled)
        [result] = serve(engine, asked)
    assert "injected" in str(result.error)
    record = engine._running.scheduler.chunk_store.get(failed[0])
    assert not record.size
    assert record.owner is None
    check_drained(engine)
    [result] = serve(engine, asked)
    assert result.error is None
    assert result.tokens == expected


def test_an_eviction_that_fails_ends_at_most_the_request_that_needs_the_chunk(
    engine: Engine, draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [Chunk(tokens=draw(40, 70 + i)) for i in range(30)]
    asked = [request([chunk], draw, "mepic") for chunk in many]
    expected = [result.tokens for result in serve(engine, *asked)]
    engine.reset()
    real, calls = ChunkStore.evict, list[bytes]()

    def evict(self: ChunkStore, page: bytes) -> None:
        calls.append(page)
        if len(calls) == 2:
            raise RuntimeError("injected")
        real(self, page)

    with monkeypatch.context() as patch:
        patch.setattr(ChunkStore, "evict", evict)
        results = serve(engine, *asked, *asked)
    assert len(calls) > 2
    assert sum(result.error is not None for result in results) <= 1
    for result, right in zip(results, expected * 2, strict=True):
        assert result.error is not None or result.tokens == right
    check_drained(engine)


def _raise(*_: Any) -> None:
    raise RuntimeError("injected")


def test_a_count_of_blocks_that_fails_rejects_no_request(
    engine: Engine, chunks: list[Chunk], draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._running.scheduler, "_rejects", True)
    monkeypatch.setattr(PicScheduler, "_short_of_blocks", _raise)
    assert serve(engine, request(chunks, draw, "mepic"))[0].finish_reason == "length"


@pytest.mark.parametrize("hook", ["_look_up", "_clear"])
def test_tiers_that_are_not_looked_up_or_cleared_end_no_request(
    pebble: Path,
    tmp_path: Path,
    chunks: list[Chunk],
    draw: Any,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    start: Start,
) -> None:
    """Others may have stored in a tier on disk, so chunks are looked up there."""
    calls = list[int]()

    def failing(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("injected")

    with engine_with(pebble, f"disk:{tmp_path}:4MiB", start) as engine:
        asked = request(chunks, draw, "naive")
        expected = serve(engine, asked)[0].tokens
        engine.reset()
        monkeypatch.setattr(TierClient, hook, failing)
        engine.reset()
        [result] = serve(engine, asked)
        assert calls
        assert result.error is None
        assert result.tokens == expected
        check_drained(engine)


def test_a_copy_that_fails_leaves_nothing_to_be_found(
    pebble: Path, start: Start, draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its request computed over blocks that nothing filled has another one's tokens."""
    chunks = [Chunk(tokens=draw(40, 70 + n)) for n in range(2)]

    def ask(algorithm: str) -> Request:
        return Request([*chunks, Text(tokens=draw(50, 75))], algorithm=algorithm)

    def fail(self: PoolRows, pairs: object) -> None:
        raise MemoryError("injected")

    private, shared = ask("epic:k=16"), ask("epic:k=16:copy=shared")
    with engine_with(pebble, "", start) as engine:
        [expected] = serve(engine, shared)
        engine.reset()
        serve(engine, request(chunks, draw, "naive"))
        with monkeypatch.context() as patch:
            patch.setattr(PoolRows, "copy", fail)
            failed, beside = serve(engine, private, shared)
        [later] = serve(engine, shared)
        assert "injected" in str(failed.error)
        assert beside.tokens == later.tokens == expected.tokens
        check_drained(engine)


@pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt()])
def test_a_step_that_does_not_end_closes_the_engine(
    pebble: Path, start: Start, draw: Any, chunks: list[Chunk], error: BaseException
) -> None:
    """Blocks have their keys already, and nothing was computed in them."""

    def fail() -> None:
        raise error

    with engine_with(pebble, "", start) as engine:
        engine._running.engine.step = fail  # type: ignore[assignment,method-assign]
        with pytest.raises(type(error)):
            serve(engine, request(chunks, draw, "mepic"))
        with pytest.raises(EngineError, match=f"a step did not end .{type(error).__name__}"):
            serve(engine, request(chunks, draw, "mepic"))

"""The chunk cache in a running engine: tiers, copies, faults, pins, pressure."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chunk_bench import BLOCKS, config, serve, using_tiers
from tier_faults import Dead, Far, Flipping, Full, Lying, Stuck, Torn

from picbench.engines.chunk_cache.tiers.backends.host import Host
from picbench.engines.engine import Engine
from picbench.engines.ledger import Snapshot
from picbench.engines.request import Chunk, Request, Text
from picbench.errors import ConfigError, EngineError


@pytest.fixture(scope="module")
def shared_engine(llama: Path) -> Iterator[Engine]:
    with Engine(config(llama)) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    shared_engine.reset()
    shared_engine.measure()
    return shared_engine


def peak(engine: Engine) -> Snapshot:
    return max(engine.memory, key=lambda snapshot: snapshot.referenced)


def evict_all(engine: Engine) -> None:
    """Empty the pool, and leave the tiers alone."""
    engine.reset(tiers=False)


# Copies.


@pytest.mark.parametrize("algorithm", ["epic:k=16", "epic:k=0", "cacheblend:select=first"])
def test_copying_changes_no_token(
    engine: Engine, chunks: list[Chunk], question: Text, algorithm: str
) -> None:
    prompts = [Request([*chunks, question]), Request([*chunks[::-1], chunks[0], question])]
    found = {
        copy: [serve(engine, Request(p.segments, f"{algorithm}:copy={copy}"))[0] for p in prompts]
        for copy in ("private", "shared")
    }
    for private, shared in zip(found["private"], found["shared"], strict=True):
        assert private.tokens == shared.tokens
        assert private.hits.copied == shared.hits.chunk
        assert private.hits.chunk == shared.hits.copied == 0


def test_copies_are_private_in_the_ledger(
    engine: Engine, chunks: list[Chunk], question: Text
) -> None:
    users = 6
    requests = [Request([Text(tokens=(3 + i,)), *chunks, question]) for i in range(users)]
    kinds = {}
    for copy in ("private", "shared"):
        engine.reset()
        serve(engine, Request(requests[0].segments, f"epic:k=16:copy={copy}"))
        engine.measure()
        serve(engine, *(Request(r.segments, f"epic:k=16:copy={copy}") for r in requests))
        kinds[copy] = peak(engine).blocks
    assert kinds["private"]["chunk"] == 0
    assert kinds["private"]["private"] == users * kinds["shared"]["chunk"]
    for kind in ("linked", "prompt"):
        assert kinds["private"][kind] == kinds["shared"][kind]


def test_copied_chunks_live_outside_the_pool(
    engine: Engine, chunks: list[Chunk], question: Text
) -> None:
    serve(engine, Request([*chunks, question], "epic:k=16"))
    engine.drain()
    assert engine.cache.chunks == []
    (again,) = serve(engine, Request([*chunks, question], "epic:k=16"))
    assert again.counts.compile_work == 0
    assert again.hits.tiers == {"host": again.hits.copied}


# Tiers.


def test_an_evicted_chunk_comes_back_from_the_host(
    engine: Engine, chunks: list[Chunk], question: Text
) -> None:
    request = Request([*chunks, question], "naive")
    (before,) = serve(engine, request)
    engine.drain()
    computed = engine.cache.digests(chunks)
    evict_all(engine)
    assert engine.cache.digests(chunks) == [None] * len(chunks)
    (after,) = serve(engine, request)
    assert engine.cache.digests(chunks) == computed
    assert len(set(computed)) == len(chunks)
    assert after.tokens == before.tokens
    assert after.counts.compile_work == 0
    assert after.hits.tiers == {"host": sum(-(-len(c.tokens or ()) // 16) for c in chunks)}


def test_resetting_the_tiers_makes_an_engine_cold(
    engine: Engine, chunks: list[Chunk], question: Text
) -> None:
    request = Request([*chunks, question], "naive")
    serve(engine, request)
    engine.reset()
    (after,) = serve(engine, request)
    assert after.counts.compile_work == sum(len(c.tokens or ()) for c in chunks)
    assert after.hits.tiers == {}


def test_tenants_do_not_meet_in_a_tier(engine: Engine, chunks: list[Chunk], question: Text) -> None:
    request = Request([*chunks, question], "epic:k=16")
    serve(engine, Request(request.segments, request.algorithm, salt="one"))
    engine.drain()
    evict_all(engine)
    (other,) = serve(engine, Request(request.segments, request.algorithm, salt="two"))
    assert other.counts.compile_work == sum(len(c.tokens or ()) for c in chunks)


# Faults: each costs time, none an answer.


FAULTS: dict[str, Callable[[], Any]] = {
    "dead": Dead,
    "lying": Lying,
    "flipping": Flipping,
    "torn": Torn,
    "full": Full,
    "tiny": lambda: Host(1 << 12),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("algorithm", ["naive", "epic:k=16"])
def test_a_faulty_tier_costs_no_answer(
    engine: Engine, chunks: list[Chunk], question: Text, fault: str, algorithm: str
) -> None:
    request = Request([*chunks, chunks[1], question], algorithm)
    (expected,) = serve(engine, request)
    engine.reset()
    with using_tiers(engine, FAULTS[fault]()):
        for _ in range(2):
            (found,) = serve(engine, request)
            assert found.tokens == expected.tokens
            engine.drain()
            evict_all(engine)
    assert engine._running.scheduler.linker.idle


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ["naive", "epic:k=16"])
def test_a_tier_that_hangs_costs_its_deadline(
    engine: Engine, chunks: list[Chunk], question: Text, algorithm: str
) -> None:
    request = Request([*chunks, question], algorithm)
    (expected,) = serve(engine, request)
    engine.reset()
    stuck = Stuck()
    with using_tiers(engine, stuck, deadline=0.2):
        (found,) = serve(engine, request)
        stuck.released.set()
    assert found.tokens == expected.tokens
    assert stuck.entered


@pytest.mark.parametrize("fault", ["lying", "flipping"])
def test_a_tier_that_gives_nothing_back_keeps_no_request_going_round(
    engine: Engine, question: Text, draw: Any, fault: str
) -> None:
    """Chunks that take many steps to compile: the first are stored, and lost, before the last."""
    many = [Chunk(tokens=draw(120, 3000 + index)) for index in range(7)]
    request = Request([*many, question], "epic:k=16")
    (expected,) = serve(engine, request)
    engine.reset()
    with using_tiers(engine, FAULTS[fault]()):
        (found,) = serve(engine, request)
    assert found.tokens == expected.tokens


def test_a_corrupted_value_is_compiled_again_and_replaced(
    engine: Engine, chunks: list[Chunk], question: Text
) -> None:
    request = Request([*chunks, question], "naive")
    far = Far(capacity=64 << 20)
    with using_tiers(engine, far):
        (expected,) = serve(engine, request)
        engine.drain()
        evict_all(engine)
        key, value = next(iter(far.inner._values.items()))
        far.inner._values[key] = memoryview(bytes(value[:-1]) + b"?")
        (found,) = serve(engine, request)
    assert found.tokens == expected.tokens
    assert 0 < found.counts.compile_work < expected.counts.compile_work


def test_aborts_while_chunks_are_loaded_leak_nothing(
    engine: Engine, chunks: list[Chunk], question: Text
) -> None:
    free = engine._running.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    stuck = Stuck()
    with using_tiers(engine, stuck):
        for algorithm in ("naive", "epic:k=16"):
            stuck.released.set()
            serve(engine, Request([*chunks, question], algorithm))
            engine.drain()
            evict_all(engine)
            stuck.released.clear()
            _abort_after(engine, Request([*chunks, question], algorithm), steps=8)
            stuck.released.set()
            engine.drain()
    assert engine._running.scheduler.linker.idle
    pool = engine._running.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == free


def _abort_after(engine: Engine, request: Request, steps: int) -> None:
    prepared = engine._prepare(request, 4, None, True)
    running = engine._running.engine
    prompt: Any = {"prompt_token_ids": prepared.prompt_token_ids}
    running.add_request(prepared.tag, prompt, prepared.sampling_params)
    for _ in range(steps):
        running.step()
    assert engine._running.scheduler.kv_holding_waiting
    running.abort_request([prepared.tag])


# Warming, pinning, dropping.


def test_warm_chunks_cost_nothing_to_compile(
    engine: Engine, chunks: list[Chunk], question: Text
) -> None:
    engine.cache.warm(chunks)
    known = engine.cache.chunks
    assert {chunk.tokens for chunk in known} == {len(c.tokens or ()) for c in chunks}
    assert engine.cache.stored(chunks) == len(known) and not any(chunk.pins for chunk in known)
    (found,) = serve(engine, Request([*chunks, question]))
    assert found.counts.compile_work == 0
    assert {chunk.hits for chunk in engine.cache.chunks} == {1}


def test_pinned_chunks_stay_while_others_come_and_go(
    engine: Engine, chunks: list[Chunk], draw: Any
) -> None:
    engine.cache.warm(chunks[:1], pin=True)
    for index in range(40):
        serve(engine, Request([Chunk(tokens=draw(300, 900 + index)), Text(tokens=(5,))]))
    (pinned,) = [chunk for chunk in engine.cache.chunks if chunk.pins]
    assert pinned.tokens == len(chunks[0].tokens or ())
    with pytest.raises(EngineError, match="hold blocks"):
        engine.reset()
    assert engine.cache.drop(chunks[:1]) == 0
    engine.cache.unpin(chunks[:1])
    assert engine.cache.drop(chunks[:1]) == 1


def test_pins_make_way_for_a_request_that_could_never_run(
    engine: Engine, draw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    many = [Chunk(tokens=draw(480, 950 + index)) for index in range(12)]
    engine.cache.warm(many, pin=True)
    assert sum(len(chunk.pages) for chunk in engine.cache.chunks) == 360
    (found,) = serve(engine, Request([Text(tokens=draw(900, 970))]))
    assert found.finish_reason == "length"
    assert any(not chunk.pins for chunk in engine.cache.chunks) or "unpinned" in caplog.text
    engine.cache.unpin(many)


def test_a_chunk_that_is_not_there_cannot_be_pinned(engine: Engine, chunks: list[Chunk]) -> None:
    with pytest.raises(ConfigError, match="not in the KV pool"):
        engine.cache.pin(chunks)


def test_tiers_say_what_they_did(engine: Engine, chunks: list[Chunk], question: Text) -> None:
    before = engine.cache.tiers["host"]
    serve(engine, Request([*chunks, question], "epic:k=16"))
    serve(engine, Request([*chunks, question], "epic:k=16"))
    engine.drain()
    assert list(engine.cache.tiers) == ["host"]
    after = engine.cache.tiers["host"]
    assert after.stored - before.stored == len(chunks)
    assert after.bytes_read > before.bytes_read


def test_copies_of_an_idle_engine_are_timed(
    engine: Engine, chunks: list[Chunk], question: Text
) -> None:
    serve(engine, Request([*chunks, question], "naive"))
    engine.drain()
    before = engine.cache.digests(chunks)
    assert all(0 < seconds < 60 for seconds in engine.cache.time_copies(100))
    assert engine.cache.digests(chunks) == before


# Fairness: one order of eviction for chunks and prefixes.


@pytest.mark.parametrize("hot", ["chunk", "prefix"])
def test_neither_kind_of_traffic_starves_the_other(engine: Engine, draw: Any, hot: str) -> None:
    """What is used again and again stays, however much of the other kind passes through."""
    tokens = draw(160, 2000)
    steady = {
        "chunk": [Chunk(tokens=tokens), Text(tokens=(7,))],
        "prefix": [Text(tokens=(*tokens, 7))],
    }[hot]
    (first,) = serve(engine, Request(steady, "naive"))
    assert first.counts.reused == 0 or first.counts.compile_work > 0
    for round_ in range(12):
        for index in range(3):
            passing = draw(480, 2100 + 3 * round_ + index)
            other = [Chunk(tokens=passing)] if hot == "prefix" else [Text(tokens=passing)]
            serve(engine, Request([*other, Text(tokens=(9,))], "naive"))
        (again,) = serve(engine, Request(steady, "naive"))
        assert again.counts.compile_work == 0
        assert again.counts.reused >= 160 - 16
        assert not again.hits.tiers
    passed = 36 * 480 // 16
    assert passed > 2 * BLOCKS

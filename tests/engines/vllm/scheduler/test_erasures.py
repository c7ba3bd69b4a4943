"""Documents that are erased leave no KV in the pool, host memory and a folder; others stay."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chunk_bench import config, serve

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text
from picbench.engines.vllm.scheduler.erasures import Erasures

Rows = frozenset[bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier")


@pytest.fixture(scope="module")
def engine(llama: Path, folder: Path) -> Iterator[Engine]:
    tiers = f"host:8MiB,disk:{folder}:64MiB"
    with Engine(config(llama, kv_blocks=120, tiers=tiers, max_requests=4)) as engine:
        yield engine


def erasures(engine: Engine) -> Erasures:
    found: Erasures = engine._running.scheduler.erasures
    return found


def name(engine: Engine, document: str, chunk: Chunk) -> None:
    """Do as a prompt does that names the document of a chunk."""
    canonical = engine.cache._locate(Request([chunk, Text(tokens=(0,))], max_tokens=1))
    assert canonical is not None
    erasures(engine).name(document, canonical)


def erase(engine: Engine, document: str) -> dict[str, Any]:
    began = time.monotonic()
    answer = erasures(engine).erase(document)
    engine.drain()
    assert time.monotonic() - began < 30
    found: dict[str, Any] = answer.result(0)
    return found


def rows(engine: Engine, folder: Path) -> tuple[Rows, Rows, Rows]:
    """What the blocks of the pool, the rows of the host tier, and files hold, zeros left out."""
    client: Any = engine._tier_client
    pool = frozenset(client.digest([block]) for block in range(client._pool.blocks))
    memory = frozenset(row.numpy().tobytes() for row in client._chunks._memory)
    files = frozenset(path.read_bytes()[64:] for path in folder.glob("values/*/*"))
    zeros = client._pool.empty(1).zero_().numpy()
    return pool, memory - {zeros.tobytes()}, files


def pieces(found: Rows, size: int) -> Rows:
    return frozenset(file[i : i + size] for file in found for i in range(0, len(file), size))


@pytest.fixture
def documents(tokens: Any) -> list[Chunk]:
    return [Chunk(tokens=tokens(count, count)) for count in (70, 96, 33)]


def prompts(documents: list[Chunk], question: Text) -> list[Request]:
    """A document's KV under three algorithms and two salts, in chunks and in text."""
    mixed = [Request([*documents, question], a) for a in ("mepic", "naive", "epic:k=4")]
    salted = [replace(request, salt="other") for request in mixed[:2]]
    texts = [Text(tokens=chunk.tokens) for chunk in documents]
    return [*mixed, *salted, Request([*texts, question], "prefix")]


def test_nothing_of_an_erased_document_is_left(engine, folder, documents, question):
    """By what all memory holds: of the pool, of the host tier, and of the folder."""
    engine.reset()
    gone, *kept = documents
    serve(engine, *prompts(kept, question))
    engine.drain()
    digests = engine.cache.digests(kept)
    serve(engine, *prompts(documents, question))
    engine.drain()
    (found,) = engine.cache.digests([gone])
    assert found is not None
    client: Any = engine._tier_client
    size = client._pool.row_bytes
    blocks = [r for r in engine._running.scheduler.chunk_store.records() if r.tokens == 70]
    held = [engine._running.scheduler.chunk_store.blocks_of(record.key) for record in blocks]
    secret = frozenset(client.digest([block]) for blocks in held for block in blocks)
    assert len(blocks) >= 2 and len(secret) >= 5
    pool, memory, files = rows(engine, folder)
    before = sum(1 for _ in folder.glob("values/*/*"))
    assert secret <= pool
    name(engine, "secret", gone)
    assert erase(engine, "secret") == {"chunks": len(blocks), "failed": []}
    after, memory_after, files_after = rows(engine, folder)
    assert not secret & after
    lost = pieces(files, size) - pieces(files_after, size)
    assert lost & memory and not lost & memory_after
    assert before - sum(1 for _ in folder.glob("values/*/*")) == len(blocks)
    assert engine.cache.digests([gone]) == [None]
    assert engine.cache.digests(kept) == digests
    (again,) = serve(engine, Request([*documents, question], "naive"))
    assert again.counts.compiled == 70
    assert engine.cache.digests([gone]) == [found]
    engine.drain()


def test_an_unknown_document_is_no_error(engine):
    assert erase(engine, "nothing") == {"chunks": 0, "failed": []}


def test_requests_under_way_end_and_leave_nothing(engine, folder, documents, question):
    """While they wait, compile, store and generate; they answer as ever."""
    engine.reset()
    requests = [Request([*documents, question], a) for a in ("mepic", "naive", "epic:k=4")]
    expected = [result.tokens for result in serve(engine, *requests)]
    for steps in range(6):
        engine.reset()
        tags = [engine.submit(request, max_tokens=4, ignore_eos=True) for request in requests]
        done = dict[str, Any]()
        for _ in range(steps):
            done |= engine.step()
        for document in documents[:2]:
            name(engine, "early", document)
        answer = erasures(engine).erase("early")
        while len(done) < len(tags):
            done |= engine.step()
        engine.drain()
        assert answer.result(0)["failed"] == []
        assert [done[tag].tokens for tag in tags] == expected
        assert engine.cache.digests(documents[:2]) == [None, None]
        store = engine._running.scheduler.chunk_store
        assert {record.tokens for record in store.records()} <= {33}
        lengths = {len(file) for file in rows(engine, folder)[2]}
        assert lengths <= {3 * engine._tier_client._pool.row_bytes}
    assert engine.drained


def test_pinned_chunks_go_too(engine, documents):
    engine.reset()
    engine.cache.warm(documents, pin=True)
    name(engine, "pinned", documents[0])
    listed = erasures(engine).chunks()
    assert listed["counts"] == {"pool": 3}
    assert sorted(chunk["tokens"] for chunk in listed["chunks"]) == [33, 70, 96]
    assert all(chunk["pinned"] for chunk in listed["chunks"])
    erase(engine, "pinned")
    assert engine.cache.digests(documents[:1]) == [None]
    assert None not in engine.cache.digests(documents[1:])
    engine.cache.unpin(documents[1:])
    engine.reset()


def test_documents_that_begin_alike_keep_what_they_share(engine, tokens):
    engine.reset()
    first = tokens(64, 1)
    gone, kept = Chunk(tokens=first + tokens(32, 2)), Chunk(tokens=first + tokens(48, 3))
    engine.cache.warm([gone, kept])
    before = engine.cache.digests([kept])
    name(engine, "gone", gone)
    erase(engine, "gone")
    assert engine.cache.digests([gone, kept]) == [None, *before]

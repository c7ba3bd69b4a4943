"""The invariants of sharing, each beside a change that breaks it and is noticed."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from picbench.engines.algorithms import parse
from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.engine import Engine
from picbench.engines.pace import Pace, Submission
from picbench.engines.planning import layout, packing
from picbench.engines.planning.keys import computed_key
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.plan import Canonical, Plan
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.engines.request import Chunk, Request, Text

Tokens = tuple[int, ...]


def request(*chunks: Tokens, question: Tokens = (), system: Tokens = (), **kwargs: Any) -> Request:
    segments = [Text(tokens=system), *(Chunk(tokens=c) for c in chunks), Text(tokens=question)]
    return Request([s for s in segments if s.tokens], **kwargs)


def serve(engine: Engine, *requests: Request, max_tokens: int = 3) -> list[Any]:
    return engine.generate(requests, max_tokens=max_tokens, logprobs=5, ignore_eos=True)


def distance(a: Any, b: Any) -> float:
    return max(
        abs(x[t] - y[t])
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
        for t in x.keys() & y.keys()
    )


def plan_of(given: Request, algorithm: str = "mepic", salt: str = "") -> Plan:
    segments = [Segment(s.tokens or (), isinstance(s, Chunk)) for s in given.segments]
    return lay_out(segments, parse(algorithm).plan_chunk, LayoutConfig(scope=salt))


# 1. Limits: link everything and it is full recompute; one chunk alone and it is prefix caching.


def test_linking_whole_chunks_equals_full_recompute(engine, inside, draw):
    # The prompt's first chunk is exempt from linking, but alone in front it needs none.
    prompt = request(draw(64, 1), draw(50, 2), draw(33, 3), question=draw(9, 4))
    (full,) = serve(engine, replace(prompt, algorithm="full"))
    (linked,) = serve(engine, replace(prompt, algorithm="epic:k=64"))
    assert linked.tokens == full.tokens
    assert distance(linked, full) < 1e-3


def test_linking_a_little_less_does_not(engine, inside, draw):
    prompt = request(draw(64, 1), draw(50, 2), draw(33, 3), question=draw(9, 4))
    full, linked = serve(
        engine, replace(prompt, algorithm="full"), replace(prompt, algorithm="epic:k=32")
    )
    assert distance(linked, full) > 0.1


def test_one_chunk_in_front_equals_prefix_caching(engine, inside, draw):
    prompt = request(draw(70, 5), question=draw(11, 6), algorithm="naive")
    serve(engine, prompt)
    (hit,) = serve(engine, prompt)
    (cached,) = serve(engine, replace(prompt, algorithm="prefix"))
    assert hit.tokens == cached.tokens
    assert distance(hit, cached) < 1e-3


# 2. Two prompts that differ in the first document share no block after it.


def shared_behind_first(inside, engine: Engine, one: Request, other: Request) -> set[int]:
    """Ids of the computed blocks that two prompts have in common."""
    ids = []
    for prompt in (one, other):
        serve(engine, prompt)
        computed = [page.key for page in plan_of(prompt).pages if not page.canonical and page.key]
        ids.append({inside.block_of(key) for key in computed})
    return ids[0] & ids[1]


def test_another_first_document_shares_nothing_behind(engine, inside, draw):
    one = request(draw(40, 10), draw(40, 12), question=draw(30, 13))
    other = request(draw(40, 11), draw(40, 12), question=draw(30, 13))
    assert not shared_behind_first(inside, engine, one, other)


def test_keys_blind_to_chunks_would_share(engine, inside, draw, monkeypatch):
    blind = lambda parent, tokens, positions, events=(): computed_key(parent, tokens, positions)  # noqa: E731
    monkeypatch.setattr(packing, "computed_key", blind)
    one = request(draw(40, 10), draw(40, 12), question=draw(30, 13), algorithm="naive")
    other = request(draw(40, 11), draw(40, 12), question=draw(30, 13), algorithm="naive")
    keys = [{p.key for p in plan_of(r, "naive").pages if not p.canonical} for r in (one, other)]
    assert keys[0] & keys[1] - {None}


# 3. Shared blocks are never written after they are registered.


def changed_by(inside, engine: Engine, first: Request, *later: Request) -> bool:
    """Whether any block of `first` differs after `later` requests have used it."""
    serve(engine, first)
    keys = [key for c in plan_of(first).canonicals for key in c.keys]
    before = [inside.content(key) for key in keys]
    serve(engine, *later)
    after = [inside.content(key) for key in keys]
    return any(
        not torch.equal(x, y)
        for b, a in zip(before, after, strict=True)
        for x, y in zip(b, a, strict=True)
    )


def test_shared_blocks_stay_bit_identical(engine, inside, draw):
    a, b = draw(60, 20), draw(45, 21)
    later = [
        request(b, a, question=draw(5, 22), algorithm=algorithm)
        for algorithm in ("mepic", "naive", "epic:k=4", "epic:k=32", "mepic:anchor=head")
    ]
    assert not changed_by(inside, engine, request(a, b, question=draw(7, 23)), *later)


def test_linking_in_place_is_noticed(engine, inside, draw, monkeypatch):
    """A runner that writes linked tokens over the chunk's own slots, as a naive engine would."""
    from picbench.engines.vllm.worker.cpu import backend

    a, b = draw(60, 20), draw(45, 21)
    victim: list[int] = []

    def in_place(key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        store(key, value, kv_cache, slots)
        if victim:
            store(key[:1], value[:1], kv_cache, slots[:1] * 0 + victim[0] * 16)

    store = backend.store
    first = request(a, b, question=draw(7, 23))
    serve(engine, first)
    victim.append(inside.block_of(plan_of(first).canonicals[0].keys[0]))
    monkeypatch.setattr(backend, "store", in_place)
    assert changed_by(inside, engine, first, request(b, a, question=draw(5, 24)))


# 5. A chunk is resident as a whole or not at all.


def half_evicted(inside, engine: Engine, prompt: Request) -> tuple[Any, Any]:
    """A prompt's result before and after one block of its second chunk was evicted."""
    (before,) = serve(engine, prompt)
    middle = plan_of(prompt).canonicals[1].keys[1]
    inside.pool.evict_blocks({inside.block_of(middle)})
    (after,) = serve(engine, prompt)
    return before, after


def test_a_half_evicted_chunk_is_compiled_again(engine, inside, draw):
    prompt = request(draw(50, 30), draw(70, 31), question=draw(8, 32))
    before, after = half_evicted(inside, engine, prompt)
    assert after.counts.compile_work > 0
    assert after.tokens == before.tokens
    assert distance(after, before) < 1e-3


def test_a_chunk_goes_as_a_whole(engine, inside, draw):
    prompt = request(draw(50, 35), draw(70, 36), question=draw(8, 37))
    serve(engine, prompt)
    first, second = plan_of(prompt).canonicals
    inside.pool.evict_blocks({inside.block_of(second.keys[1])})
    resident = inside.store._pool.resident
    assert not any(resident(page.name) for page in second.pages)
    assert all(resident(page.name) for page in first.pages)


def test_a_lookup_that_settles_for_half_is_noticed(engine, inside, draw, monkeypatch):
    def half(self: Canonical, resident: Any) -> bool:
        return any(map(resident, self.keys))

    prompt = request(draw(50, 33), draw(70, 34), question=draw(8, 35))
    serve(engine, prompt)
    monkeypatch.setattr(Canonical, "resident", half)
    monkeypatch.setattr(ChunkStore, "evict", lambda self, page: None)
    _, after = half_evicted(inside, engine, prompt)
    assert after.finish_reason == "error"
    assert "lost a chunk" in after.error


# 6. Whatever ends a request, its blocks come back.


def leaked(inside, engine: Engine, prompt: Request, steps: int) -> int:
    """Blocks missing from the pool after aborting a prompt `steps` steps into its life."""
    free = inside.free
    running = engine._running.engine
    prepared = engine._prepare(prompt, 4, None, True)
    engine._submit(Submission(prepared, time.time(), 0.0))
    for _ in range(steps):
        running.step()
    running.abort_request([prepared.tag])
    return free - inside.free


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_stage_leaks_nothing(engine, inside, draw, steps):
    prompt = request(draw(200, 40 + steps), draw(150, 60 + steps), question=draw(140, 80))
    assert leaked(inside, engine, prompt, steps) == 0
    assert inside.linker.idle
    assert not inside.scheduler.requests


def test_an_interrupted_call_leaves_nothing_of_its_requests(engine, inside, draw, monkeypatch):
    """Neither of those that had ended nor of the others, if it is interrupted between steps."""
    asked = [request(draw(40, 1), question=draw(5, n), max_tokens=n) for n in (1, 30)]
    before = set(inside.linker._costs)

    def interrupted(self: Pace[Any]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Pace, "finished", interrupted)
        engine.generate(asked, ignore_eos=True)
    engine.drain()
    assert inside.linker._costs.keys() == before
    assert engine.drained


def test_blocks_that_a_running_step_may_still_write_are_counted(engine, inside, draw, monkeypatch):
    """Asynchronous schedulers free a request's blocks a step after it ended."""
    frees = []

    def at_once(ended: Any) -> bool:
        frees.append(ended.request_id)
        return len(frees) > 1

    monkeypatch.setattr(inside.scheduler, "defer_block_free", True)
    monkeypatch.setattr(inside.scheduler, "_request_blocks_can_be_freed", at_once)
    free = inside.free
    serve(engine, request(question=draw(40, 1)), request(draw(70, 2), question=draw(90, 3)))
    assert len(frees) == 3
    assert not inside.scheduler.deferred_frees
    assert inside.free == free


def test_holding_on_after_an_abort_is_noticed(engine, inside, draw, monkeypatch):
    monkeypatch.setattr(type(inside.linker), "_release", lambda self, link: link.held.clear())
    prompt = request(draw(100, 90), draw(150, 91), question=draw(9, 92))
    assert leaked(inside, engine, prompt, 2) > 0
    # Give the module's engine its blocks back.
    lost = [block for block in inside.pool.blocks[1:] if block.ref_cnt]
    inside.pool.free_blocks(lost)


# 7. Tenants never share.


def test_another_salt_hits_nothing(engine, inside, draw):
    prompt = request(
        draw(60, 95), draw(60, 96), system=draw(40, 97), question=draw(20, 98), salt="a"
    )
    serve(engine, prompt)
    mine, theirs = (serve(engine, replace(prompt, salt=salt))[0] for salt in ("a", "b"))
    assert mine.counts.compile_work == 0
    assert mine.hits.chunk and mine.hits.prefix
    assert theirs.counts.compile_work == 120
    assert theirs.hits.prefix == 0
    assert theirs.tokens == mine.tokens


def test_chunk_keys_without_salt_would_share(engine, inside, draw, monkeypatch):
    unsalted = layout.anchor_key
    monkeypatch.setattr(layout, "anchor_key", lambda scope, anchor: unsalted("", anchor))
    prompt = request(draw(60, 99), draw(60, 100), question=draw(20, 101), salt="a")
    serve(engine, prompt)
    (theirs,) = serve(engine, replace(prompt, salt="b"))
    assert theirs.counts.compile_work == 0

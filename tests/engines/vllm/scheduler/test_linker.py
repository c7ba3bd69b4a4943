"""What is compiled, referenced and counted for requests; nothing is computed."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_bench import Bench, bench
from vllm.v1.request import RequestStatus

from picbench.engines.chunk_cache.transfers import TransferResults
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.keys import is_canonical
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.scheduler.isolation import IsolatedLinker
from picbench.engines.vllm.scheduler.linker import Linker
from picbench.engines.vllm.scheduler.pool import key_of
from picbench.errors import EngineError

#: Chunks of two, of two and a half and of three blocks.
A, B, C = tuple(range(100, 132)), tuple(range(200, 240)), tuple(range(300, 348))


def linker(given: Bench) -> Any:
    return given.scheduler.linker


def keys(given: Bench) -> list[bytes]:
    """The keys of all blocks that could be found."""
    found = map(key_of, given.scheduler.kv_cache_manager.block_pool.blocks)
    return [key for key in found if key is not None]


def preempt(given: Bench, request: Any) -> None:
    given.scheduler.running.remove(request)
    given.scheduler._preempt_request(request, 0.0)


def test_only_the_head_of_the_queue_references_chunks(llama: Path) -> None:
    """Else two requests could keep from each other the blocks that their other chunks need."""
    given = bench(llama, batch_tokens=16)
    given.submit("warm", A, B)
    given.run()
    given.submit("busy", question=tuple(range(400)))
    given.step()
    for name, chunk in (("first", A), ("second", B)):
        given.submit(name, chunk, C)
    given.step()
    first = linker(given).plan_of("first").canonicals[0]
    assert sorted(map(key_of, linker(given).held())) == sorted(first.keys)
    given.run()
    assert given.free == 60


def test_a_running_request_references_its_blocks_once(llama: Path) -> None:
    """Also one that lost its blocks and got them back."""
    given = bench(llama, batch_tokens=200)
    request = given.submit("one", A, B, algorithm="mepic", max_tokens=8)
    given.step()
    preempt(given, request)
    assert not linker(given)._links["one"].running
    given.step()
    assert linker(given)._links["one"].running
    assert linker(given).held() == []
    [blocks] = given.scheduler.kv_cache_manager.get_blocks("one").blocks
    assert {block.ref_cnt for block in blocks} == {1}
    given.run()
    assert given.free == 60


def test_the_head_of_the_queue_leaves_blocks_to_those_that_are_scheduled_first(
    llama: Path,
) -> None:
    given = bench(llama, batch_tokens=16)
    given.submit("warm", A)
    given.run()
    given.submit("busy", question=tuple(range(400)))
    given.step()
    given.submit("waits", A, C)
    given.step()
    assert len(linker(given).held()) == 2
    for reserved, held in ((given.free, 2), (given.free + 1, 0)):
        linker(given).before_schedule(given.scheduler.waiting, reserved)
        assert len(linker(given).held()) == held
    given.run()


def test_a_request_that_misses_nothing_references_nothing_while_it_waits(llama: Path) -> None:
    given = bench(llama, batch_tokens=16)
    given.submit("warm", A)
    given.run()
    given.submit("busy", question=tuple(range(400)))
    given.step()
    given.submit("waits", A)
    given.step()
    assert linker(given).held() == []
    given.run()


def test_a_request_that_runs_is_not_preempted_for_chunks_that_the_head_holds(llama: Path) -> None:
    given = bench(llama, blocks=8, batch_tokens=16)
    given.submit("warm", A)
    given.run()
    busy = given.submit("busy", question=tuple(range(31)), max_tokens=70)
    given.step()
    given.step()
    given.submit("waits", A, C)
    given.run(200)
    assert busy.num_preemptions == 0
    assert set(given.ended) == {"warm", "busy", "waits"}


def test_no_request_computes_a_chunk_in_its_own_context(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is gone between the lookup and the use of it ends its request."""
    given = bench(llama)
    request = given.submit("one", A, B)
    shared = linker(given).plan_of("one").shared
    linker(given).check_hits(request, shared * BLOCK_SIZE)
    with pytest.raises(EngineError, match="lost a chunk"):
        linker(given).check_hits(request, shared * BLOCK_SIZE - 1)
    monkeypatch.setattr(Linker, "before_schedule", lambda *_: None)
    monkeypatch.setattr(Linker, "can_schedule", lambda *_: True)
    assert given.step().tokens == {}
    given.step()
    assert "lost a chunk" in given.ended["one"].stop_reason
    assert given.free == 60


@pytest.mark.parametrize("alike", [True, False], ids=["nothing left", "a page left"])
def test_a_load_that_a_request_waits_for_is_commanded(llama: Path, alike: bool) -> None:
    """Of chunks that begin alike, the first of which is copied from the pool."""
    given = bench(llama, tiers="host:1MiB")
    first, second = (*A[:16], *B[:16]), (*A[:16], *C[: 0 if alike else 16])
    given.submit("warm", first, second, algorithm="epic:k=4")
    given.step()
    one, two = linker(given).plan_of("warm").canonicals
    given.run()
    given.step(TransferResults(stored={two.key}, refused={one.key}))
    store = given.scheduler.chunk_store
    assert (store.is_remote(one.key), store.is_remote(two.key)) == (False, True)
    given.submit("waits", first, second, algorithm="epic:k=4")
    loads = given.schedule().commands.loads
    assert [load.request_id for load in loads] == ["waits"] * (not alike)
    assert linker(given).held() == []
    given.finish()
    found = [(chunk.pages, chunk.size) for load in loads for chunk in load.chunks]
    assert found == [((1,), 2)] * (not alike)
    given.step(loaded={load.request_id for load in loads})
    given.run()
    assert given.free == 60


def test_a_fetch_loads_what_another_chunk_has_not_brought(llama: Path) -> None:
    """Two chunks begin alike."""
    given = bench(llama, tiers="host:1MiB")
    first, second = (*A[:16], *B[:16]), (*A[:16], *C[:16])
    given.submit("warm", second)
    given.run()
    [record] = given.scheduler.chunk_store
    given.step(TransferResults(stored={record.key}))
    assert given.scheduler.reset_prefix_cache()
    given.submit("other", first)
    given.run()
    given.submit("waits", second)
    [load] = given.schedule().commands.loads
    [canonical] = linker(given).plan_of("waits").canonicals
    begin = linker(given)._pool.block_id(canonical.pages[0].name)
    [chunk] = load.chunks
    assert (chunk.pages, chunk.size, len(chunk.blocks)) == ((1,), 2, 1)
    assert begin not in chunk.blocks
    given.finish(loaded={load.request_id})
    given.run()
    assert given.free == 60


def test_nothing_is_requested_for_a_request_that_is_to_be_ended(llama: Path) -> None:
    given = bench(llama)
    given.submit("one", A)
    given.scheduler._faults.blame("one", "injected")
    linker(given).before_schedule(given.scheduler.waiting, 0)
    assert len(given.scheduler.jobs) == 0
    given.run()
    assert given.ended["one"].stop_reason == "injected"


def test_a_reference_is_taken_once_for_a_page_that_two_chunks_begin_with(llama: Path) -> None:
    given = bench(llama, batch_tokens=16)
    begin = A[:16]
    first, second = (*begin, *B[:16]), (*begin, *C[:16])
    given.submit("warm", first, second)
    given.run()
    given.submit("busy", question=tuple(range(400)))
    given.step()
    given.submit("waits", first, second, C)
    for _ in range(3):
        given.step()
        assert {block.ref_cnt for block in linker(given).held()} == {1}
    given.run()
    assert given.free == 60


@pytest.mark.parametrize(
    "algorithm", ["full", "epic:k=16", "cacheblend:r=0.5", "mepic:select=question", "mepic"]
)
@pytest.mark.parametrize("ends", [True, False], ids=["done", "preempted"])
def test_nothing_private_stays_in_the_cache(llama: Path, algorithm: str, ends: bool) -> None:
    """Blocks that no request can find must not displace others that one could."""
    given = bench(llama, batch_tokens=300)
    request = given.submit(
        "one", A, C, question=tuple(range(40)), algorithm=algorithm, max_tokens=4
    )
    given.step()
    given.step()
    if not ends:
        preempt(given, request)
    else:
        given.run()
        assert not linker(given)._isolated
    found = [is_canonical(key) for key in keys(given)]
    if algorithm == "mepic":
        assert set(found) == {True, False}
    else:
        assert found == [True] * (0 if algorithm == "full" else 5)


@pytest.mark.parametrize(("blocks", "compiles"), [(7, 2), (6, 1)])
def test_chunks_are_requested_for_as_many_as_fit(llama: Path, blocks: int, compiles: int) -> None:
    given = bench(llama, blocks=blocks, batch_tokens=16)
    for name, chunk in (("three", A), ("four", C)):
        given.submit(name, chunk)
    given.step()
    assert sum(map(linker(given).is_own, given.scheduler.requests.values())) == compiles
    given.run()
    assert given.ended.keys() == {"three", "four"}


def test_an_abort_ends_the_compiles_that_nobody_else_waits_for(llama: Path) -> None:
    given = bench(llama, batch_tokens=16)
    given.submit("one", A, B)
    given.submit("two", B)
    given.step()
    assert len(given.scheduler.requests) == 4
    given.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    [own] = [r for r in given.scheduler.requests.values() if linker(given).is_own(r)]
    assert own.num_prompt_tokens == len(B)
    given.run()
    assert set(given.ended) == {"two"}


def test_a_step_looks_at_as_many_waiting_requests_as_fit(llama: Path) -> None:
    """Else each step takes longer, the more requests wait."""
    given = bench(llama, blocks=12, batch_tokens=16)
    for index in range(40):
        given.submit(f"{index}", A, B)
    seen: list[str] = []

    class Waiting:
        def __iter__(self) -> Iterator[Any]:
            for request in list(given.scheduler.waiting):
                seen.append(request.request_id)
                yield request

    linker(given).before_schedule(Waiting(), 0)
    assert set(seen) == {"0", "1", "2"}  # The last one is the first that does not fit.
    given.run(200)
    assert len(given.ended) == 40
    assert given.free == 12


def test_of_a_request_that_waits_one_missing_chunk_is_looked_for(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step asks about all requests that wait, as long as it has tokens left."""
    given = bench(llama, batch_tokens=16)
    request = given.submit("one", A, B, C)
    asked: list[Any] = []
    monkeypatch.setattr(type(linker(given)._store), "is_mappable", lambda store, c: asked.append(c))
    assert not linker(given).can_schedule(request)
    assert len(asked) == 1
    monkeypatch.undo()
    given.run()
    assert given.free == 60


def test_a_request_that_does_not_fit_any_more_references_nothing(llama: Path) -> None:
    """A more urgent one has come: it needs the blocks."""
    given = bench(llama, blocks=14, batch_tokens=16, policy="priority")
    given.submit("warm", A)
    given.run()
    given.submit("busy", question=tuple(range(60)), max_tokens=4)
    given.step()
    given.submit("late", A, C, priority=2)
    given.step()
    assert linker(given).held() != []
    for name in ("first", "second", "third"):
        given.submit(name, B, priority=1)
    linker(given).before_schedule(given.scheduler.waiting, 0)
    assert linker(given).held() == []
    given.run()
    assert given.free == 14


def test_an_abort_does_not_go_through_the_chunks_of_all_who_wait(llama: Path) -> None:
    """Else ending requests one by one takes time in the square of their number."""
    given = bench(llama, batch_tokens=16)
    given.submit("one", A)
    given.submit("two", B)
    given.step()
    assert len(given.scheduler.requests) == 4
    given.submit("three", C)
    others = [link for name, link in linker(given)._links.items() if name != "three"]
    plans = [link.plan for link in others]
    for link in others:
        link.plan = None
    given.scheduler.finish_requests("three", RequestStatus.FINISHED_ABORTED)
    assert linker(given).orphans() == []
    for link, plan in zip(others, plans, strict=True):
        link.plan = plan
    given.run()
    assert set(given.ended) == {"one", "two"}


def test_blocks_in_use_are_not_needed_again(llama: Path) -> None:
    given = bench(llama, batch_tokens=200)
    one = given.submit("one", A, B, max_tokens=30)
    assert linker(given).blocks_needed(one) == 2 + 3 + 2
    given.step()
    two = given.submit("two", B, A, max_tokens=30)
    assert linker(given).blocks_needed(two) == 2
    copies = given.submit("copies", A, B, algorithm="epic:k=16", max_tokens=30)
    assert linker(given).blocks_needed(copies) == linker(given)._links["copies"].need
    plain = given.submit("plain", question=(7,) * 17, max_tokens=16)
    assert linker(given).blocks_needed(plain) == 3
    given.run()
    # Idle blocks are available to others, and are taken from them again.
    later = given.submit("later", A, B, max_tokens=30)
    assert all(map(linker(given)._store.is_mappable, linker(given).plan_of("later").canonicals))
    assert linker(given).blocks_needed(later) == 2 + 3 + 2
    given.run()


def test_a_compile_is_charged_to_the_request_that_needed_it_first(llama: Path) -> None:
    """All of what it computes, also what it computes again because it lost its blocks."""
    given = bench(llama, batch_tokens=32)
    given.submit("one", C, tag="one")
    given.submit("two", C, tag="two")
    given.step()
    own = next(r for r in given.scheduler.running if linker(given).is_own(r))
    preempt(given, own)
    given.scheduler.reset_prefix_cache()
    given.run()
    costs = {name: linker(given).take_cost(name) for name in ("one", "two")}
    found = {name: (c.tokens.compile_work, c.tokens.compiled) for name, c in costs.items()}
    assert found == {"one": (96, 48), "two": (0, 0)}
    assert [cost.tokens.reused for cost in costs.values()] == [0, 48]
    assert {name: cost.hits.chunk for name, cost in costs.items()} == {"one": 3, "two": 3}
    assert linker(given).take_cost("one") is None


def test_what_is_compiled_for_a_request_that_is_gone_is_charged_to_the_next(llama: Path) -> None:
    """For it, nothing was cached; for one that comes when the chunk is there, all of it is."""
    given = bench(llama, batch_tokens=32)
    for name in ("one", "two", "three"):
        given.submit(name, C, tag=name)
    given.step()
    for name in ("one", "two"):
        given.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    given.run()
    given.submit("later", C, tag="later")
    given.run()
    tokens = [linker(given).take_cost(name).tokens for name in ("three", "later")]
    assert [(found.reused, found.compiled) for found in tokens] == [(0, 48), (48, 0)]


def test_computed_blocks_that_were_found_are_counted(llama: Path) -> None:
    given = bench(llama)
    question = tuple(range(2 * BLOCK_SIZE + 3))
    for name in ("one", "two"):
        given.submit(name, A, question=question, tag=name)
        given.run()
    hits = [linker(given).take_cost(name).hits for name in ("one", "two")]
    assert [(found.chunk, found.prefix) for found in hits] == [(2, 0), (2, 2)]
    assert [record.hits for record in given.scheduler.chunk_store] == [1]
    given.submit("copies", A, question=question, algorithm="epic:k=16", tag="copies")
    given.run()
    found = linker(given).take_cost("copies").hits
    assert (found.chunk, found.copied, found.prefix) == (0, 2, 0)


def test_linked_tokens_and_pads_are_counted(llama: Path) -> None:
    """Linked tokens that were found are not linked again; pads take slots every time."""
    given = bench(llama)
    for name in ("one", "two"):
        given.submit(name, B, question=tuple(range(40)), algorithm="mepic", tag=name)
        given.run()
    tokens = [linker(given).take_cost(name).tokens for name in ("one", "two")]
    assert [(found.linked, found.padded) for found in tokens] == [(16, 8), (0, 8)]


def test_waiting_requests_know_the_slots_that_they_will_compute(llama: Path) -> None:
    given = bench(llama)
    given.submit("one", A, tag="one")
    assert linker(given).new_slots("one") == 2 * BLOCK_SIZE + BLOCK_SIZE
    given.run()
    given.submit("two", A, B, tag="two")
    assert linker(given).new_slots("two") == 3 * BLOCK_SIZE + BLOCK_SIZE
    given.submit("linked", C, algorithm="mepic", tag="linked")
    assert linker(given).new_slots("linked") == 3 * BLOCK_SIZE + 2 * BLOCK_SIZE
    given.submit("plain")
    assert linker(given).new_slots("plain") is None
    given.run()


def test_a_cost_is_that_of_the_first_time(llama: Path) -> None:
    """A request that starts over finds its own blocks, which the cache did not have before."""
    given = bench(llama, batch_tokens=200)
    request = given.submit("one", A, question=tuple(range(40)), tag="one", max_tokens=4)
    given.step()
    preempt(given, request)
    given.run()
    cost = linker(given).take_cost("one")
    assert (cost.hits.prefix, cost.tokens.reused, cost.tokens.compiled) == (0, 0, 32)


def test_a_prompt_is_counted_once_however_often_it_starts_over(llama: Path) -> None:
    given = bench(llama, batch_tokens=200, counts=True)
    request = given.submit("one", A, question=tuple(range(40)), max_tokens=4)
    given.step()
    preempt(given, request)
    given.run()
    counted = [stats.prefix_cache_stats for stats in given.counted]
    assert sum(stats.requests for stats in counted) == 1
    assert sum(stats.queries for stats in counted) == len(A) + 40


def test_a_compile_ends_with_one_request_that_waits_for_it(llama: Path) -> None:
    """The one that needed it first; after that was aborted, or runs, another."""
    given = bench(llama, batch_tokens=16)
    for name in ("one", "two"):
        given.submit(name, C)
    given.submit("other", A)
    given.step()
    own = next(r.request_id for r in given.scheduler.running if linker(given).is_own(r))
    assert linker(given).concerned("one") == ("one",)
    assert linker(given).concerned(own) == (own, "one")
    linker(given)._links["one"].running = True
    assert linker(given).concerned(own) == (own, "two")
    linker(given)._links["one"].running = False
    given.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    assert linker(given).concerned(own) == (own, "two")
    given.run()


def test_a_request_that_starts_over_is_in_no_batch(llama: Path) -> None:
    """It has its chunks, and does not wait until those of a new batch are compiled."""
    given = bench(llama, batch_tokens=60, compile_order="batch")
    request = given.submit("one", A, max_tokens=8)
    for _ in range(2):
        given.step()
    given.submit("plain")  # While it waits, the batch of the first request ends.
    given.step()
    preempt(given, request)
    given.submit("two", C)
    assert "one" in given.step().tokens
    given.run()


def test_a_compile_that_fails_ends_its_request_and_is_no_answer(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Linker, *_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(Linker, "_owner", fail)
    given = bench(llama)
    given.submit("one", A)
    given.submit("plain")
    given.run()
    assert given.ended.keys() == {"one", "plain"}
    assert "injected" in given.ended["one"].stop_reason
    assert given.free == 60
    assert linker(given).idle


def test_loaded_blocks_are_counted_for_the_request_that_waits(llama: Path) -> None:
    given = bench(llama, tiers="host:1MiB")
    given.submit("one", A)
    given.run()
    [record] = given.scheduler.chunk_store
    given.step(TransferResults(stored={record.key}))
    assert given.scheduler.reset_prefix_cache()
    given.submit("two", A, tag="two")
    [load] = given.schedule().commands.loads
    assert [chunk.pages for chunk in load.chunks] == [(0, 1)]
    served = {load.request_id: {record.key: "host"}}
    given.finish(TransferResults(served=served), loaded={load.request_id})
    given.run()
    cost = linker(given).take_cost("two")
    assert (cost.hits.tiers, cost.hits.chunk) == ({"host": 2}, 2)
    assert (cost.tokens.reused, cost.tokens.compiled) == (cost.tokens.loaded["host"], 0)


@pytest.mark.parametrize("algorithms", [("epic:k=16", "naive"), ("epic:k=16", "epic:k=4")])
def test_a_chunk_that_one_request_maps_stays(llama: Path, algorithms: tuple[str, str]) -> None:
    """Those that are only copied leave the pool once a tier has them."""
    given = bench(llama, tiers="host:1MiB", batch_tokens=16)
    for name, algorithm in enumerate(algorithms):
        given.submit(str(name), A, algorithm=algorithm)
    given.run()
    whole = [record.whole for record in given.scheduler.chunk_store]
    assert whole == [True] * ("naive" in algorithms)


class _Broken:
    """A linker that can neither finish nor abandon requests."""

    def is_own(self, request: Any) -> bool:
        return False

    def on_finished(self, request: Any, block_ids: tuple[int, ...], *, success: bool) -> None:
        raise RuntimeError("finish")

    def abandon(self, request: Any) -> None:
        raise RuntimeError("abandon")


def test_a_request_that_cannot_be_cleaned_up_is_answered() -> None:
    faults = Faults()
    hooks = IsolatedLinker(_Broken(), faults)  # type: ignore[arg-type]
    request: Any = SimpleNamespace(request_id="0", client_index=3)
    hooks.on_finished(request, (), success=True)
    assert hooks.ended == {"0": 3}
    assert "RuntimeError: finish" in faults.take()["0"]

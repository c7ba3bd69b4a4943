"""Schedulers without engines: what requests find in their blocks, and what is left of them."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kv_contents import Tiers, Workers
from scheduler_bench import Bench, bench
from scheduler_storm import Storm, reset
from vllm.v1.request import RequestStatus

from picbench.engines.chunk_cache.transfers import LoadCommand, TransferResults
from picbench.engines.vllm.settings import REJECTED
from picbench.errors import EngineError


@pytest.mark.parametrize("seed", range(12))
def test_a_storm_reads_what_it_should_and_leaks_nothing(llama: Path, seed: int) -> None:
    storm = Storm(seed, llama)
    ended = storm.run(60)
    assert len(ended) > 20
    errors = [output.stop_reason for output in ended.values() if output.stop_reason]
    assert all("--num-gpu-blocks-override" in error for error in errors)
    assert storm.bench.free == storm.free
    assert storm.scheduler.linker.idle


@pytest.mark.parametrize("order", ["head", "batch"])
def test_chunks_of_a_request_that_waits_long_are_not_compiled_all_the_while(
    llama: Path, order: str
) -> None:
    """Requests before it evict them: ahead of the queue, they would be compiled again and again."""
    dice = random.Random(0)
    given = bench(llama, blocks=60, batch_tokens=16, compile_order=order)
    plain, compiled = 0, set[str]()
    for _ in range(300):
        while len(given.scheduler.waiting) < 8 and "waits" not in given.scheduler.requests:
            plain += 1
            question = tuple(dice.randrange(900) for _ in range(dice.randint(20, 60)))
            given.submit(f"plain {plain}", question=question, max_tokens=dice.randint(60, 120))
        if plain > 10 and "waits" not in given.scheduler.requests:
            chunks = [tuple(range(first, first + 100)) for first in range(1000, 6000, 1000)]
            given.submit("waits", *chunks)
        compiled |= {name for name in given.step().tokens if name.startswith("pic-")}
    assert "waits" in given.ended
    assert 5 <= len(compiled) <= 20


# Of 40, those in which it happens.
@pytest.mark.parametrize("seed", [1, 11, 12, 14, 16, 21, 31])
def test_a_request_that_loses_its_step_leaves_no_keys(llama: Path, seed: int) -> None:
    """A step computes several blocks of a prompt, and a later request may preempt it there."""
    dice = random.Random(seed)
    given = bench(
        llama,
        blocks=dice.choice([20, 24, 30]),
        batch_tokens=dice.choice([48, 64, 100]),
        policy="priority",
    )
    scheduler: Any = given.scheduler
    scheduler.scheduler_config.long_prefill_token_threshold = 48
    scheduler.scheduler_reserve_full_isl = dice.choice([True, False])
    workers, number = Workers(scheduler, Tiers(0, dice)), 0
    for _ in range(300):
        while len(scheduler.requests) < 6:
            number += 1
            if dice.random() < 0.4:
                first = 1000 + 200 * dice.randint(0, 5)
                chunk = tuple(range(first, first + dice.choice([96, 128, 150])))
                given.submit(f"chunk {number}", chunk, max_tokens=dice.choice([2, 20]), priority=5)
            else:
                question = tuple(dice.randrange(900) for _ in range(dice.randint(5, 30)))
                given.submit(f"plain {number}", question=question, max_tokens=dice.randint(20, 60))
        step = given.schedule()
        workers.run(step)
        workers.check(step)
        assert not workers.keys_of_nothing()
        given.finish()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("algorithm", ["naive", "epic:k=16"])
def test_a_load_is_dropped_with_the_cache(llama: Path, algorithm: str, ahead: bool) -> None:
    """The tier goes on to write: its blocks are given to no one before that has ended."""
    given, chunk = bench(llama, tiers="disk:/x:1MiB", ahead=ahead), tuple(range(100, 148))
    given.submit("busy", question=(7,) * 40, max_tokens=40)
    given.submit("waits", chunk, algorithm=algorithm)
    load = load_of(given)
    blocks = {block for part in load.chunks for block in part.blocks}
    reset(given.scheduler)
    assert all(given.scheduler.kv_cache_manager.block_pool.blocks[i].ref_cnt for i in blocks)
    given.step(loaded={load.request_id})
    again = load_of(given)
    given.step(loaded={again.request_id})
    given.run()
    assert {output.finish_reason.name for output in given.ended.values()} == {"LENGTH"}
    assert given.free == 60


@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_loaded_is_dropped_with_the_cache(llama: Path, ahead: bool) -> None:
    """The request has its chunk, and no step has scheduled it since."""
    given, chunk = bench(llama, tiers="disk:/x:1MiB", ahead=ahead), tuple(range(100, 148))
    given.submit("waits", chunk, algorithm="epic:k=16")
    load = load_of(given)
    given.step(loaded={load.request_id})
    reset(given.scheduler)
    assert given.free == 60
    assert not given.scheduler._inflight_prefills
    again = load_of(given)
    given.step(loaded={again.request_id})
    given.run()
    assert given.free == 60


def test_a_load_that_fails_keeps_no_blocks(llama: Path) -> None:
    """Else loads that fail together keep so many that none of them can be tried again."""
    given, chunk = bench(llama, tiers="disk:/x:1MiB"), tuple(range(100, 148))
    request = given.submit("waits", chunk, algorithm="epic:k=16")
    load = load_of(given)
    assert request in given.scheduler._inflight_prefills
    given.step(TransferResults(lost={load.chunks[0].key}), failed={load.request_id})
    given.schedule()
    assert request not in given.scheduler._inflight_prefills
    given.finish()
    given.run()
    assert given.free == 60


def test_a_request_with_its_blocks_waits_for_no_chunk(llama: Path) -> None:
    """The tier may lose the chunk after it was loaded."""
    given, chunk = bench(llama, tiers="disk:/x:1MiB"), tuple(range(100, 148))
    given.submit("waits", chunk, algorithm="epic:k=16")
    load = load_of(given)
    lost = TransferResults(absent={load.chunks[0].key})
    given.step(lost, loaded={load.request_id})
    assert "waits" in given.step().tokens
    given.run()


def load_of(given: Bench) -> LoadCommand:
    """The load that is commanded after lookups have found everything."""
    found = TransferResults()
    for _ in range(4):
        step = given.step(found)
        found.present.update(step.commands.lookups)
        if step.commands.loads:
            return step.commands.loads[0]
    raise AssertionError("nothing is loaded")


def test_pinned_chunks_are_not_dropped(llama: Path) -> None:
    """Nothing is preempted in vain."""
    given, chunk = bench(llama), tuple(range(100, 148))
    given.submit("first", chunk)
    given.run()
    store = given.scheduler.chunk_store
    [record] = store
    assert store.pin(record.key)
    pinned = {block.block_id for block in given.scheduler.linker.held()}
    assert pinned == set(store.blocks_of(record.key))
    running = given.submit("second", question=(7,) * 40, max_tokens=4)
    given.step()
    with pytest.raises(EngineError, match=r"pinned .*unpin"):
        given.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert running.status == RequestStatus.RUNNING
    store.unpin(record.key)
    reset(given.scheduler)
    given.run()


def test_a_request_is_rejected_only_if_blocks_are_short(llama: Path) -> None:
    given = bench(llama, blocks=40, on_pressure="reject")
    given.submit("thirty", question=(7,) * 470, max_tokens=10)
    given.submit("ten", question=(7,) * 150, max_tokens=10)
    given.submit("one", max_tokens=1)
    given.step()
    assert [*given.ended] == ["one"]
    assert given.ended["one"].stop_reason == REJECTED
    given.run()
    assert given.ended.keys() == {"one", "ten", "thirty"}
    assert given.free == 40


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_of_the_linker_are_in_no_gauge(llama: Path, policy: str) -> None:
    """Two requests need five chunks: compiles run, and others wait for room in a step."""
    given = bench(llama, batch_tokens=24, counts=True, policy=policy)
    chunks = [tuple(range(100 * n, 100 * n + 40)) for n in range(1, 6)]
    scheduler, seen = given.scheduler, set[str]()
    given.submit("first", *chunks[:3], max_tokens=3)
    given.submit("second", *chunks[2:], max_tokens=3)
    while scheduler.requests:
        given.step()
        seen |= {request.status.name for request in scheduler.jobs.requests()}
        theirs = [r for r in scheduler.requests.values() if not scheduler.linker.is_own(r)]
        waiting = [r for r in theirs if r.status != RequestStatus.RUNNING]
        skipped = [r for r in waiting if r in scheduler.deferred_waiting]
        counts = given.counted[-1]
        assert counts.num_running_reqs == len(theirs) - len(waiting)
        assert counts.num_waiting_reqs == len(waiting) - len(skipped)
        assert counts.num_skipped_waiting_reqs == len(skipped)
    assert seen >= {"RUNNING", "WAITING"}


def test_loads_of_the_linker_are_in_no_gauge(llama: Path) -> None:
    given = bench(llama, tiers="disk:/x:1MiB", counts=True)
    given.submit("waits", tuple(range(100, 148)))
    load = load_of(given)
    for _ in range(2):
        counts = given.counted[-1]
        found = (counts.num_running_reqs, counts.num_waiting_reqs + counts.num_skipped_waiting_reqs)
        assert found == (0, 1)
        given.step()
    given.step(loaded={load.request_id})
    given.run()


def test_compiles_that_wait_are_no_requests_that_need_blocks(llama: Path) -> None:
    given = bench(llama, blocks=40, batch_tokens=16, on_pressure="reject")
    given.submit("busy", question=(7,) * 300)
    given.step()
    waits = given.submit("waits", tuple(range(100, 148)))
    given.step()
    linker = given.scheduler.linker
    assert [request.request_id for request in given.scheduler.waiting if linker.is_own(request)]
    room = given.free - linker.blocks_needed(waits)
    given.submit("fits", question=(7,) * (16 * room - 1))
    given.run()
    assert {output.finish_reason.name for output in given.ended.values()} == {"LENGTH"}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_is_linked_in_the_step_of_its_compile(llama: Path, policy: str) -> None:
    given = bench(llama, policy=policy)
    given.submit("one", tuple(range(100, 140)))
    [tokens] = given.run()
    assert [*tokens.values()] == [40, 2]


@pytest.mark.parametrize("algorithm", ["epic:k=4", "mepic:select=question"])
def test_what_is_copied_or_picked_from_was_computed_in_a_step_before(
    llama: Path, algorithm: str
) -> None:
    given = bench(llama)
    given.submit("one", tuple(range(100, 140)), algorithm=algorithm)
    first, second = given.run()
    assert ("one" in first, "one" in second) == (False, True)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("head", ["own", "late", "own", "last"]),
        ("batch", ["own", "own", "late", "last"]),
        ("isps", ["late", "last", "own", "own"]),
    ],
)
def test_compiles_are_queued_where_the_order_says(
    llama: Path, order: str, expected: list[str]
) -> None:
    """While a planned request runs, and nothing else fits into a step."""
    given = bench(llama, batch_tokens=16, compile_order=order)
    given.submit("busy", tuple(range(100, 132)), question=tuple(range(300)))
    for _ in range(4):
        given.step()
    for name, at in (("late", 400), ("last", 500)):
        given.submit(name, tuple(range(at, at + 40)))
    given.step()
    own = given.scheduler.linker.is_own
    assert ["own" if own(r) else r.request_id for r in given.scheduler.waiting] == expected
    given.run()


@pytest.mark.parametrize("order", ["head", "isps"])
def test_a_compile_has_the_priority_of_its_request(llama: Path, order: str) -> None:
    given = bench(llama, batch_tokens=16, compile_order=order, policy="priority")
    given.submit("busy", tuple(range(100, 132)), question=tuple(range(300)))
    for _ in range(4):
        given.step()
    given.submit("late", tuple(range(400, 440)), priority=5)
    given.step()
    assert [request.priority for request in given.scheduler.jobs.requests()] == [5]
    given.run()


def test_a_plain_request_has_chunks_unpinned_that_it_needs_the_blocks_of(llama: Path) -> None:
    given = bench(llama, blocks=8)
    given.submit("first", tuple(range(100, 148)))
    given.run()
    store = given.scheduler.chunk_store
    [record] = store
    assert store.pin(record.key)
    given.submit("fits", question=(7,) * 60)
    given.run()
    assert store.pinned
    given.submit("plain", question=(7,) * 100)
    given.run()
    assert not store.pinned


def test_a_compile_is_as_urgent_as_the_request_that_waits_for_it(llama: Path) -> None:
    given = bench(llama, batch_tokens=16, policy="priority")
    chunk = tuple(range(100, 140))
    given.submit("busy", question=(7,) * 64)
    given.step()
    given.submit("late", chunk, priority=9)
    given.step()
    given.submit("middle", question=(7,) * 20, priority=5)
    given.submit("first", chunk, priority=1)
    given.run()
    assert [*given.ended] == ["busy", "first", "middle", "late"]


def test_a_compile_is_queued_by_priority_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To take a request out of such a queue takes longer, the more requests wait."""
    given = bench(llama, batch_tokens=16, policy="priority")
    for index in range(3):
        chunks = [tuple(range(at + index, at + 40 + index)) for at in (100, 300)]
        given.submit(f"{index}", *chunks, priority=index)
    removed: list[str] = []
    queue = type(given.scheduler.waiting)
    upstream = queue.remove_request

    def remove_request(self: Any, request: Any) -> None:
        removed.append(request.request_id)
        upstream(self, request)

    monkeypatch.setattr(queue, "remove_request", remove_request)
    for _ in range(2):
        given.step()
        assert len(given.scheduler.requests) == 9
        assert removed == []
    given.run()
    assert [*given.ended] == ["0", "1", "2"]


@pytest.mark.parametrize(("said", "expected"), [(None, True), (False, False), (True, True)])
def test_whether_a_model_has_reasoned_is_read_only_where_nobody_said(
    llama: Path, said: bool | None, expected: bool
) -> None:
    given = bench(llama)
    scheduler: Any = given.scheduler
    reasoner = SimpleNamespace(is_reasoning_end=lambda tokens: list(tokens) == [7, 8])
    scheduler.structured_output_manager._get_reasoner = lambda request: reasoner
    asked = SimpleNamespace(reasoning_ended=said)
    request: Any = SimpleNamespace(
        request_id="one", structured_output_request=asked, prompt_token_ids=[7, 8]
    )
    scheduler._note_reasoning(request)
    assert asked.reasoning_ended is expected

"""A stack finds, promotes, writes through, pushes back and closes."""

import threading
from collections.abc import Callable, Iterator, Sequence
from time import sleep

import pytest
from held import held
from hypothesis import given
from hypothesis import strategies as st
from tier_faults import Dead, Far, Flipping, Full, Lying, Stuck, Torn

from picbench.engines.chunk_cache.tiers.backends.host import Host
from picbench.engines.chunk_cache.tiers.envelope import HEADER_BYTES, seal
from picbench.engines.chunk_cache.tiers.guarded_tier import GuardedTier
from picbench.engines.chunk_cache.tiers.stack import (
    Budget,
    Fetched,
    StackLimits,
    TierStack,
    group_by_size,
)
from picbench.engines.chunk_cache.tiers.tier import Key

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
WAIT = 20.0


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    tier = Stuck()
    yield tier
    tier.released.set()


def payloads(answers: list[Fetched | None]) -> list[bytes | None]:
    return [None if answer is None else bytes(answer.data) for answer in answers]


def stack_of(*tiers: Far | Host, deadline: float = WAIT, **limits: int) -> TierStack:
    guarded = [GuardedTier(tier, deadline=deadline) for tier in tiers]
    return TierStack(guarded, StackLimits(**limits))


def test_what_is_larger_than_all_that_may_be_in_flight_is_stored_alone() -> None:
    budget = Budget(10)
    assert budget.take(11)
    assert not budget.take(1)
    budget.give(11)
    assert budget.take(4)
    assert not budget.take(11)


def test_stores_go_to_every_tier_and_fetches_to_the_nearest() -> None:
    host, far = Host(1000), Far()
    stack = stack_of(host, far)
    assert stack.store([(A, b"one"), (B, b"four")]).result(WAIT) == [("host", "far")] * 2
    assert stack.lookup([A, C, B]).result(WAIT) == ["host", None, "host"]
    found = stack.fetch([(A, 3), (C, 9), (B, 4)]).result(WAIT)
    assert payloads(found) == [b"one", None, b"four"]
    assert [answer and answer.tier for answer in found] == ["host", None, "host"]
    assert far.calls == ["exists", "put", "exists", "get"]
    assert stack.close()


def test_what_was_found_below_is_found_above_next_time() -> None:
    host, far = Host(1000), Far()
    stack = stack_of(host, far)
    far.put([(A, seal(A, b"one"))])
    (found,) = stack.fetch([(A, 3)]).result(WAIT)
    assert found is not None
    assert found.tier == "far"
    while not held(host)[0]:
        sleep(0.001)  # values are promoted after the answer
    (found,) = stack.fetch([(A, 3)]).result(WAIT)
    assert found is not None
    assert (found.tier, found.data) == ("host", b"one")
    assert stack.close()


def test_what_was_copied_upwards_is_in_flight_no_more() -> None:
    """Otherwise a stack would take nothing any more after so many fetches."""
    host, far = Host(1000), Far()
    stack = stack_of(host, far, store_bytes=HEADER_BYTES + 3)
    for key in (A, B, C):
        far.put([(key, seal(key, b"one"))])
        while not host.exists([key])[0]:
            assert payloads(stack.fetch([(key, 3)]).result(WAIT)) == [b"one"]
    assert stack.close()


def test_far_tiers_are_not_sent_what_they_hold() -> None:
    far = Far()
    stack = stack_of(Host(1000), far)
    for _ in range(2):
        assert stack.store([(A, b"one")]).result(WAIT) == [("host", "far")]
    assert far.calls.count("put") == 1
    stack.close()


def test_a_tier_is_written_again_what_it_claimed_and_could_not_give() -> None:
    class Forgetful(Far):
        def exists(self, keys: Sequence[Key]) -> list[bool]:
            return [True] * len(keys)

    far = Forgetful()
    stack = stack_of(far)
    assert stack.store([(A, b"one")]).result(WAIT) == [("far",)]
    assert stack.fetch([(A, 3)]).result(WAIT) == [None]
    assert stack.store([(A, b"one")]).result(WAIT) == [("far",)]
    assert payloads(stack.fetch([(A, 3)]).result(WAIT)) == [b"one"]
    stack.close()


@pytest.mark.parametrize("kind", [Dead, Flipping, Full, Lying, Torn])
def test_a_bad_tier_in_the_middle_changes_no_answer(kind: Callable[[str], Far]) -> None:
    stack = stack_of(Host(HEADER_BYTES + 4), kind("bad"), Far("good"))
    items = [(A, b"one"), (B, b"four"), (C, b"five!")]
    held = stack.store(items).result(WAIT)
    assert all("good" in names for names in held)
    for _ in range(3):
        found = stack.fetch([(key, len(value)) for key, value in items]).result(WAIT)
        assert payloads(found) == [b"one", b"four", b"five!"]
    stack.close()


def test_a_tier_that_hangs_costs_its_deadline_and_no_answer(stuck: Stuck) -> None:
    stack = stack_of(Host(1000), stuck, Far("good"), deadline=0.02)
    assert stack.store([(A, b"one")]).result(WAIT) == [("host", "good")]
    assert stack.lookup([A, B]).result(WAIT) == ["host", None]
    assert payloads(stack.fetch([(B, 3), (A, 3)]).result(WAIT)) == [None, b"one"]
    assert stack.counters()["stuck"].timeouts >= 1
    assert stack.close()


def test_an_intact_value_of_another_length_is_missing_and_deleted() -> None:
    far = Far()
    stack = stack_of(far)
    stack.store([(A, b"one")]).result(WAIT)
    assert stack.fetch([(A, 4)]).result(WAIT) == [None]
    assert far.inner.exists([A]) == [False]
    assert stack.counters()["far"].corrupt == 1
    stack.close()


def test_a_copied_buffer_may_be_reused_at_once(stuck: Stuck) -> None:
    stack = stack_of(stuck)
    buffer = bytearray(b"one")
    ticket = stack.store([(A, buffer)])
    buffer[:] = b"two"
    stuck.released.set()
    assert ticket.result(WAIT) == [("stuck",)]
    assert payloads(stack.fetch([(A, 3)]).result(WAIT)) == [b"one"]
    stack.close()


def test_without_a_copy_the_buffer_is_read_later() -> None:
    stack = stack_of(Host(1000))
    buffer = bytearray(b"one")
    assert stack.store([(A, buffer)], copy=False).result(WAIT) == [("host",)]
    buffer[:] = b"two"
    assert payloads(stack.fetch([(A, 3)]).result(WAIT)) == [b"one"]
    stack.close()


def test_stores_beyond_the_limit_are_refused_and_room_comes_back(stuck: Stuck) -> None:
    size = HEADER_BYTES + 10
    stack = stack_of(stuck, store_bytes=3 * size, call_bytes=size)
    tickets = [stack.store([(bytes([i]) * 32, bytes(10))]) for i in range(20)]
    assert [ticket.done() for ticket in tickets] == [False] * 3 + [True] * 17
    assert tickets[3].result() == [()]
    stuck.released.set()
    assert [ticket.result(WAIT) for ticket in tickets[:3]] == [[("stuck",)]] * 3
    while stack.store([(A, bytes(10))]).result(WAIT) == [()]:
        sleep(0.001)  # the budget is given back right after the answer
    stack.close()


def test_one_batch_is_accepted_as_far_as_it_fits(stuck: Stuck) -> None:
    stack = stack_of(Host(1 << 20), store_bytes=200, call_bytes=100)
    items = [(A, bytes(20)), (B, bytes(1000)), (C, bytes(30))]
    assert stack.store(items).result(WAIT) == [("host",), (), ("host",)]
    stack.close()


def test_a_value_larger_than_a_call_is_fetched_alone() -> None:
    stack = stack_of(Far(), call_bytes=100)
    items = [(A, bytes(500)), (B, b"one"), (C, b"two")]
    stack.store(items).result(WAIT)
    found = stack.fetch([(key, len(value)) for key, value in items]).result(WAIT)
    assert payloads(found) == [bytes(500), b"one", b"two"]
    stack.close()


def test_lookups_pass_transfers_that_hang(stuck: Stuck) -> None:
    class Transfers(Stuck):
        exists = Far.exists

    tier = Transfers()
    stack = stack_of(tier)
    fetches = [stack.fetch([(A, 3)]) for _ in range(10)]
    assert stack.lookup([A]).result(WAIT) == [None]
    assert not fetches[0].done()
    tier.released.set()
    assert [ticket.result(WAIT) for ticket in fetches] == [[None]] * 10
    stack.close()


def test_a_result_that_is_late_is_a_timeout(stuck: Stuck) -> None:
    stack = stack_of(stuck)
    ticket = stack.fetch([(A, 3)])
    with pytest.raises(TimeoutError):
        ticket.result(0.0)
    stuck.released.set()
    assert ticket.result(WAIT) == [None]
    stack.close()


def test_closing_finishes_what_is_pending() -> None:
    far = Far()
    stack = stack_of(far, call_bytes=1)
    tickets = [stack.store([(bytes([i]) * 32, bytes(10))]) for i in range(50)]
    assert stack.close(WAIT)
    assert [ticket.result() for ticket in tickets] == [[("far",)]] * 50
    assert held(far)[0] == 50
    assert far.calls[-1] == "close"


def test_closing_drops_what_does_not_end_and_answers_everybody(stuck: Stuck) -> None:
    stack = stack_of(stuck, threads=1, call_bytes=1, deadline=0.2)
    tickets = [stack.store([(bytes([i]) * 32, bytes(10))]) for i in range(5)]
    assert not stack.close(0.0)
    assert [ticket.result(WAIT) for ticket in tickets] == [[()]] * 5


def test_a_closed_stack_answers_nothing() -> None:
    stack = stack_of(Host(1000))
    stack.store([(A, b"one")]).result(WAIT)
    stack.close()
    assert stack.lookup([A]).result() == [None]
    assert stack.fetch([(A, 3)]).result() == [None]
    assert stack.store([(A, b"one")]).result() == [()]
    assert stack.delete([A]).result() == [None]


def test_deleted_values_are_gone_everywhere() -> None:
    host, far = Host(1000), Far()
    stack = stack_of(host, far)
    stack.store([(A, b"one"), (B, b"two")]).result(WAIT)
    stack.delete([A]).result(WAIT)
    assert host.exists([A, B]) == far.inner.exists([A, B]) == [False, True]
    stack.close()


def test_empty_questions_are_answered_at_once() -> None:
    stack = stack_of(Host(1000))
    assert stack.lookup([]).done() and stack.fetch([]).done() and stack.store([]).done()
    assert stack.fetch([]).result() == []
    stack.close()


def test_a_stack_of_no_tiers_holds_nothing() -> None:
    stack = TierStack([])
    assert stack.store([(A, b"one")]).result(WAIT) == [()]
    assert stack.fetch([(A, 3)]).result(WAIT) == [None]
    assert stack.close()


def test_many_threads_get_what_they_stored() -> None:
    host = Host(3000)
    stack = stack_of(host, Far("far", 20_000), threads=3)
    wrong: list[object] = []

    def work(worker: int) -> None:
        for i in range(30):
            key, value = bytes([worker, i]) * 16, bytes([worker, i]) * 50
            stack.store([(key, value)]).result(WAIT)
            (found,) = stack.fetch([(key, 100)]).result(WAIT)
            if found is not None and found.data != value:
                wrong.append((worker, i))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert held(host)[1] <= 3000
    stack.close()


@given(sizes=st.lists(st.integers(1, 50), max_size=30), limit=st.integers(1, 60))
def test_groups_keep_order_and_limit(sizes: list[int], limit: int) -> None:
    groups = group_by_size(sizes, limit, range(len(sizes)))
    assert [entry for group in groups for entry in group] == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in group) for group in groups]
    assert all(len(g) == 1 or size <= limit for g, size in zip(groups, filled, strict=True))
    # What begins a group has no room in the one before.
    assert all(size + sizes[g[0]] > limit for size, g in zip(filled, groups[1:], strict=False))


def test_values_sealed_with_another_secret_are_misses() -> None:
    """One without a secret too, in whatever order; they are replaced."""
    far = Far()
    for own, others in ((b"one", b"two"), (b"one", b""), (b"", b"one")):
        mine, theirs = (TierStack([GuardedTier(far, secret=s)], secret=s) for s in (own, others))
        for copy in (True, False):
            mine.store([(A, b"value")], copy=copy).result(WAIT)
            (found,) = mine.fetch([(A, 5)]).result(WAIT)
            assert found is not None and bytes(found.data) == b"value"
            assert theirs.fetch([(A, 5)]).result(WAIT) == [None]
            assert far.inner.exists([A]) == [False]

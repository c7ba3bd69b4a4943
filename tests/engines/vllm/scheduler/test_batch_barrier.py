"""The barrier between the compiles of a batch and its requests."""

from picbench.engines.vllm.scheduler.chunk_jobs import BatchBarrier

A, B, C = b"a", b"b", b"c"


def test_a_batch_waits_for_all_of_its_chunks():
    barrier = BatchBarrier()
    barrier.update({"one": [A], "two": [A, B], "ready": []})
    assert all(map(barrier.holds_back, ("one", "two", "ready")))
    barrier.update({"one": [], "two": [B], "ready": []})
    assert barrier.holds_back("one")
    barrier.update({"one": [], "two": [], "ready": []})
    assert not any(map(barrier.holds_back, ("one", "two", "ready")))


def test_later_requests_wait_for_the_next_batch():
    barrier = BatchBarrier()
    barrier.update({"one": [A]})
    barrier.update({"one": [A], "two": [B]})
    assert barrier.is_later("two")
    barrier.update({"one": [], "two": [B]})
    assert not barrier.holds_back("one")
    assert barrier.holds_back("two")
    barrier.update({"two": [B]})
    assert not barrier.is_later("two")
    assert barrier.holds_back("two")
    barrier.update({"two": []})
    assert not barrier.holds_back("two")


def test_an_evicted_chunk_raises_no_barrier_again():
    barrier = BatchBarrier()
    barrier.update({"one": [A], "two": [B]})
    barrier.update({"one": [], "two": [B]})
    assert not barrier.waits_for(A)
    assert barrier.waits_for(B)
    barrier.update({"one": [A], "two": []})
    assert not barrier.holds_back("two")
    assert not barrier.waits_for(A)


def test_a_batch_does_not_wait_for_chunks_of_requests_that_left():
    barrier = BatchBarrier()
    barrier.update({"one": [A], "two": [B]})
    barrier.update({"two": []})
    assert not barrier.holds_back("two")


def test_requests_that_never_waited_are_not_held_back():
    barrier = BatchBarrier()
    barrier.update({"one": [A]})
    assert not barrier.holds_back("preempted")

"""What becomes of a chunk whose compile has ended."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.planning.keys import Key
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.packing import AnchorText
from picbench.engines.planning.plan import Canonical
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Segment
from picbench.engines.vllm.scheduler.chunk_jobs import BatchBarrier, ChunkJob, ChunkJobs


class Everything:
    """A pool in which every page is resident, and which no request uses."""

    def resident(self, page: Key) -> bool:
        return True

    def refresh(self, pages: Iterable[Key]) -> None:
        """Nothing: there is no order."""


@pytest.fixture
def canonical() -> Canonical:
    chunk = Segment(tuple(range(40)), chunk=True)
    policy = ChunkPolicy(range(0))
    return lay_out([chunk, Segment((0,))], lambda i, n: policy, LayoutConfig(16)).canonicals[0]


@pytest.mark.parametrize(("blocks", "compiled"), [(0, False), (2, False), (3, True), (4, True)])
def test_a_compile_without_its_blocks_has_compiled_nothing(
    canonical: Canonical, blocks: int, compiled: bool
) -> None:
    """Pages may be gone, and a tier must get them all; a block for one more token is not theirs."""
    pool: Any = Everything()
    store = ChunkStore(pool, tiers=True)
    jobs = ChunkJobs(store, lambda request, before: None)
    request: Any = SimpleNamespace(request_id="compile")
    job = ChunkJob(canonical, request, canonical.compile_plan(), "", "", False, True)
    assert len(canonical.pages) == 3
    store.prepare_compile(canonical, "compile")
    jobs.finish(job, tuple(range(7, 7 + blocks)), success=True)
    assert store.get(canonical.key).whole is compiled
    stored = [command.blocks for command in store.commands.stores]
    assert stored == ([(7, 8, 9)] if compiled else [])


def test_what_a_chunk_is_compiled_after_has_blocks_too(canonical: Canonical) -> None:
    pool: Any = Everything()
    store = ChunkStore(pool, tiers=False)
    jobs = ChunkJobs(store, lambda request, before: None)
    anchored = canonical._replace(anchor=AnchorText((1,) * 20, 16, ""))
    for blocks in (4, 5):
        request: Any = SimpleNamespace(request_id="compile")
        job = ChunkJob(anchored, request, canonical.compile_plan(), "", "", False, True)
        store.prepare_compile(anchored, "compile")
        jobs.finish(job, tuple(range(blocks)), success=True)
        assert store.get(anchored.key).whole is (blocks == 5)


def test_a_job_that_cannot_be_queued_is_none(canonical: Canonical) -> None:
    def submit(request: Any, before: Any) -> None:
        raise RuntimeError("injected")

    pool: Any = SimpleNamespace(resident=lambda page: False)
    store = ChunkStore(pool, tiers=False)
    jobs = ChunkJobs(store, submit)
    parent: Any = SimpleNamespace(
        request_id="one", priority=0, client_index=0, arrival_time=0.0, cache_salt=None
    )
    with pytest.raises(RuntimeError, match="injected"):
        jobs.compile_or_fetch(canonical, parent, ahead_of=parent, head=True, shared=True)
    assert len(jobs) == 0
    assert store.get(canonical.key).owner is None


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

"""Chunks as objects: whole or gone, aged as one, never taken from who uses them."""

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from picbench.engines.chunk_cache.resident_chunks import EvictedChunk, ResidentChunks
from picbench.engines.planning.keys import Key
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.plan import Canonical
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Segment

SIZE = 4
#: Chunks of one to three pages; the first two begin alike, so they share their first page.
TOKENS = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 9, 9, 9, 9, 9), (7,), (8, 8, 8, 8), (6,) * 9]


class Queue:
    """A pool without KV: pages in the order of eviction, and how often each is referenced."""

    def __init__(self) -> None:
        self.pages: dict[Key, int] = {}
        self.references: dict[Key, int] = {}
        self.numbers: dict[Key, int] = {}

    def insert(self, pages: Iterable[Key]) -> None:
        for page in pages:
            if page not in self.pages:
                self.pages[page] = len(self.numbers)
                self.numbers[page] = len(self.numbers)

    def resident(self, key: Key) -> bool:
        return key in self.pages

    def in_use(self, key: Key) -> bool:
        return self.references.get(key, 0) > 0

    def refresh(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key in self.pages and not self.in_use(key):
                self.pages[key] = self.pages.pop(key)

    def discard(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if not self.in_use(key):
                self.pages.pop(key, None)

    def block_ids(self, keys: Iterable[Key]) -> tuple[int, ...]:
        return tuple(self.numbers[key] for key in keys)

    def idle(self) -> list[Key]:
        return [page for page in self.pages if not self.in_use(page)]


def canonical(index: int, linked: int = 0) -> Canonical:
    """A chunk as a request sees it that links its first `linked` tokens."""
    chunk = Segment(TOKENS[index], chunk=True)
    plan = lay_out(
        [chunk, Segment((0,))], lambda i, n: ChunkPolicy(range(min(linked, n))), LayoutConfig(SIZE)
    )
    return plan.canonicals[0]


def made(*chunks: int) -> tuple[Queue, ResidentChunks, list[EvictedChunk]]:
    queue, demoted = Queue(), list[EvictedChunk]()
    coordinator = ResidentChunks(queue, demoted.append)
    for index in chunks:
        queue.insert(page.name for page in canonical(index).pages)
        coordinator.add(canonical(index))
    return queue, coordinator, demoted


def evict(queue: Queue, coordinator: ResidentChunks, page: Key) -> None:
    """What the pool does when it needs a block."""
    coordinator.evicted(page)
    queue.pages.pop(page, None)


def test_one_block_takes_the_whole_chunk_along() -> None:
    queue, coordinator, demoted = made(4, 3)
    pages = [page.name for page in canonical(4).pages]
    evict(queue, coordinator, pages[1])
    assert not any(map(queue.resident, pages))
    assert coordinator.find(canonical(4).key) is None
    assert coordinator.find(canonical(3).key) is not None
    assert demoted == [EvictedChunk(canonical(4).key, queue.block_ids(pages))]


def test_a_chunk_in_use_loses_only_a_page_that_nobody_maps() -> None:
    queue, coordinator, demoted = made(4)
    mapped = canonical(4, linked=SIZE)
    for key in mapped.keys:
        queue.references[key] = 1
    evict(queue, coordinator, mapped.pages[0].name)
    chunk = coordinator.find(mapped.key)
    assert chunk is not None
    assert chunk.pages == mapped.keys
    assert all(map(queue.resident, mapped.keys))
    assert not demoted


def test_a_page_of_two_chunks_takes_both() -> None:
    queue, coordinator, _ = made(0, 1)
    evict(queue, coordinator, canonical(0).pages[0].name)
    assert len(coordinator) == 0
    assert not queue.pages


def test_a_page_that_another_chunk_needs_stays() -> None:
    queue, coordinator, _ = made(0, 1)
    evict(queue, coordinator, canonical(0).pages[1].name)
    assert coordinator.find(canonical(0).key) is None
    assert all(queue.resident(page.name) for page in canonical(1).pages)


def test_using_a_chunk_refreshes_the_pages_that_nobody_maps() -> None:
    queue, coordinator, _ = made(4, 3)
    coordinator.use([canonical(4, linked=SIZE)])
    assert queue.idle()[-1] == canonical(4).pages[0].name
    chunk = coordinator.find(canonical(4).key)
    assert chunk is not None
    assert chunk.hits == 1


def test_a_page_that_came_back_with_another_chunk_is_owned_by_both() -> None:
    queue, coordinator, _ = made(0)
    shared, rest = (page.name for page in canonical(0).pages)
    queue.references[rest] = 1
    evict(queue, coordinator, shared)
    queue.insert(page.name for page in canonical(1).pages)
    coordinator.add(canonical(1))
    coordinator.use([canonical(0)])
    queue.references[shared] = 1
    evict(queue, coordinator, canonical(1).pages[1].name)
    assert coordinator.find(canonical(1).key) is None
    chunk = coordinator.find(canonical(0).key)
    assert chunk is not None
    assert chunk.pages == (shared, rest)


def test_dropping_spares_what_is_used() -> None:
    queue, coordinator, demoted = made(2, 4)
    queue.references[canonical(2).keys[0]] = 1
    dropped = [coordinator.drop(canonical(i).key) for i in (2, 4, 0)]
    assert dropped == [False, True, False]
    assert not demoted


def test_compiling_again_keeps_what_was_counted() -> None:
    _, coordinator, _ = made(4)
    coordinator.use([canonical(4)])
    again = coordinator.add(canonical(4))
    assert again.hits == 1
    assert len(coordinator) == 1


class Pressure(RuleBasedStateMachine):
    """Compiles, uses, releases and evictions in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.coordinator, self.demoted = made()
        self.users: list[Canonical] = []

    @rule(index=st.integers(0, len(TOKENS) - 1))
    def compile(self, index: int) -> None:
        self.queue.insert(page.name for page in canonical(index).pages)
        self.coordinator.add(canonical(index))

    @rule(index=st.integers(0, len(TOKENS) - 1), linked=st.sampled_from([0, SIZE]))
    def map(self, index: int, linked: int) -> None:
        wanted = canonical(index, linked if linked < len(TOKENS[index]) else 0)
        if wanted.resident(self.queue.resident):
            for key in wanted.keys:
                self.queue.references[key] = self.queue.references.get(key, 0) + 1
            self.users.append(wanted)
            self.coordinator.use([wanted])

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        wanted = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        for key in wanted.keys:
            self.queue.references[key] -= 1

    @precondition(lambda self: self.queue.idle())
    @rule()
    def evict(self) -> None:
        evict(self.queue, self.coordinator, self.queue.idle()[0])

    @invariant()
    def nothing_that_is_used_is_gone(self) -> None:
        assert all(self.queue.resident(key) for user in self.users for key in user.keys)

    @invariant()
    def chunks_are_whole(self) -> None:
        for chunk in self.coordinator:
            assert all(map(self.queue.resident, chunk.pages))
            in_use = any(map(self.queue.in_use, chunk.pages))
            assert in_use or len(chunk.pages) == chunk.size or chunk.hits

    @invariant()
    def every_idle_page_belongs_to_a_chunk(self) -> None:
        assert all(map(self.coordinator.owns, self.queue.idle()))

    @invariant()
    def only_whole_chunks_are_demoted(self) -> None:
        sizes = {canonical(i).key: len(canonical(i).pages) for i in range(len(TOKENS))}
        assert all(len(chunk.blocks) == sizes[chunk.key] for chunk in self.demoted)


TestPressure = Pressure.TestCase
TestPressure.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

"""The chunk store: chunks are evicted as a whole, and never while they are used."""

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from picbench.engines.chunk_cache import chunk_store
from picbench.engines.chunk_cache.chunk_record import TRANSITIONS, ChunkRecord, ChunkState
from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.chunk_cache.transfers import (
    ChunkLoad,
    CopyCommand,
    LoadCommand,
    StepTimes,
    StoreCommand,
    TransferCommands,
    TransferResults,
)
from picbench.engines.planning.keys import Key
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.packing import AnchorText
from picbench.engines.planning.plan import Canonical
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Segment
from picbench.errors import EngineError

SIZE = 4
#: Chunks of one to three pages; the first two begin alike, so they share their first page.
TOKENS = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 9, 9, 9, 9, 9), (7,), (8, 8, 8, 8), (6,) * 9]
CHUNKS = st.integers(0, len(TOKENS) - 1)


class Queue:
    """A pool without KV: pages in the order of eviction, and their reference counts."""

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

    def block_id(self, key: Key) -> int:
        return self.numbers[key]

    def block_ids(self, keys: Iterable[Key]) -> tuple[int, ...]:
        return tuple(self.numbers[key] for key in keys)

    @property
    def usable(self) -> int:
        return len(self.numbers)

    def hold(self, key: Key) -> SimpleNamespace | None:
        if key not in self.pages:
            return None
        self.references[key] = self.references.get(key, 0) + 1
        return SimpleNamespace(block_id=self.numbers[key], key=key)

    def release(self, blocks: list[SimpleNamespace]) -> None:
        for block in blocks:
            self.references[block.key] -= 1

    def idle(self) -> list[Key]:
        return [page for page in self.pages if not self.in_use(page)]


def canonical(index: int, linked: int = 0) -> Canonical:
    """A chunk as a request sees it that links its first `linked` tokens."""
    chunk = Segment(TOKENS[index], chunk=True)
    plan = lay_out(
        [chunk, Segment((0,))], lambda i, n: ChunkPolicy(range(min(linked, n))), LayoutConfig(SIZE)
    )
    return plan.canonicals[0]


def compile_chunk(
    queue: Queue, store: ChunkStore, index: int, *, shared: bool = True, linked: int = 0
) -> None:
    chunk = canonical(index, linked)
    store.prepare_compile(chunk, f"compile-{index}")
    names = [page.name for page in chunk.pages]
    queue.insert(names)
    store.complete_compile(chunk, queue.block_ids(names), success=True, shared=shared)


def filled(*chunks: int) -> tuple[Queue, ChunkStore, list[StoreCommand]]:
    """A store with resident chunks, and the list of its commands to store evicted ones."""
    queue = Queue()
    store = ChunkStore(queue, tiers=True)
    for index in chunks:
        compile_chunk(queue, store, index)
    store.commands.stores.clear()
    return queue, store, store.commands.stores


A, B, C = (canonical(index).key for index in range(3))


def evict(queue: Queue, store: ChunkStore, page: Key) -> None:
    """What the pool does when it needs a block."""
    store.evict(page)
    queue.pages.pop(page, None)


def test_one_block_takes_the_whole_chunk_along() -> None:
    queue, store, stores = filled(4, 3)
    pages = [page.name for page in canonical(4).pages]
    evict(queue, store, pages[1])
    assert not any(map(queue.resident, pages))
    assert not store.get(canonical(4).key).size
    assert store.get(canonical(3).key).whole
    assert stores == [StoreCommand(canonical(4).key, queue.block_ids(pages))]


def test_a_chunk_that_a_tier_has_is_not_stored_again() -> None:
    queue, store, stores = filled(4, 3)
    told(store, stored={canonical(4).key})
    for index in (4, 3):
        evict(queue, store, canonical(index).pages[0].name)
    assert [command.key for command in stores] == [canonical(3).key]


def test_a_chunk_in_use_loses_only_pages_that_no_request_maps() -> None:
    queue, store, stores = filled(4)
    mapped = canonical(4, linked=SIZE)
    for key in mapped.keys:
        queue.references[key] = 1
    evict(queue, store, mapped.pages[0].name)
    chunk = store.get(mapped.key)
    assert chunk.pages == mapped.keys
    assert all(map(queue.resident, mapped.keys))
    assert not stores


def test_a_page_of_two_chunks_takes_both() -> None:
    queue, store, _ = filled(0, 1)
    evict(queue, store, canonical(0).pages[0].name)
    assert len(store) == 0
    assert not queue.pages


def test_a_page_that_another_chunk_needs_stays() -> None:
    queue, store, _ = filled(0, 1)
    evict(queue, store, canonical(0).pages[1].name)
    assert not store.get(canonical(0).key).size
    assert all(queue.resident(page.name) for page in canonical(1).pages)


def test_using_a_chunk_refreshes_the_pages_that_it_does_not_map() -> None:
    queue, store, _ = filled(4, 3)
    store.touch([canonical(4, linked=SIZE)])
    assert queue.idle()[-1] == canonical(4).pages[0].name
    chunk = store.get(canonical(4).key)
    assert chunk.hits == 1


def test_a_page_that_came_back_with_another_chunk_is_owned_by_both() -> None:
    queue, store, _ = filled(0)
    shared, own = (page.name for page in canonical(0).pages)
    queue.references[own] = 1
    evict(queue, store, shared)
    queue.insert(page.name for page in canonical(1).pages)
    compile_chunk(queue, store, 1)
    store.touch([canonical(0)])
    queue.references[shared] = 1
    evict(queue, store, canonical(1).pages[1].name)
    assert not store.get(canonical(1).key).size
    chunk = store.get(canonical(0).key)
    assert chunk.pages == (shared, own)


def test_a_chunk_that_lost_a_page_is_not_stored_when_the_rest_is_evicted() -> None:
    queue, store, stores = filled(4)
    mapped = canonical(4, linked=SIZE)
    for key in mapped.keys:
        queue.references[key] = 1
    evict(queue, store, mapped.pages[0].name)
    queue.references.clear()
    evict(queue, store, mapped.keys[-1])
    assert not store.get(mapped.key).size
    assert not stores


def test_what_a_chunk_is_compiled_after_is_not_stored_with_it() -> None:
    queue, store, stores = filled()
    chunk = canonical(4)._replace(anchor=AnchorText((1,) * (SIZE + 1), SIZE, "tenant"))
    names = [page.name for page in chunk.pages]
    queue.insert([b"anchor", b"its end", *names])
    store.prepare_compile(chunk, "compile")
    blocks = queue.block_ids([b"anchor", b"its end", *names])
    store.complete_compile(chunk, blocks, success=True, shared=True)
    assert stores == [StoreCommand(chunk.key, queue.block_ids(names))]


def test_dropping_spares_what_is_used() -> None:
    queue, store, stores = filled(2, 4)
    queue.references[canonical(2).keys[0]] = 1
    dropped = [store.drop(canonical(i).key) for i in (2, 4, 0)]
    assert dropped == [False, True, False]
    assert not stores


def test_as_few_pins_as_possible_are_given_up_oldest_first() -> None:
    """Two chunks that begin alike take four blocks together, not five."""
    queue, store, _ = filled(0, 1, 4)
    assert all(map(store.pin, (A, B)))
    assert len(store.pinned_blocks()) == 4
    store.unpin_for(queue.usable - 4)
    assert list(store.pinned) == [A, B]
    store.unpin_for(queue.usable - 3)
    assert list(store.pinned) == [B]
    store.unpin_for(queue.usable)
    assert not store.pinned


def test_a_chunk_is_pinned_once() -> None:
    queue, store, _ = filled(4)
    key = canonical(4).key
    assert store.pin(key)
    assert store.pin(key)
    store.unpin(key)
    assert not any(queue.references.values())


def test_blocks_are_those_of_whole_chunks() -> None:
    queue, store, _ = filled(4)
    chunk = canonical(4)
    pages = [page.name for page in chunk.pages]
    assert store.blocks_of(chunk.key) == queue.block_ids(pages)
    assert store.get(chunk.key).tokens == len(TOKENS[4])
    queue.hold(pages[1])
    evict(queue, store, pages[0])
    assert store.blocks_of(chunk.key) == ()
    assert not store.pin(chunk.key)


def test_pages_that_left_the_pool_unnoticed_are_forgotten() -> None:
    queue, store, _ = filled(4, 3)
    del queue.pages[canonical(4).pages[1].name]
    assert store.blocks_of(canonical(4).key) == ()
    store.reconcile([canonical(4), canonical(3)])
    assert [record.key for record in store] == [canonical(3).key]


def test_a_store_waits_for_what_is_under_way() -> None:
    queue, store, _ = filled()
    compile_chunk(queue, store, 4, shared=False)
    store.commands.take()
    assert not store.has_pending_work()
    assert not store.idle  # It is known of no tier yet that it has the chunk.
    told(store, stored={canonical(4).key})
    assert store.idle
    store.complete_transfers(TransferResults(pending=1))
    assert store.has_pending_work()


@pytest.mark.parametrize("tiers", [True, False])
def test_without_tiers_nothing_is_cleared(tiers: bool) -> None:
    store = ChunkStore(Queue(), tiers=tiers)
    store.reset_tiers()
    assert store.has_pending_work() is tiers


def test_a_chunk_that_is_compiled_is_not_looked_up() -> None:
    store = ChunkStore(Queue(), tiers=True, shared_tiers=True)
    store.prepare_compile(canonical(0), "owner")
    store.lookup([canonical(0), canonical(2)])
    assert store.commands.lookups == [C]


def test_a_chunk_that_is_in_the_pool_is_not_looked_up() -> None:
    queue = Queue()
    store = ChunkStore(queue, tiers=True, shared_tiers=True)
    compile_chunk(queue, store, 4)
    store.lookup([canonical(4), canonical(2)])
    assert store.commands.lookups == [C]


def test_compiling_again_keeps_what_was_counted() -> None:
    queue, store, _ = filled(4)
    store.touch([canonical(4)])
    compile_chunk(queue, store, 4)
    again = store.get(canonical(4).key)
    assert again.hits == 1
    assert len(store) == 1


@pytest.mark.parametrize("shared", [True, False], ids=["mapped", "copied"])
def test_what_an_emptied_pool_held_is_not_stored(shared: bool) -> None:
    """Its blocks may hold anything when the next step runs."""
    queue = Queue()
    store = ChunkStore(queue, tiers=True)
    compile_chunk(queue, store, 4, shared=shared)
    assert store.commands.stores
    queue.pages.clear()
    store.reset_pool()
    assert not store.commands
    assert store.get(canonical(4).key).state is ChunkState.UNKNOWN
    assert store.idle
    compile_chunk(queue, store, 4, shared=shared)
    assert [command.key for command in store.commands.stores] == [canonical(4).key]


def test_what_a_step_has_read_of_an_emptied_pool_is_stored() -> None:
    queue = Queue()
    store = ChunkStore(queue, tiers=True)
    compile_chunk(queue, store, 4, shared=False)
    store.commands.take()
    queue.pages.clear()
    store.reset_pool()
    assert store.get(canonical(4).key).state is ChunkState.STORING
    told(store, stored={canonical(4).key})
    assert store.is_remote(canonical(4).key)


def test_a_state_that_must_not_follow_is_an_error() -> None:
    record = ChunkRecord(b"key", ChunkState.LOOKUP)
    with pytest.raises(EngineError, match="is lookup, it cannot become compiling"):
        record.enter(ChunkState.COMPILING)
    assert record.state is ChunkState.LOOKUP


def test_the_table_names_states_and_every_state_can_be_left_and_entered() -> None:
    states = set(ChunkState)
    assert TRANSITIONS.keys() == states
    assert all(followers and followers < states for followers in TRANSITIONS.values())
    assert set().union(*TRANSITIONS.values()) == states


def test_a_chunk_compiled_for_copies_is_resident_only_if_no_tier_takes_it() -> None:
    queue, store, _ = filled()
    for index, results in ((3, {"stored"}), (4, {"refused"})):
        key = canonical(index).key
        compile_chunk(queue, store, index, shared=False)
        assert not store.get(key).size
        assert store.get(key).state is ChunkState.STORING
        assert not store.idle
        store.complete_transfers(TransferResults(**{name: {key} for name in results}))
    store.release_stored()
    assert not store.get(canonical(3).key).size
    assert not queue.resident(canonical(3).pages[0].name)
    store.commands.take()
    assert store.idle
    assert store.get(canonical(4).key).whole


def test_a_page_that_leaves_for_a_tier_stays_if_another_chunk_has_it() -> None:
    queue, store, _ = filled(1)
    compile_chunk(queue, store, 0, shared=False)
    told(store, stored={A})
    store.release_stored()
    shared, own = (page.name for page in canonical(0).pages)
    assert queue.resident(shared)
    assert not queue.resident(own)
    assert store.get(B).whole


def test_pages_that_are_copied_from_leave_for_a_tier_afterwards() -> None:
    queue, store, _ = filled()
    compile_chunk(queue, store, 4, shared=False)
    pages = [page.name for page in canonical(4).pages]
    block = queue.hold(pages[1])
    assert block is not None
    told(store, stored={canonical(4).key})
    store.release_stored()
    assert [queue.resident(page) for page in pages] == [False, True, False]
    queue.release([block])
    store.release_stored()
    assert not queue.pages


def test_a_chunk_that_lost_a_page_while_it_was_stored_is_not_resident_as_a_whole() -> None:
    """Its first page is linked by the request that needed it: no one misses it but others."""
    queue, store, _ = filled()
    linked = canonical(4, linked=SIZE)
    compile_chunk(queue, store, 4, shared=False, linked=SIZE)
    evict(queue, store, linked.pages[0].name)
    store.complete_transfers(TransferResults(refused={linked.key}))
    assert store.is_mappable(linked)
    assert not store.is_mappable(canonical(4))
    assert not store.get(linked.key).size


def test_a_compile_that_is_given_up_twice_counts_once() -> None:
    """As after an exception: the page that another compile is computing is still not there."""
    queue, store, _ = filled()
    for index in (0, 1):
        store.prepare_compile(canonical(index), f"compile-{index}")
    queue.insert(page.name for page in canonical(0).pages)
    for _ in range(2):
        store.complete_compile(canonical(0), (), success=False, shared=True)
    assert store.is_mappable(canonical(0))
    assert not store.is_copyable(canonical(0))


def test_compiling_one_chunk_takes_no_other_that_begins_alike_away() -> None:
    """Else each of the two would be compiled again because the other one is."""
    _, store, _ = filled(0)
    store.prepare_compile(canonical(1), "compile-1")
    assert store.is_copyable(canonical(0))


def test_a_page_that_is_computed_again_is_not_copied_meanwhile() -> None:
    queue, store, _ = filled(0)
    beginning = canonical(0).pages[0].name
    queue.hold(canonical(0).pages[1].name)
    evict(queue, store, beginning)
    store.prepare_compile(canonical(1), "compile-1")
    queue.insert([beginning])
    assert store.is_mappable(canonical(0))
    assert not store.is_copyable(canonical(0))
    # A request that maps the chunk does not make its beginning a computed one.
    store.touch([canonical(0)])
    assert not store.is_copyable(canonical(0))
    names = [page.name for page in canonical(1).pages]
    queue.insert(names)
    store.complete_compile(canonical(1), queue.block_ids(names), success=True, shared=True)
    assert store.is_copyable(canonical(0))


def told(store: ChunkStore, **results: set[Key]) -> None:
    store.complete_transfers(TransferResults(**results))


def test_tiers_of_our_own_hold_what_we_stored() -> None:
    store = ChunkStore(Queue(), tiers=True, shared_tiers=False)
    assert store.tiers_of(A) is ChunkState.MISSING
    told(store, stored={A}, refused={B})
    assert store.tiers_of(A) is ChunkState.REMOTE
    assert store.tiers_of(B) is ChunkState.MISSING


def test_tiers_that_others_use_are_asked() -> None:
    store = ChunkStore(Queue(), tiers=True, shared_tiers=True)
    assert store.tiers_of(A) is ChunkState.UNKNOWN
    store.lookup([canonical(0)])
    assert store.tiers_of(A) is ChunkState.LOOKUP
    told(store, present={A}, absent={B})
    assert store.tiers_of(A) is ChunkState.REMOTE
    assert store.tiers_of(B) is ChunkState.MISSING


def test_a_chunk_that_was_missing_is_asked_for_again_later() -> None:
    store = ChunkStore(Queue(), tiers=True, shared_tiers=True)
    told(store, absent={A})
    store.prepare_compile(canonical(0), "owner")
    assert store.tiers_of(A) is ChunkState.UNKNOWN


def test_fetching_does_not_forget_what_is_there() -> None:
    store = ChunkStore(Queue(), tiers=True, shared_tiers=True)
    told(store, present={A})
    store.prepare_fetch(canonical(0), "owner")
    assert store.tiers_of(A) is ChunkState.REMOTE


def test_a_load_that_fails_counts_as_missing() -> None:
    store = ChunkStore(Queue(), tiers=True, shared_tiers=True)
    told(store, present={A})
    told(store, lost={A})
    assert store.tiers_of(A) is ChunkState.MISSING


def test_a_chunk_that_is_lost_again_and_again_is_banned_for_a_while() -> None:
    now = 0.0
    store = ChunkStore(Queue(), tiers=True, shared_tiers=True, clock=lambda: now)
    for expected in (ChunkState.REMOTE, ChunkState.REMOTE, ChunkState.MISSING):
        told(store, stored={A}, present={B})
        assert store.tiers_of(A) is expected
        assert store.tiers_of(B) is ChunkState.REMOTE
        told(store, lost={A})
    now = 61.0
    told(store, stored={A})
    assert store.tiers_of(A) is ChunkState.REMOTE


def test_a_banned_chunk_that_a_tier_claims_is_missing() -> None:
    """Were the answer ignored, its request would wait for it for ever."""
    store = ChunkStore(Queue(), tiers=True, shared_tiers=True, clock=lambda: 1000.0)
    for _ in range(2):
        told(store, lost={A})
    store.prepare_compile(canonical(0), "owner")
    store.complete_compile(canonical(0), (), success=False, shared=True)
    store.lookup([canonical(0)])
    assert store.tiers_of(A) is ChunkState.LOOKUP
    told(store, present={A})
    assert store.tiers_of(A) is ChunkState.MISSING


def test_what_is_known_of_shared_tiers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_store, "_MAX_RECORDS", 2)
    store = ChunkStore(Queue(), tiers=True, shared_tiers=True)
    for key in (A, B, C):
        told(store, stored={key})
    assert [store.tiers_of(key) for key in (A, B, C)] == [
        ChunkState.UNKNOWN,
        ChunkState.REMOTE,
        ChunkState.REMOTE,
    ]
    assert len(store._records) == 2
    for key in (B, A):  # What was heard of last is remembered.
        told(store, stored={key})
    assert store._records.keys() == {A, B}


def test_a_chunk_that_a_host_tier_evicted_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No others store there, so what is not known to be in it has to be compiled."""
    monkeypatch.setattr(chunk_store, "_MAX_RECORDS", 0)
    store = ChunkStore(Queue(), tiers=True, shared_tiers=False)
    told(store, stored={A, B})
    told(store, absent={A})
    states = [store.tiers_of(key) for key in (A, B)]
    assert states == [ChunkState.MISSING, ChunkState.REMOTE]
    assert list(store._records) == [B]


def test_nothing_is_commanded_for_a_request_that_was_withdrawn() -> None:
    load = ChunkLoad(A, 2, (0,), (7,))
    commands = TransferCommands(
        loads=[LoadCommand(name, (load,)) for name in "ab"],
        copies=[CopyCommand(name, 1, 2) for name in "ab"],
    )
    commands.withdraw("a")
    assert [command.request_id for command in (*commands.loads, *commands.copies)] == ["b", "b"]


def test_results_that_cannot_be_used_say_that_tiers_have_nothing() -> None:
    results = TransferResults({A}, {B}, {A}, {B}, {C}, {"one": {"host": 1}}, 3)
    failed = TransferResults(absent={A, B}, refused={A, B}, lost={C}, pending=3)
    assert results.as_failed() == failed


def test_ranks_are_done_when_the_last_one_is() -> None:
    one, two = TransferResults(pending=1), TransferResults(pending=2)
    assert one.merge(two).pending == two.merge(one).pending == 2


def test_tiers_slow_steps_if_they_take_more_than_a_tenth() -> None:
    assert [StepTimes(10.0, taken).slow for taken in (0.0, 1.0, 1.1)] == [False, False, True]


class Lifecycle(RuleBasedStateMachine):
    """Requests, jobs, tiers and evictions in any order, over a pool and tiers without KV."""

    @initialize(tiers=st.booleans(), shared=st.booleans())
    def start(self, tiers: bool, shared: bool) -> None:
        self.now = 0.0
        self.queue = Queue()
        self.store = ChunkStore(
            self.queue, tiers=tiers, shared_tiers=tiers and shared, clock=lambda: self.now
        )
        self.tiers = tiers
        self.users: list[Canonical] = []
        self.jobs: dict[Key, tuple[Canonical, bool, bool]] = {}
        self.unanswered: tuple[list[Key], list[Key]] = ([], [])

    def available(self, chunk: Canonical, shared: bool) -> bool:
        if shared:
            return self.store.is_mappable(chunk)
        return self.store.is_copyable(chunk) or self.store.is_remote(chunk.key)

    @rule(index=CHUNKS, shared=st.booleans(), linked=st.sampled_from([0, SIZE]))
    def need(self, index: int, shared: bool, linked: int) -> None:
        """A waiting request needs a chunk, or all but its first page, as `ChunkJobs` serves it."""
        chunk = canonical(index, linked if linked < len(TOKENS[index]) else 0)
        if self.available(chunk, shared) or self.store.get(chunk.key).owner:
            return
        tiers = self.store.tiers_of(chunk.key)
        if tiers is ChunkState.UNKNOWN:
            self.store.lookup([chunk])
        elif tiers is ChunkState.REMOTE:
            self.store.prepare_fetch(chunk, f"fetch-{index}")
            self.jobs[chunk.key] = (chunk, True, shared)
        elif tiers is ChunkState.MISSING:
            self.store.prepare_compile(chunk, f"compile-{index}")
            self.jobs[chunk.key] = (chunk, False, shared)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), success=st.booleans())
    def finish(self, data: st.DataObject, success: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.jobs)))
        chunk, fetches, shared = self.jobs.pop(key)
        names = [page.name for page in chunk.pages]
        if success:
            self.queue.insert(names)
        if fetches:
            self.store.complete_fetch(chunk, success=success)
        else:
            blocks = self.queue.block_ids(names) if success else ()
            self.store.complete_compile(chunk, blocks, success=success, shared=shared)
        if success and (shared or fetches or not self.tiers):
            assert self.store.get(key).state is ChunkState.RESIDENT

    @rule(data=st.data(), lost=st.sets(CHUNKS))
    def answer(self, data: st.DataObject, lost: set[int]) -> None:
        """The tiers answer some of what they were asked, and lose chunks that were there."""
        commands = self.store.commands.take()
        self.unanswered[0].extend(commands.lookups)
        self.unanswered[1].extend(store.key for store in commands.stores)
        (present, absent), (stored, refused) = (
            data.draw(answers(asked)) for asked in self.unanswered
        )
        remote = {key for i in lost if self.store.is_remote(key := canonical(i).key)}
        pending = sum(map(len, self.unanswered))
        self.store.complete_transfers(
            TransferResults(present, absent, stored, refused, remote, pending=pending)
        )

    @rule()
    def release_stored(self) -> None:
        self.store.release_stored()

    @rule(index=CHUNKS, linked=st.sampled_from([0, SIZE]))
    def map(self, index: int, linked: int) -> None:
        wanted = canonical(index, linked if linked < len(TOKENS[index]) else 0)
        if wanted.resident(self.queue.resident):
            for key in wanted.keys:
                self.queue.hold(key)
            self.users.append(wanted)
            self.store.touch([wanted])

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        wanted = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        for key in wanted.keys:
            self.queue.references[key] -= 1

    @precondition(lambda self: self.queue.idle())
    @rule()
    def evict(self) -> None:
        evict(self.queue, self.store, self.queue.idle()[0])

    @rule(index=CHUNKS)
    def drop(self, index: int) -> None:
        chunk = self.store.get(canonical(index).key)
        used = any(map(self.queue.in_use, chunk.pages))
        dropped = self.store.drop(canonical(index).key)
        assert dropped or used or not chunk.size
        assert not (dropped and chunk in self.store)

    @rule(index=CHUNKS)
    def pin(self, index: int) -> None:
        chunk = self.store.get(canonical(index).key)
        assert self.store.pin(canonical(index).key) == chunk.whole

    @rule(index=CHUNKS)
    def unpin(self, index: int) -> None:
        self.store.unpin(canonical(index).key)

    @rule(need=st.integers(0, 9))
    def unpin_for(self, need: int) -> None:
        self.store.unpin_for(need)
        fits = need <= self.queue.usable - len(self.store.pinned_blocks())
        assert fits or not self.store.pinned

    @rule()
    def reset_pool(self) -> None:
        """As vLLM does it: only while no block is referenced."""
        if not any(map(self.queue.in_use, self.queue.pages)):
            self.queue.pages.clear()
            self.store.reset_pool()
            assert len(self.store) == 0

    @rule()
    def reset_tiers(self) -> None:
        self.store.reset_tiers()
        assert not any(map(self.store.is_remote, self.store._records))

    @rule()
    def wait(self) -> None:
        self.now += 100

    @invariant()
    def states_match_facts(self) -> None:
        for key, record in self.store._records.items():
            assert (key in self.jobs) == (record.owner is not None)
            if record.owner:
                fetches = self.jobs[key][1]
                expected = ChunkState.FETCHING if fetches else ChunkState.COMPILING
            elif record.size:
                expected = ChunkState.RESIDENT
            else:
                expected = ChunkState.STORING if record.storing else record.tiers
            assert record.state is expected
            assert bool(record.pages) == bool(record.size) == (record in self.store)

    @invariant()
    def nothing_that_is_used_is_gone(self) -> None:
        assert all(self.queue.resident(key) for user in self.users for key in user.keys)

    @invariant()
    def chunks_are_whole(self) -> None:
        for chunk in self.store:
            assert all(map(self.queue.resident, chunk.pages))
            in_use = any(map(self.queue.in_use, chunk.pages))
            assert in_use or len(chunk.pages) == chunk.size or chunk.hits

    @invariant()
    def pinned_chunks_are_resident(self) -> None:
        for chunk in self.store.pinned.values():
            assert chunk.whole
            assert all(map(self.queue.in_use, chunk.pages))

    @invariant()
    def an_idle_page_belongs_to_a_chunk_or_is_copied_from(self) -> None:
        owned = {page for chunk in self.store for page in chunk.pages}
        assert owned == self.store._owners.keys()
        assert self.tiers or owned.issuperset(self.queue.idle())

    @invariant()
    def only_whole_chunks_are_stored(self) -> None:
        sizes = {canonical(i).key: len(canonical(i).pages) for i in range(len(TOKENS))}
        assert all(len(c.blocks) == sizes[c.key] for c in self.store.commands.stores)

    def teardown(self) -> None:
        """Whatever happened: once everything has ended, nothing is left."""
        for key in list(self.jobs):
            chunk, fetches, shared = self.jobs.pop(key)
            if fetches:
                self.store.complete_fetch(chunk, success=False)
            else:
                self.store.complete_compile(chunk, (), success=False, shared=shared)
        for key in list(self.store.pinned):
            self.store.unpin(key)
        for user in self.users:
            for key in user.keys:
                self.queue.references[key] -= 1
        commands = self.store.commands.take()
        stores = {*self.unanswered[1], *(c.key for c in commands.stores)}
        self.store.complete_transfers(TransferResults(refused=stores))
        self.store.release_stored()
        assert self.store.idle
        assert not any(self.queue.references.values())
        assert not self.store._unfinished
        for page in self.queue.idle():
            evict(self.queue, self.store, page)
        assert len(self.store) == 0
        self.store.reset_tiers()
        assert not self.store._records
        assert not self.store._owners


@st.composite
def answers(draw: st.DrawFn, asked: list[Key]) -> tuple[set[Key], set[Key]]:
    """Remove some keys from those asked for, and divide them into yes and no."""
    yes, no = set[Key](), set[Key]()
    for key in list(asked):
        answer = draw(st.sampled_from([None, yes, no]))
        if answer is not None:
            asked.remove(key)
            answer.add(key)
    return yes - no, no


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("tiers", [False, True])
def test_chunks_that_are_evicted_before_they_are_used_again_are_counted(tiers: bool) -> None:
    queue = Queue()
    store = ChunkStore(queue, tiers=tiers)
    assert store.kept_share == 1.0
    for _ in range(3):
        compile_chunk(queue, store, 3)
        store.touch([canonical(3)])
        evict(queue, store, canonical(3).key)
    assert store.kept_share == (1.0 if tiers else 0.25)
    compile_chunk(queue, store, 3)
    for _ in range(5):
        store.touch([canonical(3)])
    evict(queue, store, canonical(3).key)
    assert store.kept_share == (1.0 if tiers else 0.4)
    for _ in range(1000):
        compile_chunk(queue, store, 3)
        store.touch([canonical(3)])
        evict(queue, store, canonical(3).key)
    assert tiers or store.kept_share < 0.01
    # What was of late counts most.
    for _ in range(20):
        compile_chunk(queue, store, 3)
        for _ in range(2):
            store.touch([canonical(3)])
        evict(queue, store, canonical(3).key)
    assert store.kept_share > 0.05
    compile_chunk(queue, store, 3)
    store.touch([canonical(3)])
    before = store.kept_share
    # That a pool was emptied says nothing of what recurs.
    store.reset_pool()
    assert store.kept_share == before
    store.forget_uses()
    assert store.kept_share == 1.0

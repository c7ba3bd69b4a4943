"""Transfers in flight: faults, answers in any order, and no block reused before its copies end."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from far_tiers import FarTiers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from queued_streams import QueuedStreams

from picbench.engines.chunk_cache.tiers.stack import Ticket
from picbench.engines.chunk_cache.transfers import (
    ChunkLoad,
    CopyCommand,
    LoadCommand,
    StoreCommand,
    TransferCommands,
)
from picbench.engines.vllm.transfer.pool_rows import PoolRows
from picbench.engines.vllm.transfer.stream_copies import Staging, StreamCopies
from picbench.engines.vllm.transfer.tier_client import TierClient

LOST, KEPT = b"lost", b"kept"

#: The chunks of two loads.
BEGUN = {"begun": KEPT, "not begun": LOST}


class AtOnce:
    """Background work that is done at once."""

    def run(self, size: int, nothing: Any, groups: Any, work: Callable[[Any], Any]) -> Ticket[Any]:
        future: Future[Any] = Future()
        future.set_result(work(groups[0]))
        return Ticket(size, nothing, [(groups[0], future)])

    def drain(self, timeout: float) -> bool:
        return True


@pytest.fixture
def client() -> TierClient:
    """Its far tiers answer every other question with an exception, from the first on."""
    client = TierClient("")
    client.register_kv_caches([torch.zeros(8, 1, 16, 4)])
    tiers, asked = FarTiers(answering=False), list[int]()

    def ticket(*args: Any) -> Ticket[Any]:
        found = FarTiers._ticket(tiers, *args)
        asked.append(1)
        tiers.answer(error=RuntimeError("injected") if len(asked) % 2 else None)
        return found

    tiers._ticket = ticket  # type: ignore[method-assign]
    client._chunks._stack = tiers  # type: ignore[assignment]
    return client


def test_a_store_that_raises_counts_as_refused(client: TierClient) -> None:
    client.start(TransferCommands(stores=[StoreCommand(LOST, (1,)), StoreCommand(KEPT, (2,))]))
    assert client.finish_loads() == (set(), set())
    results = client.take_results()
    assert (set(results.refused), set(results.stored)) == ({LOST}, {KEPT})
    assert not results.faults


def test_a_lookup_that_raises_counts_as_absent(client: TierClient) -> None:
    client._chunks._stack.values[client._name(KEPT)] = b""  # type: ignore[attr-defined]
    for key in (LOST, KEPT):
        client.start(TransferCommands(lookups=[key]))
    assert client.finish_loads() == (set(), set())
    results = client.take_results()
    assert (set(results.absent), set(results.present)) == ({LOST}, {KEPT})
    assert not results.faults


def test_a_load_that_raises_fails_and_has_a_reason(client: TierClient) -> None:
    loads = [LoadCommand(name, (ChunkLoad(LOST, 1, (0,), (3,)),)) for name in "01"]
    client.start(TransferCommands(loads=loads))
    assert client.finish_loads() == (set(), {"0", "1"})
    faults = client.take_results().faults
    assert [*faults] == ["0"]
    assert "RuntimeError: injected" in faults["0"]


@pytest.mark.parametrize("failing", ["_clear", "_store", "_load", "_look_up", "copy"])
def test_what_does_not_start_keeps_nothing_else_from_starting(
    client: TierClient, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    begun = list[str]()

    def part(name: str) -> Callable[..., None]:
        def run(*_: Any) -> None:
            begun.append(name)
            if name == failing:
                raise RuntimeError("injected")

        return run

    parts = ["_clear", "_store", "copy", "_load", "_look_up"]
    for name in parts:
        monkeypatch.setattr(client._pool if name == "copy" else client, name, part(name))
    load = LoadCommand("loads", (ChunkLoad(LOST, 1, (0,), (3,)),))
    store, copy = StoreCommand(LOST, (1,)), CopyCommand("copies", 1, 2)
    client.start(TransferCommands([KEPT], [store], [load], [copy], clear=True))
    assert begun == parts
    results = client.take_results()
    ends = {"_load": ["loads"], "copy": ["copies"]}
    assert [*results.faults] == ends.get(failing, [])
    assert client.finish_loads()[1] == ({"loads"} if failing == "_load" else set())
    found = (set(results.refused), set(results.absent), set(results.lost))
    missing = {"_store": ({LOST}, set(), set()), "_look_up": (set(), {KEPT}, set())}
    missing["_load"] = (set(), set(), {LOST})
    assert found == missing.get(failing, (set(), set(), set()))


def test_a_step_that_is_given_up_reports_what_had_not_begun() -> None:
    client = TierClient("")
    client.register_kv_caches([torch.zeros(8, 1, 16, 4)])
    tiers = FarTiers(answering=False)
    client._chunks._stack = tiers  # type: ignore[assignment]
    stores = [StoreCommand(KEPT, (1,)), StoreCommand(LOST, (2,))]
    loads = [LoadCommand(name, (ChunkLoad(key, 1, (0,), (3,)),)) for name, key in BEGUN.items()]
    copy = CopyCommand("copies", 1, 2)
    # As if the step had failed after its first store and its first load.
    client.start(TransferCommands(stores=stores[:1], loads=loads[:1]))
    client.give_up(TransferCommands([LOST], stores, loads, [copy]))
    results = client.take_results()
    assert set(results.refused) == {LOST}
    assert set(results.absent) == {LOST}
    assert set(results.lost) == {LOST}
    assert results.faults.keys() == {"begun", "not begun", "copies"}
    assert client.finish_loads() == (set(), {"not begun"})
    # The others end as they do.
    while tiers.asked:
        tiers.answer()
    assert client.finish_loads() == ({"begun"}, set())
    assert set(client.take_results().stored) == {KEPT}


def test_a_value_passes_by_a_host_tier_that_is_too_small() -> None:
    """What is on its way to a far tier takes memory of its own, within bounds."""
    client = TierClient("host:64B")
    client.register_kv_caches([torch.arange(8 * 64.0).reshape(8, 1, 16, 4)])
    tiers = FarTiers()
    client._chunks._stack = tiers  # type: ignore[assignment]
    client.start(TransferCommands(stores=[StoreCommand(KEPT, (1, 2))]))
    client.start(TransferCommands(loads=[LoadCommand("r", (ChunkLoad(KEPT, 2, (1,), (5,)),))]))
    done: set[str] = set()
    while not done:
        done, failed = client.finish_loads()
        assert not failed
    results = client.take_results()
    assert (results.stored, results.served, results.pending) == ({KEPT}, {"r": {KEPT: "far"}}, 0)
    pool = client._pool
    rows = pool.empty(2)
    pool.gather(pool.ids([2, 5]), rows)
    assert torch.equal(rows[0], rows[1])
    client._chunks._passing.take(256 << 20)
    client.start(TransferCommands(stores=[StoreCommand(LOST, (3,))]))
    client.finish_loads()
    assert client.take_results().refused == {LOST}
    client.close()


@pytest.mark.parametrize("kept", [True, False], ids=["far", "nowhere"])
def test_a_store_that_is_repeated_while_far_tiers_go_on_is_answered(kept: bool) -> None:
    """The host tier took the chunk and said so, and was cleared; then the chunk is stored again."""
    client = TierClient(f"host:{4 * 64 * 4}B")
    client.register_kv_caches([torch.zeros(8, 1, 16, 4)])
    tiers = FarTiers(answering=False)
    client._chunks._stack = tiers  # type: ignore[assignment]
    store = StoreCommand(KEPT, (1, 2))
    client.start(TransferCommands(stores=[store]))
    client.finish_loads()
    assert client.take_results().stored == {KEPT}
    client.start(TransferCommands(stores=[store], clear=True))
    client.finish_loads()
    results = client.take_results()
    assert (results.stored, results.refused, results.pending) == (set(), set(), 2)
    tiers.answer(1)  # what was to be deleted
    future, _ = tiers.asked.pop()
    future.set_result([("far",) if kept else ()])
    client.finish_loads()
    results = client.take_results()
    answers = ({KEPT}, set()) if kept else (set(), {KEPT})
    assert (results.stored, results.refused) == answers
    assert results.pending == 0


BLOCKS, LAYERS = 8, 2
keys = st.integers(0, 4)


def page(key: int, index: int) -> float:
    """What a chunk's page holds, in all of its slots."""
    return 100.0 + 10 * key + index


class Engine(RuleBasedStateMachine):
    """A scheduler's part, on a device whose streams get on as hypothesis has it.

    Blocks are reused as soon as the client says that it is done with them. `pool` is what the
    blocks hold once all that is queued was done.
    """

    @initialize(host=st.integers(0, 6), far=st.booleans(), buffer=st.integers(1, 2))
    def begin(self, host: int, far: bool, buffer: int) -> None:
        self.layers = list(torch.zeros(LAYERS, BLOCKS, 1, 2, 2))
        rows = PoolRows(self.layers)
        self.streams = QueuedStreams()
        staging = Staging(buffer * rows.row_bytes, 2, 2, share=1)
        self.client = TierClient(f"host:{host * rows.row_bytes}B" if host else "")
        copies = StreamCopies(rows, self.streams, staging)
        self.client._copy_engine = lambda: copies  # type: ignore[method-assign]
        self.client.register_kv_caches(self.layers)
        self.far = FarTiers(answering=False)
        if far:
            self.client._chunks._stack = self.far  # type: ignore[assignment]
        self.client._chunks._background = AtOnce()  # type: ignore[assignment]
        self.pool: list[float | None] = [0.0] * BLOCKS
        self.loading: dict[str, tuple[int, ...]] = {}
        self.expected: dict[str, dict[int, float]] = {}
        self.number = 0
        self.storing: set[bytes] = set()

    def _free(self, count: int, dice: int) -> list[int]:
        busy = {block for blocks in self.loading.values() for block in blocks}
        free = [block for block in range(BLOCKS) if block not in busy]
        return [free[(dice + i) % len(free)] for i in range(count)] if count <= len(free) else []

    def _write(self, values: dict[int, float]) -> None:
        layers = self.layers

        def step() -> None:
            for layer in layers:
                for block, value in values.items():
                    layer[block] = value

        for block, value in values.items():
            self.pool[block] = value
        broken, self.streams.broken = self.streams.broken, 0
        self.streams.run(self.streams.steps(), step)
        self.streams.broken = broken

    @rule(key=keys, dice=st.integers(0, 7))
    def compile(self, key: int, dice: int) -> None:
        """A chunk is computed and stored; its blocks are free in the same step."""
        blocks = self._free(1 + key % 3, dice)
        if blocks:
            self._write({block: page(key, index) for index, block in enumerate(blocks)})
            self.storing.add(bytes([key]))
            self.client.start(TransferCommands(stores=[StoreCommand(bytes([key]), tuple(blocks))]))

    @rule(dice=st.integers(0, 7), count=st.integers(1, 4))
    def overwrite(self, dice: int, count: int) -> None:
        self.number += 1
        self._write(dict.fromkeys(self._free(count, dice), -float(self.number)))

    @rule(wanted=st.lists(keys, min_size=1, max_size=3, unique=True), dice=st.integers(0, 7))
    def load(self, wanted: list[int], dice: int) -> None:
        sizes = [1 + key % 3 for key in wanted]
        blocks = self._free(sum(sizes), dice)
        if not blocks:
            return
        self.number += 1
        name, loads, expected, rest = f"r{self.number}", [], {}, list(blocks)
        for key, size in zip(wanted, sizes, strict=True):
            own, rest = rest[:size], rest[size:]
            loads.append(ChunkLoad(bytes([key]), size, tuple(range(size)), tuple(own)))
            expected |= {block: page(key, index) for index, block in enumerate(own)}
        self.loading[name], self.expected[name] = tuple(blocks), expected
        self.client.start(TransferCommands(loads=[LoadCommand(name, tuple(loads))]))

    @rule(clear=st.booleans(), looked=st.lists(keys, max_size=2))
    def other(self, clear: bool, looked: list[int]) -> None:
        lookups = [bytes([key]) for key in looked]
        self.client.start(TransferCommands(lookups=lookups, clear=clear))

    @rule(broken=st.integers(1, 6))
    def break_a_copy(self, broken: int) -> None:
        self.streams.broken = broken

    @precondition(lambda self: self.far.asked)
    @rule(index=st.integers(0, 9), fails=st.booleans())
    def answer(self, index: int, fails: bool) -> None:
        error = RuntimeError("injected") if fails else None
        self.far.answer(index % len(self.far.asked), error)

    @rule(order=st.permutations(range(4)), entries=st.integers(1, 12))
    def go_on(self, order: list[int], entries: int) -> None:
        for _ in range(entries):
            self.streams.go_on([self.streams.queues[i] for i in order])

    @rule()
    def finish_loads(self) -> None:
        done, failed = self.client.finish_loads()
        for name in (*done, *failed):
            blocks, expected = self.loading.pop(name), self.expected.pop(name)
            for block in blocks:
                # A load that failed has written what it has: not before, and never again.
                self.pool[block] = None if name in failed else expected[block]
                assert name in failed or float(self.layers[0][block].max()) == expected[block]
        results = self.client.take_results()
        assert set(results.faults) <= failed
        assert not results.stored & results.refused
        self.storing -= results.stored | results.refused
        assert set(results.served) == done

    def teardown(self) -> None:
        if not hasattr(self, "client"):
            return
        self.streams.broken = 0
        for _ in range(20):
            while self.far.asked:
                self.far.answer()
            self.streams.drain()
            self.finish_loads()
        assert not self.loading
        assert not self.storing, "each store has an answer"
        assert self.client.take_results().pending == 0
        for block, value in enumerate(self.pool):
            held = (torch.all(layer[block] == value) for layer in self.layers)
            assert value is None or all(held)
        arena = self.client._chunks.arena
        if arena is not None:
            arena.clear()
            assert arena.held_bytes == 0
        budget = self.client._chunks._passing
        assert budget.take(256 << 20)
        self.client.close()


def test_blocks_are_reused_only_after_their_copies() -> None:
    chosen = settings(max_examples=150, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Engine, settings=chosen)  # type: ignore[no-untyped-call]

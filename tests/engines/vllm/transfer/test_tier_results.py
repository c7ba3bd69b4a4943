"""What a tier client counts and remembers, and what it asks of which tier."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from far_tiers import FarTiers

from picbench.engines.chunk_cache.tiers.stack import Ticket
from picbench.engines.chunk_cache.transfers import (
    ChunkLoad,
    CopyCommand,
    LoadCommand,
    StoreCommand,
    TransferCommands,
    TransferResults,
)
from picbench.engines.vllm.transfer import tier_client
from picbench.engines.vllm.transfer.copies import PlainCopies
from picbench.engines.vllm.transfer.tier_client import TierClient

ONE, TWO, THREE = b"one", b"two", b"three"


def opened(stack: Any = None, tiers: str = "", blocks: int = 8) -> TierClient:
    """A client of a pool of blocks of 256 bytes, and of a stack of far tiers."""
    client = TierClient(tiers)
    client.register_kv_caches([torch.zeros(blocks, 1, 16, 4)])
    if stack is not None:
        client._chunks._stack = stack
    return client


def store(client: TierClient, **blocks: tuple[int, ...]) -> set[bytes]:
    """Store chunks by name; those that a tier has then."""
    stores = [StoreCommand(name.encode(), places) for name, places in blocks.items()]
    client.start(TransferCommands(stores=stores))
    client.finish_loads()
    return set(client.take_results().stored)


def load(request: str, *chunks: tuple[bytes, tuple[int, ...]]) -> LoadCommand:
    found = (ChunkLoad(key, len(to), tuple(range(len(to))), to) for key, to in chunks)
    return LoadCommand(request, tuple(found))


def ended(client: TierClient, count: int) -> tuple[set[str], set[str]]:
    """So many requests whose loads succeeded or failed; a far tier's bytes take a thread's time."""
    done, failed = set[str](), set[str]()
    for _ in range(10_000):
        some = client.finish_loads()
        done |= some[0]
        failed |= some[1]
        if len(done | failed) >= count:
            return done, failed
        time.sleep(0.001)
    raise AssertionError("loads do not end")


def test_the_tiers_of_all_chunks_of_a_request_are_told() -> None:
    client = opened(FarTiers())
    assert store(client, one=(1,), two=(1, 2)) == {ONE, TWO}
    client.start(TransferCommands(loads=[load("a", (ONE, (6,)))]))
    assert ended(client, 1) == ({"a"}, set())
    loads = [load("a", (ONE, (3,)), (TWO, (4, 5))), load("b", (ONE, (7,)))]
    client.start(TransferCommands(loads=loads))
    assert ended(client, 2) == ({"a", "b"}, set())
    assert client.take_results().served == {"a": {ONE: "far", TWO: "far"}, "b": {ONE: "far"}}


def test_chunks_that_no_tier_has_are_said_to_be_lost() -> None:
    """Else they would be fetched again and again."""
    client = opened(FarTiers())
    store(client, one=(1,))
    client.start(TransferCommands(loads=[load("a", (ONE, (2,)), (TWO, (3,)))]))
    assert ended(client, 1) == (set(), {"a"})
    assert client.take_results().lost == {TWO}


def test_loads_begin_after_what_was_queued_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were scheduled ahead may still read the blocks that a load fills."""
    client = opened(FarTiers())
    store(client, one=(1,))
    copies, order = client._copies, list[str]()
    for name in ("mark", "load"):
        real = getattr(copies, name)

        def noted(*args: Any, name: str = name, real: Any = real) -> Any:
            order.append(name)
            return real(*args)

        monkeypatch.setattr(copies, name, noted)
    client.start(TransferCommands(loads=[load("a", (ONE, (2,)))]))
    ended(client, 1)
    assert order == ["mark", "load"]


def test_all_that_goes_on_is_pending() -> None:
    tiers = FarTiers(answering=False)
    client = opened(tiers)
    stores = [StoreCommand(ONE, (1,))]
    client.start(TransferCommands([TWO], stores, [load("a", (THREE, (2,)))]))
    client.finish_loads()
    assert client.take_results().pending == 3
    while tiers.asked:
        tiers.answer()
    client.finish_loads()
    assert client.take_results().pending == 0


def test_what_is_being_deleted_is_pending() -> None:
    """Otherwise an engine that was reset would find what it had stored before."""
    tiers = FarTiers()
    client = opened(tiers)
    store(client, one=(1,))
    tiers.answering = False
    client.start(TransferCommands(clear=True))
    client.finish_loads()
    assert client.take_results().pending == 1
    tiers.answer()
    client.finish_loads()
    assert client.take_results().pending == 0
    assert tiers.values == {}


def test_what_was_stored_is_deleted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    deleted = list[int]()

    class Counted(FarTiers):
        def delete(self, names: Sequence[bytes]) -> Ticket[Any]:
            deleted.append(len(names))
            return super().delete(names)

    monkeypatch.setattr(tier_client, "_MAX_STORED", 2)
    client = opened(Counted())
    store(client, one=(1,), two=(2,))
    for _ in range(2):
        client.start(TransferCommands(clear=True))
    store(client, one=(1,), two=(2,), three=(3,))
    client.start(TransferCommands(clear=True))
    # Of more chunks than it remembers, the last ones.
    assert deleted == [2, 0, 2]


def test_names_differ_by_engine_and_layout() -> None:
    def name(namespace: bytes, *shape: int) -> bytes:
        client = TierClient("")
        client.register_kv_caches([torch.zeros(8, *shape)])
        client.set_namespace(namespace)
        return client._name(ONE)

    names = [name(b"a", 1, 16, 4), name(b"b", 1, 16, 4), name(b"a", 2, 16, 4)]
    assert len({*names, ONE}) == 4
    assert name(b"a", 1, 16, 4) == names[0]


@pytest.mark.parametrize(("asked", "answered", "sleeps"), [(0, 0, 0), (2, 0, 1), (2, 1, 0)])
def test_an_idle_step_sleeps_only_where_nothing_has_ended(
    monkeypatch: pytest.MonkeyPatch, asked: int, answered: int, sleeps: int
) -> None:
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    tiers = FarTiers(answering=False)
    client = opened(tiers)
    for _ in range(asked):
        client.start(TransferCommands(lookups=[ONE]))
    for _ in range(answered):
        tiers.answer()
    client.wait()
    assert len(slept) == sleeps


def test_far_tiers_are_not_asked_for_what_the_host_tier_has() -> None:
    asked = list[int]()

    class Counted(FarTiers):
        def lookup(self, names: Sequence[bytes]) -> Any:
            asked.append(len(names))
            return super().lookup(names)

    client = opened(Counted(), tiers="host:1KiB")
    store(client, one=(1,))
    client.start(TransferCommands(lookups=[ONE]))
    client.start(TransferCommands(lookups=[ONE, TWO]))
    client.finish_loads()
    results = client.take_results()
    assert (set(results.present), set(results.absent), asked) == ({ONE}, {TWO}, [1])
    client.close()


def test_a_chunk_that_is_stored_again_stays_longer() -> None:
    client = opened(tiers="host:512B")
    for name in ("one", "two", "one", "three"):
        assert store(client, **{name: (1,)}) == {name.encode()}
    client.start(TransferCommands(lookups=[ONE, TWO, THREE]))
    client.finish_loads()
    results = client.take_results()
    assert (set(results.present), set(results.absent)) == ({ONE, THREE}, {TWO})
    client.close()


class _Failing:
    """A copy that fails while it is under way."""

    def done(self) -> bool:
        raise RuntimeError("injected")


@pytest.mark.parametrize("copies", ["store", "load"])
def test_what_a_failed_copy_began_has_ended_before_its_memory_is_used(
    monkeypatch: pytest.MonkeyPatch, copies: str
) -> None:
    client = opened(FarTiers())
    assert store(client, one=(1,)) == {ONE}
    finished = list[str]()

    def failing(*_: Any) -> Any:
        return _Failing()

    def finish(_: PlainCopies) -> None:
        finished.append(copies)

    replaced: dict[str, Callable[..., Any]] = {copies: failing, "finish": finish}
    for name, call in replaced.items():
        monkeypatch.setattr(PlainCopies, name, call)
    client.start(TransferCommands([], [StoreCommand(TWO, (2,))], [load("a", (ONE, (3,)))]))
    _, failed = ended(client, 1)
    assert finished == [copies]
    results = client.take_results()
    assert (set(results.refused), failed) == (
        ({TWO}, set()) if copies == "store" else (set(), {"a"})
    )
    client.close()


A, B, C = b"a", b"b", b"c"


def test_two_ranks_have_only_what_both_have() -> None:
    one = TransferResults(present={A, B}, stored={C}, pending=1)
    other = TransferResults(present={A}, absent={B}, refused={C})
    both = one.merge(other)
    assert both.present == {A}
    assert both.absent == {B}
    assert both.stored == set()
    assert both.refused == {C}
    assert both.pending == 1


def test_commands_are_taken_once() -> None:
    commands = TransferCommands(copies=[CopyCommand("a", 1, 2)], clear=True)
    assert commands
    taken = commands.take()
    assert taken.copies == [CopyCommand("a", 1, 2)]
    assert taken.clear
    assert not commands
    commands.lookups.append(A)
    assert not taken.lookups

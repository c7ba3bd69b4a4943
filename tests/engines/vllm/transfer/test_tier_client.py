"""Transfers that raise, when they are started or later: others of the step go on."""

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from picbench.engines.chunk_cache.tiers.background import Ticket, TicketGroup
from picbench.engines.chunk_cache.transfers import (
    ChunkLoad,
    CopyCommand,
    LoadCommand,
    StoreCommand,
    TransferCommands,
)
from picbench.engines.vllm.transfer.tier_client import TierClient

LOST, KEPT = b"lost", b"kept"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TierClient:
    """Its tiers answer every other ticket, from the second on."""
    given = list[int]()

    def ticket(answer: Any) -> Ticket[Any]:
        given.append(1)
        future: Future[list[Any]] = Future()
        if len(given) % 2:
            future.set_exception(RuntimeError("injected"))
        else:
            future.set_result([answer])
        return Ticket(1, None, [TicketGroup((0,), future)])

    client = TierClient("")
    client.register_kv_caches([torch.zeros(8, 1, 16, 4)])
    stack = SimpleNamespace(
        store=lambda *_, **__: ticket(("host",)),
        lookup=lambda *_: ticket("host"),
        fetch=lambda *_: ticket(None),
    )
    monkeypatch.setattr(client, "_stack", stack)
    return client


def test_a_store_that_raises_counts_as_refused(client: TierClient) -> None:
    client.start(TransferCommands(stores=[StoreCommand(LOST, (1,)), StoreCommand(KEPT, (2,))]))
    assert client.finish_loads() == (set(), set())
    results = client.take_results()
    assert (set(results.refused), set(results.stored)) == ({LOST}, {KEPT})
    assert not results.faults


def test_a_lookup_that_raises_counts_as_absent(client: TierClient) -> None:
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
        monkeypatch.setattr(client._blocks if name == "copy" else client, name, part(name))
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

"""What the scheduler knows of the tiers, without waiting for them."""

import pytest

from picbench.engines.chunk_cache import tier_index as module
from picbench.engines.chunk_cache.tier_index import Place, TierIndex
from picbench.engines.chunk_cache.transfers import CopyCommand, TransferCommands, TransferResults

A, B, C = b"a", b"b", b"c"


def told(directory: TierIndex, **reports: set[bytes]) -> None:
    directory.update(TransferResults(**{name: frozenset(keys) for name, keys in reports.items()}))


def test_tiers_of_our_own_hold_what_we_stored() -> None:
    directory = TierIndex(asks=False)
    assert directory.where(A) is Place.MISSING
    told(directory, stored={A}, refused={B})
    assert directory.where(A) is Place.REMOTE
    assert directory.where(B) is Place.MISSING


def test_tiers_that_others_use_are_asked() -> None:
    directory = TierIndex(asks=True)
    assert directory.where(A) is Place.UNKNOWN
    directory.asked(A)
    assert directory.where(A) is Place.ASKED
    told(directory, present={A}, absent={B})
    assert directory.where(A) is Place.REMOTE
    assert directory.where(B) is Place.MISSING


def test_a_chunk_that_was_missing_is_asked_for_again_later() -> None:
    directory = TierIndex(asks=True)
    told(directory, absent={A})
    directory.settle(A)
    assert directory.where(A) is Place.UNKNOWN


def test_settling_does_not_forget_what_is_there() -> None:
    directory = TierIndex(asks=True)
    told(directory, present={A})
    directory.settle(A)
    assert directory.where(A) is Place.REMOTE


def test_a_load_that_fails_counts_as_missing() -> None:
    directory = TierIndex(asks=True)
    told(directory, present={A})
    told(directory, lost={A})
    assert directory.where(A) is Place.MISSING


def test_a_chunk_that_is_lost_again_and_again_is_banned_for_a_while() -> None:
    now = 0.0
    directory = TierIndex(asks=True, clock=lambda: now)
    for expected in (Place.REMOTE, Place.REMOTE, Place.MISSING):
        told(directory, stored={A}, present={B})
        assert directory.where(A) is expected
        assert directory.where(B) is Place.REMOTE
        told(directory, lost={A})
    now = 61.0
    told(directory, stored={A})
    assert directory.where(A) is Place.REMOTE


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 2)
    directory = TierIndex(asks=False)
    for key in (A, B, C):
        told(directory, stored={key})
    assert [directory.where(key) for key in (A, B, C)] == [
        Place.MISSING,
        Place.REMOTE,
        Place.REMOTE,
    ]
    assert len(directory) == 2


def test_two_ranks_have_only_what_both_have() -> None:
    one = TransferResults(present=frozenset({A, B}), stored=frozenset({C}), pending=1)
    other = TransferResults(present=frozenset({A}), absent=frozenset({B}), refused=frozenset({C}))
    both = one.merge(other)
    assert both.present == {A}
    assert both.absent == {B}
    assert both.stored == frozenset()
    assert both.refused == {C}
    assert both.pending == 1


def test_orders_are_taken_once() -> None:
    orders = TransferCommands(copies=[CopyCommand(1, 2)], clear=True)
    assert orders
    taken = orders.take()
    assert taken.copies == [CopyCommand(1, 2)]
    assert taken.clear
    assert not orders
    orders.lookups.append(A)
    assert not taken.lookups

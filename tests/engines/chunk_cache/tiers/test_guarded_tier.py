"""A guarded tier costs little time and never returns junk, whatever is wrong with the tier."""

import logging
import threading
from collections.abc import Callable, Iterator
from time import sleep

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tier_faults import (
    Dead,
    Far,
    Flipping,
    Full,
    Lying,
    Miscounting,
    ReadOnly,
    Stuck,
    Swapping,
    Torn,
)

from picbench.engines.chunk_cache.tiers import guarded_tier
from picbench.engines.chunk_cache.tiers.envelope import (
    HEADER_BYTES,
    enclose,
    seal,
    stamp,
    unseal,
)
from picbench.engines.chunk_cache.tiers.guarded_tier import Backoff, GuardedTier, Timebox

A, B = b"a" * 32, b"b" * 32
ITEMS = [(A, seal(A, b"first")), (B, seal(B, b"second"))]
SHORT = 0.02


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    tier = Stuck()
    yield tier
    tier.released.set()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_intact_values_come_back_and_are_counted() -> None:
    guarded = GuardedTier(Far())
    assert guarded.put(ITEMS) == [True, True]
    first, nothing = guarded.get([A, b"c" * 32])
    assert first is not None
    assert unseal(A, first) == b"first"
    assert nothing is None
    counters = guarded.counters()
    assert (counters.hits, counters.misses, counters.stored) == (1, 1, 2)
    assert counters.bytes_read == HEADER_BYTES + len("first")
    assert counters.bytes_written == 2 * HEADER_BYTES + len("firstsecond")


@pytest.mark.parametrize("kind", [Flipping, Swapping, Torn])
def test_values_that_are_not_what_was_stored_are_missing_and_deleted(
    kind: Callable[[], Far], caplog: pytest.LogCaptureFixture
) -> None:
    tier = kind()
    guarded = GuardedTier(tier)
    guarded.put(ITEMS)
    assert guarded.get([A, B]) == [None, None]
    assert guarded.counters().corrupt == 2
    assert tier.inner.exists([A, B]) == [False, False]
    guarded.put(ITEMS)
    guarded.get([A, B])
    assert len(warnings(caplog)) == 1


def test_a_tier_that_holds_nothing_of_what_it_says_is_a_miss() -> None:
    guarded = GuardedTier(Lying())
    assert guarded.exists([A]) == [True]
    assert guarded.get([A]) == [None]
    assert guarded.counters().misses == 1


def test_what_was_not_found_is_written_until_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many keys as are remembered, those that were looked for last."""
    monkeypatch.setattr(guarded_tier, "_REMEMBERED", 2)
    guarded, keys = GuardedTier(Lying()), [A, B, b"c" * 32]
    for asked in (keys[:2], keys[:1], keys[2:]):
        guarded.get(asked)
    assert guarded.needs(keys) == [True, False, True]
    guarded.put(ITEMS)
    assert guarded.needs(keys) == [False, False, True]


def test_a_tier_that_forgets_an_answer_fails() -> None:
    guarded = GuardedTier(Miscounting())
    assert guarded.get([A, B]) == [None, None]
    assert guarded.counters().errors == 1


def test_a_full_tier_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    guarded = GuardedTier(Full())
    assert guarded.put(ITEMS) == [False, False]
    assert guarded.counters().refused == 2
    assert guarded.exists([A]) == [False]
    assert guarded.counters().skipped == 0
    guarded.put(ITEMS)
    [said] = warnings(caplog)
    assert "is full" in said


def test_a_call_that_hangs_is_answered_without_it(stuck: Stuck) -> None:
    guarded = GuardedTier(stuck, deadline=SHORT)
    assert guarded.get([A]) == [None]  # returns although the tier never does
    assert guarded.counters().timeouts == 1


def test_hanging_calls_hold_a_bounded_number_of_threads(stuck: Stuck) -> None:
    no_pause = Backoff(first=0.0, longest=0.0)
    before = threading.active_count()
    guarded = GuardedTier(stuck, deadline=SHORT, backoff=no_pause, threads=3)
    for _ in range(8):
        assert guarded.put(ITEMS) == [False, False]
    assert stuck.entered == 3
    assert threading.active_count() <= before + 3
    assert guarded.counters().timeouts == 8


def test_threads_come_back_when_the_tier_does(stuck: Stuck) -> None:
    no_pause = Backoff(first=0.0, longest=0.0)
    guarded = GuardedTier(stuck, deadline=SHORT, backoff=no_pause, threads=1)
    assert guarded.exists([A]) == [False]
    stuck.released.set()
    while guarded.counters().stored == 0:
        guarded.put(ITEMS)
    assert guarded.exists([A]) == [True]


def test_a_failing_tier_is_left_alone_for_longer_and_longer(clock: Clock) -> None:
    tier = Dead()
    guarded = GuardedTier(tier, backoff=Backoff(first=1.0, longest=5.0), clock=clock)
    asked_at = []
    for now in range(40):
        clock.now = now
        before = len(tier.calls)
        guarded.exists([A])
        if len(tier.calls) > before:
            asked_at.append(now)
    assert asked_at == [0, 1, 3, 7, 12, 17, 22, 27, 32, 37]
    assert guarded.counters().errors == len(asked_at)
    assert guarded.counters().skipped == 40 - len(asked_at)


def test_an_outage_is_one_warning_and_its_end_is_noted_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tier = Dead("redis://host:6379/0")
    guarded = GuardedTier(tier, backoff=Backoff(first=1.0, longest=1.0), clock=clock)
    for _ in range(5):
        clock.now += 2
        guarded.get([A])
    assert len(warnings(caplog)) == 1
    assert "redis://host:6379/0" in warnings(caplog)[0]
    assert "`tiers`" in warnings(caplog)[0]
    tier.dead = False
    for _ in range(3):
        clock.now += 2
        guarded.get([A])
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.INFO] == [
        "tier redis://host:6379/0 answers again"
    ]
    tier.dead = True
    guarded.get([A])
    assert len(warnings(caplog)) == 2


def test_a_tier_that_cannot_be_written_to_is_read(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Writes are left alone for longer and longer; each change is one line."""
    caplog.set_level(logging.INFO)
    tier = ReadOnly("disk:/kv")
    tier.inner.put(ITEMS[:1])
    guarded = GuardedTier(tier, backoff=Backoff(first=1.0, longest=5.0), clock=clock)
    asked_at = []
    for now in range(20):
        clock.now = now
        before = tier.calls.count("put")
        assert guarded.put(ITEMS[1:]) == [False]
        if tier.calls.count("put") > before:
            asked_at.append(now)
        assert guarded.exists([A, B]) == guarded.exists([A, B]) == [True, False]
        assert guarded.get([A])[0] is not None
        guarded.delete([A])
    assert asked_at == [0, 1, 3, 7, 12, 17]
    assert "delete" not in tier.calls
    assert len(warnings(caplog)) == 1
    assert "disk:/kv cannot be written to: OSError: [Errno 30]" in warnings(caplog)[0]
    tier.locked = False
    clock.now = 30
    assert guarded.put(ITEMS[1:]) == [True]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.INFO] == [
        "tier disk:/kv can be written to again"
    ]


def test_an_outage_ends_with_a_write_too(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """As long as the whole tier fails, writes are no outage of their own."""
    tier = Dead()
    guarded = GuardedTier(tier, backoff=Backoff(first=1.0), clock=clock)
    guarded.exists([A])
    clock.now = 1
    assert guarded.put(ITEMS) == [False, False]
    assert len(warnings(caplog)) == 1
    tier.dead = False
    clock.now = 3
    assert guarded.put(ITEMS) == [True, True]
    assert guarded.exists([A]) == [True]
    assert len(warnings(caplog)) == 1


def test_one_probe_at_a_time(clock: Clock, stuck: Stuck) -> None:
    guarded = GuardedTier(stuck, deadline=SHORT, backoff=Backoff(first=1.0), clock=clock)
    guarded.exists([A])
    clock.now = 1.5
    probe = threading.Thread(target=guarded.exists, args=([A],))
    probe.start()
    while stuck.entered < 2:
        sleep(0.001)
    assert guarded.exists([A]) == [False]
    assert stuck.entered == 2
    probe.join()


def test_empty_batches_ask_nobody() -> None:
    tier = Far()
    guarded = GuardedTier(tier)
    assert guarded.get([]) == guarded.put([]) == guarded.exists([]) == []
    assert tier.calls == []


def test_closing_a_tier_that_hangs_returns(stuck: Stuck) -> None:
    guarded = GuardedTier(stuck, deadline=SHORT)
    guarded.get([A])
    guarded.close()


def test_a_thread_that_cannot_be_started_takes_none_away(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Timebox("tier", 2)

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="new thread"):
                box.run(lambda: 1, SHORT)
    assert box.run(lambda: 1, 20.0) == 1


keys = st.binary(min_size=1, max_size=40)
payloads = st.binary(max_size=300)


@given(key=keys, payload=payloads)
def test_what_is_sealed_is_unsealed(key: bytes, payload: bytes) -> None:
    sealed = seal(key, payload)
    assert len(sealed) == HEADER_BYTES + len(payload)
    opened = unseal(key, sealed)
    assert opened == payload
    assert opened is not None
    assert opened.readonly


@given(key=keys, payload=payloads)
def test_sealing_in_two_steps_is_the_same(key: bytes, payload: bytes) -> None:
    assert stamp(key, enclose(payload)) == seal(key, payload)


@given(key=keys, payload=payloads, data=st.data())
def test_a_flipped_bit_shows(key: bytes, payload: bytes, data: st.DataObject) -> None:
    sealed = bytearray(seal(key, payload))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    assert unseal(key, sealed) is None


@given(key=keys, payload=payloads, data=st.data())
def test_a_cut_or_longer_value_shows(key: bytes, payload: bytes, data: st.DataObject) -> None:
    sealed = bytes(seal(key, payload))
    cut = data.draw(st.integers(0, len(sealed) - 1))
    assert unseal(key, sealed[:cut]) is None
    assert unseal(key, sealed + b"\0") is None


@given(key=keys, other=keys, payload=payloads)
def test_another_keys_value_shows(key: bytes, other: bytes, payload: bytes) -> None:
    assume(key != other)
    assert unseal(other, seal(key, payload)) is None

"""How often chunks were seen: counts, ageing, memory."""

import hashlib
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.chunk_cache import sketch
from picbench.engines.chunk_cache.sketch import FrequencySketch


def key(name: object) -> bytes:
    return b"c" + hashlib.sha256(str(name).encode()).digest()


@given(st.lists(st.integers(0, 40), max_size=200))
def test_counts_are_those_of_what_was_seen(names: list[int]) -> None:
    found, known = FrequencySketch(), Counter[int]()
    for name in names:
        assert found.note(key(name)) >= known[name]
        known[name] += 1
    assert all(found.count(key(name)) >= count for name, count in known.items())
    # So few chunks share no counter in every row.
    assert found.count(key("never")) == 0


@given(st.lists(st.integers(0, 1000), max_size=100))
def test_the_same_sightings_give_the_same_counts(names: list[int]) -> None:
    one, other = FrequencySketch(), FrequencySketch()
    assert [one.note(key(n)) for n in names] == [other.note(key(n)) for n in names]


def test_new_chunks_come_again_as_others_did() -> None:
    found = FrequencySketch()
    assert found.recurrence == 0.5
    for number in range(49):
        found.note(key(number))
    assert found.recurrence == 0.01
    for number in [*range(24), *range(20)]:  # The third time says nothing about new ones.
        found.note(key(number))
    assert found.recurrence == 0.49
    for number in range(100, 200):  # Nor do those that are expected.
        assert found.note(key(number), times=2) == 0
        assert found.note(key(number)) == 2
    assert found.recurrence == 0.49
    for number in range(sketch._AGE):
        found.note(key(f"once {number}"))
    assert found.recurrence < 0.01


def test_memory_is_fixed_and_what_was_seen_once_is_forgotten() -> None:
    found = FrequencySketch()
    before = [len(row) for row in found._rows]
    for _ in range(8):
        found.note(key("often"))
    found.note(key("once"))
    for number in range(sketch._AGE - 10):
        found.note(key(f"new {number}"))
    # What never recurs is seldom taken for what does.
    assert sum(found.count(key(f"other {number}")) > 0 for number in range(1000)) < 10
    for number in range(10):
        found.note(key(f"last {number}"))
    assert [len(row) for row in found._rows] == before
    assert found.count(key("often")) == 4
    assert found.count(key("once")) == found.count(key("new 7")) == 0


def test_counts_end_at_a_byte() -> None:
    found = FrequencySketch()
    assert [found.note(key("a")) for _ in range(300)][-1] == found.count(key("a")) == 255

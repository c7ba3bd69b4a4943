"""What only the host tier promises."""

import pytest
from held import held

from picbench.engines.chunk_cache.tiers.backends.host import Host

A, B = b"a" * 32, b"b" * 32


def test_values_live_in_memory_of_the_allocator() -> None:
    made: list[bytearray] = []

    def allocate(nbytes: int) -> memoryview:
        made.append(bytearray(nbytes))
        return memoryview(made[-1])

    host = Host(100, allocate)
    assert host.put([(A, b"value")]) == [True]
    (value,) = host.get([A])
    assert isinstance(value, memoryview)
    assert value.obj is made[0]
    assert made == [b"value"]


def test_a_reader_keeps_what_is_evicted_and_cannot_write_to_it() -> None:
    host = Host(4)
    host.put([(A, b"1234")])
    (value,) = host.get([A])
    host.put([(B, b"5678")])
    assert host.get([A]) == [None]
    assert isinstance(value, memoryview)
    assert value == b"1234"
    with pytest.raises(TypeError, match="read-only"):
        value[0] = 0


def test_no_memory_means_not_kept_and_not_counted() -> None:
    def allocate(nbytes: int) -> memoryview:
        raise MemoryError

    host = Host(100, allocate)
    assert host.put([(A, b"value")]) == [False]
    assert held(host) == (0, 0)


def test_the_bound_holds_while_a_value_is_being_copied() -> None:
    asked: list[list[bool]] = []

    def allocate(nbytes: int) -> memoryview:
        if not asked:
            asked.append([])
            asked[0] = host.put([(B, b"12345")])
        return memoryview(bytearray(nbytes))

    host = Host(8, allocate)
    assert host.put([(A, b"1234")]) == [True]
    assert asked == [[False]]
    assert held(host)[1] == 4

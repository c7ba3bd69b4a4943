"""Which keys name canonical blocks, and that no two lists of fields make one key."""

from picbench.engines.planning.keys import (
    ChunkEvent,
    anchor_key,
    canonical_key,
    computed_key,
    is_canonical,
    pack_numbers,
    root_key,
)


def test_keys_of_other_lengths_and_kinds_are_not_canonical() -> None:
    """An engine's own keys have 32 bytes, of which the first may be any."""
    key = canonical_key(anchor_key("", ()), (1, 2))
    assert is_canonical(key)
    assert len(key) == 33
    assert not is_canonical(b"c" * 32)
    assert not is_canonical(b"c" * 34)
    assert not is_canonical(b"d" + key[1:])
    assert not is_canonical(root_key(""))


def test_every_field_counts() -> None:
    ids, places = pack_numbers((1, 2)), pack_numbers((0, 1))
    event = ChunkEvent(5, b"chunk", (0, 1))
    keys = [
        computed_key(b"p", ids, places),
        computed_key(b"q", ids, places),
        computed_key(b"p", pack_numbers((2, 1)), places),
        computed_key(b"p", ids, pack_numbers((0, 2))),
        computed_key(b"p", ids, places, [event]),
        computed_key(b"p", ids, places, [event._replace(start=6)]),
        computed_key(b"p", ids, places, [event._replace(key=b"other")]),
        computed_key(b"p", ids, places, [event._replace(linked=(0,))]),
        computed_key(b"p", ids, places, [event, event]),
        canonical_key(b"p", (1, 2)),
        canonical_key(b"q", (1, 2)),
        root_key(""),
        root_key("a"),
        *(anchor_key(scope, ids) for scope in ("", "a") for ids in ((), (1,), (1, 1))),
        *(anchor_key("", (), position) for position in (0, 1)),
    ]
    assert len(set(keys)) == len(keys)
    assert root_key("a") == root_key("a")


def test_numbers_are_little_endian_and_eight_bytes_each() -> None:
    assert pack_numbers((1, 258)) == bytes([1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0])

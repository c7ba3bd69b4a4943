"""Which chunks stay in the cache of pages, and which pages of a chunk are used."""

import pickle

import numpy as np
import pytest

from picbench.engines.planning.chunk_pages import ChunkPages, PageCache, used_pages
from picbench.engines.planning.keys import (
    ChunkEvent,
    anchor_key,
    canonical_key,
    computed_key,
    is_canonical,
    pack_numbers,
    root_key,
)
from picbench.engines.planning.pages import TokenIds
from picbench.engines.planning.policy import LayoutConfig, Segment

LAYOUT = LayoutConfig(block_size=4)


def find(cache: PageCache, token: int, length: int, root: bytes = b"root") -> ChunkPages:
    return cache.find(Segment((token,) * length, chunk=True), root, 0, LAYOUT)


def test_the_chunk_that_was_used_longest_ago_goes_first() -> None:
    cache = PageCache(40)
    first, second = find(cache, 1, 16), find(cache, 2, 16)
    assert (len(cache), cache.tokens) == (2, 32)
    assert find(cache, 1, 16) is first
    third = find(cache, 3, 16)  # 48 tokens: the second one goes.
    assert (len(cache), cache.tokens) == (2, 32)
    assert find(cache, 1, 16) is first
    assert find(cache, 3, 16) is third
    assert find(cache, 2, 16) is not second


def test_chunks_that_fill_the_cache_all_stay() -> None:
    cache = PageCache(32)
    first, second = find(cache, 1, 16), find(cache, 2, 16)
    assert find(cache, 1, 16) is first
    assert find(cache, 2, 16) is second


def test_a_chunk_larger_than_the_cache_is_there_alone() -> None:
    cache = PageCache(40)
    find(cache, 1, 16)
    large = find(cache, 2, 50)
    assert (len(cache), cache.tokens) == (1, 50)
    assert find(cache, 2, 50) is large
    # It makes room for two others when it goes.
    small = [find(cache, token, 16) for token in (3, 4)]
    assert (len(cache), cache.tokens) == (2, 32)
    assert [find(cache, token, 16) for token in (3, 4)] == small


def test_what_a_chunk_is_compiled_after_tells_it_apart() -> None:
    cache = PageCache()
    one, other = find(cache, 1, 6), find(cache, 1, 6, b"other")
    assert one.pages[0].key != other.pages[0].key
    assert len(cache) == 2


@pytest.mark.parametrize(
    ("length", "linked", "used"),
    [
        (10, (), (0, 1, 2)),
        (10, range(4), (1, 2)),
        (10, range(3), (0, 1, 2)),
        (10, (8, 9), (0, 1)),  # The last page has two tokens.
        (10, (9,), (0, 1, 2)),
        (8, range(4, 8), (0,)),
        (10, range(10), ()),
    ],
)
def test_pages_that_hold_a_token_which_is_not_linked(
    length: int, linked: range | tuple[int, ...], used: tuple[int, ...]
) -> None:
    assert used_pages(length, linked, 4) == used
    view = ChunkPages.of(Segment((7,) * length, chunk=True), b"r", 0, LAYOUT)
    assert view.view(tuple(linked), private=False).view.used == used


def test_they_are_extended_and_read_as_a_list_is() -> None:
    ids = TokenIds([1, 2, 3])
    ids.append(4)
    ids.extend([5, 6])
    ids += TokenIds([7])
    assert (list(ids), len(ids), ids[6]) == ([1, 2, 3, 4, 5, 6, 7], 7, 7)
    assert list(ids[2:4]) == [3, 4]
    ids.clear()
    assert not ids


def test_a_copy_is_one() -> None:
    ids = TokenIds([1, 2])
    same, copied = TokenIds(ids), ids.copy()
    ids.append(3)
    assert list(same) == copied == [1, 2]
    assert type(copied) is list


def test_they_are_sent_and_read_as_bytes() -> None:
    ids = TokenIds(range(1000, 33000))
    sent = pickle.dumps(ids, protocol=5)
    assert len(sent) < 4 * len(ids) + 200
    received = pickle.loads(sent)
    assert (type(received), list(received)) == (TokenIds, list(ids))
    assert np.asarray(received).dtype == np.int32


def test_what_is_no_token_id_is_refused() -> None:
    with pytest.raises(OverflowError):
        TokenIds([1 << 31])


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

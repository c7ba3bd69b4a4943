"""Which chunks stay in the cache of pages, and which pages of a chunk are used."""

import pytest

from picbench.engines.planning.chunk_pages import ChunkPages, PageCache, used_pages
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

"""Where a chunk stands in its document, what is sent of that, and the keys of it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.planning.documents import (
    WIDTH,
    ChunkContexts,
    Context,
    are_ids,
    pack_ids,
    preceding,
    unpack_ids,
)

# Few ids, some of which share bytes, so that chunks are found often and at several places.
ids = st.sampled_from([[0, 1, 256, 65536], [0, 1, 256, 0xD800, 0xDC00, 0xFEFF, 1 << 30]]).flatmap(
    lambda some: st.lists(st.sampled_from(some), max_size=12)
)


def packed(values: Sequence[int]) -> bytes:
    found = pack_ids(values)
    assert found is not None
    return found


def before(document: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...] | None:
    found = preceding(packed(document), packed(chunk))
    return None if found is None else unpack_ids(found)


@given(ids, ids.filter(bool))
def test_a_chunk_is_found_at_its_last_place(document, chunk):
    size = len(chunk)
    places = [i for i in range(len(document)) if document[i : i + size] == chunk]
    expected = tuple(document[: places[-1]]) if places else None
    assert before(document, chunk) == expected


@given(ids, ids.filter(bool), ids)
def test_a_document_up_to_a_chunk_stays(text, chunk, after):
    assert before([*text, *chunk], chunk) == tuple(text)
    assert before([*text, *chunk, *after], chunk) is not None


@given(st.lists(st.integers(0, (1 << 31) - 1), max_size=20))
def test_ids_are_packed(values):
    assert unpack_ids(packed(values)) == tuple(values)
    assert len(packed(values)) == WIDTH * len(values)
    assert tuple(Context.of(values)) == tuple(values)
    assert Context.of(values) == Context.of(tuple(values))


@pytest.mark.parametrize("value", [-1, 1 << 31, 1 << 70, 1.0, None])
def test_what_is_no_id_is_not_packed(value):
    assert pack_ids([3, value]) is None
    with pytest.raises(ValueError, match="no token id"):
        Context.of([3, value])
    assert not are_ids(b"\0\0\0")


@given(st.lists(ids, max_size=6))
def test_contexts_are_sent_whole(contexts):
    sent = ChunkContexts.of([packed(context) for context in contexts])
    found = [tuple(context) for context in sent.contexts()]
    assert found == ([tuple(context) for context in contexts] if any(contexts) else [])
    wire = {"ids": sent.ids, "places": [list(place) for place in sent.places]}
    assert ChunkContexts.sent(wire, len(contexts)) == sent


def test_beginnings_of_a_text_are_sent_once():
    text = list(range(40))
    lengths = [40, 0, 10, 39, 10, 1]
    sent = ChunkContexts.of([packed(text[:n]) for n in lengths] + [packed([7, 8])])
    assert len(sent.ids) == WIDTH * 42
    found = sent.contexts()
    assert [len(context) for context in found] == [*lengths, 2]
    assert len({id(context.text) for context in found if context}) == 2


@given(ids, ids, st.permutations(range(13)))
def test_keys_of_beginnings_do_not_depend_on_their_order(text, other, order):
    """A context's key is that of its own ids after its root, however many are hashed with it."""
    context = Context.of(text)
    for length in order:
        if length <= len(text):
            part, alone = Context(context.text, length), Context.of(text[:length])
            assert part.key_after(b"a") == alone.key_after(b"a") != alone.key_after(b"b")
    same = Context.of(other).key_after(b"a") == context.key_after(b"a")
    assert same == (text == other)


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"ids": bytes(8), "places": [[0, 2], [0, 1]]}, True),
        ({"ids": b"", "places": []}, True),
        ({"ids": bytes(8), "places": [[0, 2]]}, False),  # Of one chunk of two.
        ({"ids": bytes(8), "places": [[0, 2], [0, 3]]}, False),
        ({"ids": bytes(8), "places": [[0, 2], [2, 1]]}, False),
        ({"ids": bytes(8), "places": [[0, 2], [-1, 1]]}, False),
        ({"ids": bytes(7), "places": [[0, 1], [0, 1]]}, False),
        ({"ids": b"\0\0\0\xff", "places": [[0, 1], [0, 1]]}, False),
        ({"ids": "text", "places": [[0, 1], [0, 1]]}, False),
        ({"ids": bytes(8), "places": [[0, 1], [0]]}, False),
        ({"ids": bytes(8)}, False),
        (None, False),
    ],
)
def test_what_does_not_say_where_contexts_are_is_not_taken(given, right):
    assert (ChunkContexts.sent(given, 2) is not None) == right

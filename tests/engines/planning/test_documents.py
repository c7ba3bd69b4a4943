"""Where a chunk stands in its document."""

from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.planning.documents import upto

# Few ids, some of which share bytes, so that chunks are found often and at several places.
ids = st.lists(st.sampled_from([0, 1, 256, 65536, 1 << 30]), max_size=12)


@given(ids, ids.filter(bool))
def test_a_chunk_is_found_at_its_last_place(document, chunk):
    size = len(chunk)
    places = [i for i in range(len(document)) if document[i : i + size] == chunk]
    expected = tuple(document[: places[-1] + size]) if places else None
    assert upto(document, chunk) == expected


@given(ids, ids.filter(bool), ids)
def test_a_document_up_to_a_chunk_stays(before, chunk, after):
    assert upto([*before, *chunk], chunk) == (*before, *chunk)
    assert upto([*before, *chunk, *after], chunk) is not None

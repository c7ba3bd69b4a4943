from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.workloads.facts import chunk_id, chunk_sets, fingerprint, summarise
from picbench.workloads.sample import Sample, SampleSegment


def sample(*chunks: tuple[int, ...], name: str = "x") -> Sample:
    segments = [SampleSegment("chunk", "", chunk) for chunk in chunks]
    return Sample(name, "musique", (SampleSegment("text", "", (1, 2)), *segments), ("a",), 8)


ONE, TWO = sample((3, 4, 5), (6,)), sample((6,), (3, 4, 5), (6,), (7, 8))


def test_counts_and_reuse() -> None:
    found = summarise([ONE, TWO])
    assert (found.dataset, found.samples, found.chunks, found.unique_chunks) == ("musique", 2, 6, 3)
    assert (found.mean_tokens, found.max_tokens, found.truncated) == (7.5, 9, 0)
    # of 15 tokens, 5 lie in chunks seen before: 6 | 3 4 5 | 6
    assert found.reuse == pytest.approx(5 / 15)
    assert found.fingerprint == fingerprint([ONE, TWO])


def test_truncated_samples_are_counted() -> None:
    assert summarise([ONE, replace(TWO, truncated=True)]).truncated == 1


def test_the_fingerprint_is_the_same_everywhere() -> None:
    assert fingerprint([ONE]) == "6ca08579a9914f07c00867e9b84bc72c6ebfd5cc78870a8161d6f28a3341778f"


@pytest.mark.parametrize(
    "change",
    [
        {"answers": ("b",)},
        {"max_tokens": 9},
        {"dataset": "hotpotqa"},
        {"segments": (*ONE.segments[:-1], SampleSegment("text", "", (6,)))},
        {"segments": (*ONE.segments[:-1], SampleSegment("chunk", "", (7,)))},
        {"segments": (*ONE.segments[:1], SampleSegment("chunk", "", (3, 4, 5, 6)))},
    ],
)
def test_the_fingerprint_sees_every_change(change: dict[str, Any]) -> None:
    assert fingerprint([replace(ONE, **change)]) != fingerprint([ONE])


def test_a_chunk_in_another_document_is_another_chunk() -> None:
    head, *chunks = ONE.segments
    lead = SampleSegment("text", "", (9,))
    known = replace(ONE, segments=(head, *(replace(chunk, before=lead) for chunk in chunks)))
    assert fingerprint([known]) != fingerprint([ONE])
    assert fingerprint([known.without_documents()]) == fingerprint([ONE])
    found = summarise([ONE, known])
    assert (found.unique_chunks, found.reuse) == (4, 0.0)
    assert summarise([known, known]).unique_chunks == 2


def test_the_fingerprint_sees_the_order() -> None:
    assert fingerprint([ONE, TWO]) != fingerprint([TWO, ONE])


def clusters(*chunks: tuple[int, ...]) -> list[str]:
    """The clusters of samples whose chunks have these (single) tokens."""
    made = [sample(*((token,) for token in own), name=f"s{n}") for n, own in enumerate(chunks)]
    return [found.cluster for found in chunk_sets(made).values()]


def test_samples_that_share_a_chunk_are_of_one_cluster() -> None:
    assert clusters((1, 2), (3,), (2, 4), (4,), (5,)) == ["s0", "s1", "s0", "s0", "s4"]


def test_a_chunk_that_all_samples_have_links_none() -> None:
    assert clusters((9, 1), (9, 2), (1, 9)) == ["s0", "s1", "s0"]


def test_the_same_documents_in_another_order_are_the_same_set() -> None:
    one, other, more = chunk_sets(
        [sample((1,), (2,), name="a"), sample((2,), (1,), (1,), name="b"), sample((1,), name="c")]
    ).values()
    assert one.documents == other.documents != more.documents
    assert one.chunks == other.chunks[1::-1]


def test_a_chunk_of_another_document_is_another_chunk() -> None:
    (_, chunk), (_, other) = sample((3,)).segments, sample((4,)).segments
    assert len({chunk_id(chunk), chunk_id(other), chunk_id(replace(chunk, before=other))}) == 3
    assert chunk_id(replace(chunk, text="other")) == chunk_id(chunk)


@given(st.lists(st.lists(st.integers(1, 12), max_size=3), min_size=1, max_size=12))
def test_clusters_are_the_components_of_sharing(chunks: list[list[int]]) -> None:
    found = clusters(*map(tuple, chunks))
    common = set.intersection(*map(set, chunks))
    reach = [{n} for n in range(len(chunks))]
    for _ in chunks:
        for a, b in combinations(range(len(chunks)), 2):
            if (set(chunks[a]) & set(chunks[b])) - common:
                reach[a] |= reach[b]
                reach[b] |= reach[a]
    assert found == [f"s{min(own)}" for own in reach]

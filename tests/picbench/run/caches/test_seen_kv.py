"""What caches that never evict have of prompts, and what prompts have in common."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.algorithms import Reuse
from picbench.run.cache_state import SeenKv, count_shared
from picbench.workloads.sample import Sample, SampleSegment

A, B, C = (1,) * 20, (2,) * 12, (1,) * 8 + (3,) * 4


def sample(*chunks: tuple[int, ...], head: tuple[int, ...] = (9,) * 4, tail: int = 8) -> Sample:
    segments = (
        SampleSegment("text", "", head),
        *(SampleSegment("chunk", "", chunk) for chunk in chunks),
        SampleSegment("text", "", (tail,) * 3),
    )
    return Sample("s", "fake", segments, (), 1)


def test_chunks_are_found_at_any_place_and_where_they_are_repeated() -> None:
    seen = SeenKv(Reuse.CHUNKS, 16)
    assert seen.find(sample(A, B)) == 0
    assert seen.find(sample(A, B, A)) == 20
    seen.add(sample(A))
    assert seen.find(sample(B, A)) == 20
    assert seen.find(sample(B, A, A)) == 40


def test_a_chunk_in_another_document_is_another_one() -> None:
    seen = SeenKv(Reuse.CHUNKS, 16)
    other = SampleSegment("chunk", "", A, before=SampleSegment("text", "", (5,)))
    seen.add(Sample("s", "fake", (other,), (), 1))
    assert seen.find(sample(A)) == 0


def test_prefixes_are_found_in_whole_blocks_and_end_before_the_last_token() -> None:
    seen = SeenKv(Reuse.PREFIX, 16)
    seen.add(sample(A, B))
    assert seen.find(sample(A, C)) == 16
    assert seen.find(sample(B, A)) == 0
    whole = sample(A, (4,) * 5)
    seen.add(whole)
    assert len(whole.tokens) == 32
    assert seen.find(whole) == 16


def test_an_arm_that_reuses_nothing_finds_nothing() -> None:
    seen = SeenKv(Reuse.NOTHING, 16)
    seen.add(sample(A))
    assert seen.find(sample(A)) == 0
    assert count_shared([sample(A), sample(A)], Reuse.NOTHING) == [0, 0]


@pytest.mark.parametrize(
    ("prompts", "prefix", "chunks"),
    [
        ([[A, B]], [0], [0]),
        ([[A, B, A]], [0], [20]),
        ([[A], [B]], [4, 4], [4, 4]),
        ([[A], [C]], [12, 12], [12, 12]),
        ([[B, A], [C, A]], [4, 4], [4 + 20, 4 + 8 + 20]),
        ([[A, B], [A, B]], [39, 39], [39, 39]),
    ],
)
def test_what_prompts_have_in_common(
    prompts: list[list[tuple[int, ...]]], prefix: list[int], chunks: list[int]
) -> None:
    samples = [sample(*found) for found in prompts]
    assert count_shared(samples, Reuse.PREFIX) == prefix
    assert count_shared(samples, Reuse.CHUNKS) == chunks


TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=6).map(tuple)


@given(st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=5))
def test_a_group_shares_at_least_what_it_finds_in_any_order(
    prompts: list[list[tuple[int, ...]]],
) -> None:
    samples = [sample(*found) for found in prompts]
    for reuse in (Reuse.CHUNKS, Reuse.PREFIX):
        shared = count_shared(samples, reuse)
        for last in range(len(samples)):
            seen = SeenKv(reuse, 2)
            for number, other in enumerate(samples):
                if number != last:
                    seen.add(other)
            assert seen.find(samples[last]) <= shared[last]

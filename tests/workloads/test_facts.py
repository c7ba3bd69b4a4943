from dataclasses import replace
from typing import Any

import pytest

from picbench.workloads.facts import fingerprint, summarise
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

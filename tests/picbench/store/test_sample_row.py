"""Rows: what is kept of a request."""

import math

import pytest

from picbench.engines.request import Hits, Result, Timings, TokenCounts
from picbench.errors import DataError
from picbench.store.records import ArmBatch, Failure, Grader, GroupResult, to_rows
from picbench.workloads.facts import ChunkSet
from picbench.workloads.sample import Sample, SampleSegment

RIGHT = Grader(lambda text, answers: 1.0)
SETS = {str(n): ChunkSet(("c",), "d", "0") for n in range(2)}


def result(**changes: object) -> Result:
    values = {
        "text": "yes",
        "tokens": (5, 6),
        "prompt_tokens": (1, 2, 3),
        "timings": Timings(0.1, 0.05, 0.01, 0.5),
        "counts": TokenCounts(prompt=3),
        "hits": Hits(copied=2, tiers={"host": 2}),
        "finish_reason": "length",
    }
    return Result(**{**values, **changes})  # type: ignore[arg-type]


def batch(*outcomes: Result | Failure) -> ArmBatch:
    samples = tuple(
        Sample(str(n), "musique", (SampleSegment("text", "a", (1, 2, 3)),), ("yes",), 4, "file:1")
        for n in range(len(outcomes))
    )
    return ArmBatch(0, "mepic", samples, GroupResult(outcomes, busy=1.0))


def test_hits_by_tier_are_kept() -> None:
    (row,) = to_rows(batch(result()), RIGHT, SETS)
    assert row.error is None
    assert row.hits == Hits(copied=2, tiers={"host": 2})


def test_rows_name_what_they_share_documents_with() -> None:
    rows = to_rows(batch(result(), Failure("gone")), RIGHT, SETS)
    assert [(row.documents, row.cluster) for row in rows] == [("d", "0"), ("d", "0")]
    assert [row.outcome for row in rows] == ["answered", "error"]


def test_a_rejected_request_is_no_fast_one() -> None:
    """It was answered at once and has no tokens: as a result it would flatter every latency."""
    rejected = result(tokens=(), text="", finish_reason="rejected")
    kept, refused = to_rows(batch(result(), rejected), RIGHT, SETS)
    assert kept.ttft_ms == 100.0
    assert refused.error == "rejected: short of KV blocks"
    assert refused.ttft_ms is None
    assert not refused.timed


@pytest.mark.parametrize(
    ("reply", "answers", "graded"),
    [
        ("Oslo", ("Oslo",), (1.0, "answered")),
        ("Rome", ("Oslo",), (0.0, "answered")),
        ("pass", ("Oslo",), (0.0, "abstained")),
        ("pass", ("pass",), (1.0, "answered")),
        (" \n", ("Oslo",), (None, "unparsed")),
        ("?", ("Oslo",), (None, "unparsed")),
        ("", (), (None, "answered")),
        ("Oslo", (), (None, "answered")),
    ],
)
def test_replies_have_a_score_and_an_outcome(
    reply: str, answers: tuple[str, ...], graded: tuple[float | None, str]
) -> None:
    def score(text: str, wanted: object) -> float | None:
        return None if text == "?" else float(text in answers)

    assert Grader(score, lambda text: text == "pass")(reply, answers) == graded


@pytest.mark.parametrize("wrong", [math.nan, -0.1, 1.5])
def test_a_metric_that_gives_no_score_is_an_error(wrong: float) -> None:
    """A mean with a NaN is one, whatever the other scores are."""
    with pytest.raises(DataError, match=f"the score of a reply is {wrong}"):
        Grader(lambda text, wanted: wrong)("Oslo", ("Oslo",))

"""Rows: what is kept of a request."""

import math

import pytest

from picbench.engines.request import Hits, Result, Timings, TokenCounts
from picbench.errors import DataError
from picbench.store.records import ArmBatch, Failure, Grader, GroupResult, to_rows
from picbench.workloads.facts import ChunkSet
from picbench.workloads.sample import Sample, SampleSegment


def test_rows_have_what_became_of_each_request() -> None:
    """A rejected one was answered at once, without tokens: it would flatter every latency."""
    times, counts = Timings(0.1, 0.05, 0.01, 0.5), TokenCounts(prompt=3)
    hits = Hits(copied=2, tiers={"host": 2})
    answered = Result("yes", (5, 6), (1, 2, 3), times, counts, hits, "length")
    rejected = Result("", (), (1, 2, 3), times, counts, hits, "rejected")
    aborted = Result("y", (5,), (1, 2, 3), times, counts, hits, "abort")
    empty = Result("", (), (1, 2, 3), times, counts, hits, "stop")
    outcomes = (answered, Failure("gone"), rejected, aborted, empty)
    segments = (SampleSegment("text", "a", (1, 2, 3)),)
    samples = [Sample(str(n), "musique", segments, ("yes",), 4, "file:1") for n in range(5)]
    batch = ArmBatch(0, "mepic", samples, GroupResult(outcomes, busy=1.0))
    sets = {str(n): ChunkSet(("c",), "d", "0") for n in range(5)}
    rows = to_rows(batch, Grader(lambda text, answers: 1.0), sets)
    assert [(row.documents, row.cluster) for row in rows] == [("d", "0")] * 5
    assert [(row.outcome, row.ttft_ms, row.timed) for row in rows] == [
        ("answered", 100.0, True),
        *[("error", None, False)] * 4,
    ]
    assert [row.error for row in rows] == [
        None,
        "gone",
        "rejected: short of KV blocks",
        "the reply ended with abort",
        "the reply has no token",
    ]
    assert (rows[0].output_tokens, rows[0].tokens, rows[0].hits) == (2, counts, hits)


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

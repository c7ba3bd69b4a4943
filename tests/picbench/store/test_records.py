"""Rows: what is kept of a request; steps that took far longer than their engine's do."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from harness_fakes import Harness, make_sample, run_fakes
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.ledger import KINDS, Snapshot
from picbench.engines.request import Hits, Result, Timings, TokenCounts
from picbench.errors import DataError
from picbench.store.reader import read_run
from picbench.store.records import (
    ENOUGH,
    FACTOR,
    ArmBatch,
    Failure,
    Grader,
    GroupResult,
    Stalls,
    StepSeconds,
    find_stalls,
    step_seconds,
    to_rows,
)
from picbench.tables.run import stalled
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


def snapshots(steps: Iterable[tuple[float, float, float]]) -> list[Snapshot]:
    """Snapshots with (time, prompt blocks, decode blocks)."""
    found = []
    for number, (time, prompt, decode) in enumerate(steps):
        blocks = dict.fromkeys(KINDS, 0.0) | {"prompt": prompt, "decode": decode}
        found.append(Snapshot(number, time, 100, blocks | {"free": 100 - prompt - decode}))
    return found


def test_steps_are_told_apart_by_what_they_add() -> None:
    steps = [(0, 10, 0), (1, 20, 0), (3, 20, 1), (3.5, 20, 1), (4, 0, 0), (9, 5, 0), (10, 0, 0)]
    # From 4 to 9 nothing was running.
    assert step_seconds([snapshots(steps)]) == StepSeconds([1, 2, 1], [0.5, 0.5])
    assert step_seconds([snapshots(steps), snapshots(steps[:2])]).prompt == [1, 2, 1, 1]
    assert step_seconds([]) == StepSeconds([], [])


def test_a_step_out_of_proportion_is_a_stall() -> None:
    steps = StepSeconds((0.5,) * ENOUGH, (0.02,) * 300)
    assert find_stalls(steps) == Stalls(0, allowed_s=FACTOR * 0.5, longest_s=0.5)
    stuck = replace(steps, other=(*steps.other, 30.0))
    assert find_stalls(stuck) == Stalls(1, allowed_s=FACTOR * 0.5, longest_s=30.0)


def test_a_long_prompt_among_steps_of_decoding_is_none() -> None:
    found = find_stalls(StepSeconds((3.0,) * ENOUGH, (0.001,) * 10_000))
    assert found is not None
    assert found.steps == 0


def test_pauses_of_less_than_a_second_are_none() -> None:
    found = find_stalls(StepSeconds((0.001,) * ENOUGH, (0.9,)))
    assert found is not None
    assert found.steps == 0


def test_too_few_prompts_tell_nothing() -> None:
    assert find_stalls(StepSeconds((0.1,) * (ENOUGH - 1), (99.0,) * 100)) is None


@given(
    st.lists(st.floats(0.01, 10), min_size=ENOUGH, max_size=40),
    st.lists(st.floats(0.001, 1), max_size=40),
    st.floats(1.5, 100),
)
def test_slower_engines_are_measured_by_their_own_steps(
    prompt: list[float], other: list[float], slower: float
) -> None:
    found = find_stalls(StepSeconds(tuple(prompt), tuple(other)))
    scaled = find_stalls(
        StepSeconds(tuple(slower * p for p in prompt), tuple(slower * o for o in other))
    )
    assert found is not None
    assert scaled is not None
    assert scaled.longest_s == pytest.approx(slower * found.longest_s)
    if found.allowed_s > 1:
        assert scaled.allowed_s == pytest.approx(slower * found.allowed_s)


def test_a_stalled_arm_is_named_below_the_table(tmp_path: Path) -> None:
    run_fakes(Harness([make_sample(0)]), tmp_path, "full", "mepic")
    arms = read_run(tmp_path).summary
    assert [*stalled(arms)] == []
    stuck = find_stalls(StepSeconds((0.5,) * ENOUGH, (30.0,)))
    found = {**arms, "mepic": replace(arms["mepic"], stalls=stuck)}
    assert [*stalled(found)] == [
        "mepic: stalled in 1 steps, the longest of 30.0 s; its own slowest steps allow 5.0 s"
    ]

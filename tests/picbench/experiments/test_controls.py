"""The controls of the self-test: each can fail, none alarms by itself, and one serves wrong KV."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from measured_arms import make_arm, noisy
from measured_noise import AGAIN as TWICE
from measured_noise import measured

from picbench.compare.arm import MeasuredArm
from picbench.engines.algorithms import names, parse
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.experiments import controls
from picbench.experiments.controls import (
    AGAIN,
    UNREPAIRED,
    WRONG,
    Shuffled,
    false_alarms,
    judge_controls,
    with_wrong_chunks,
)
from picbench.workloads.sample import Sample, SampleSegment

COUNT = 40


def arms() -> dict[str, MeasuredArm]:
    """Arms as a sound harness measures them."""
    full = make_arm("full", [1.0] * COUNT)
    return {
        "full": noisy(full, 1),
        AGAIN: noisy(replace(full, name=AGAIN), 2),
        UNREPAIRED: noisy(make_arm(UNREPAIRED, [0.0] * 18 + [1.0] * 22), 3),
        WRONG: noisy(make_arm(WRONG, [1.0] * 2 + [0.0] * 38), 4),
    }


def failed(found: Mapping[str, MeasuredArm]) -> list[str]:
    return [control.name for control in judge_controls(found, seeds=5) if not control.passed]


def test_a_sound_harness_passes() -> None:
    assert failed(arms()) == []


@pytest.mark.parametrize(
    ("arm", "scores", "control"),
    [
        (UNREPAIRED, [1.0] * COUNT, "naive loses"),
        (UNREPAIRED, [0.0] * 4 + [1.0] * 36, "naive loses"),
        (UNREPAIRED, [None] * COUNT, "naive loses"),
        (WRONG, [1.0] * 10 + [0.0] * 30, "the KV of other chunks"),
        (WRONG, [None] * COUNT, "the KV of other chunks"),
        (AGAIN, [0.0] * 10 + [1.0] * 30, "full against itself"),
    ],
)
def test_a_harness_that_does_not_notice_fails(
    arm: str, scores: list[float | None], control: str
) -> None:
    measured = arms()
    assert control in failed({**measured, arm: replace(measured[arm], scores=tuple(scores))})


def test_an_arm_that_is_slower_than_itself_fails() -> None:
    measured = arms()
    slow = noisy(replace(measured["full"], name=AGAIN), 5, factor=1.1)
    assert failed({**measured, AGAIN: slow}) == ["full against itself"]


def test_a_model_that_cannot_answer_has_nothing_to_lose() -> None:
    measured = arms()
    unable = tuple([0.0] * COUNT)
    assert "full answers" in failed({**measured, "full": replace(measured["full"], scores=unable)})


def twice() -> tuple[MeasuredArm, MeasuredArm]:
    """The arm full and the arm full, of one run."""
    return measured().arms["full"], measured().arms[TWICE]


def test_at_most_5_of_100_comparisons_over_200_requests_alarm() -> None:
    assert false_alarms(*twice(), seeds=100, requests=200) <= 5


@pytest.mark.parametrize(("alpha", "alarms"), [(0.0, 0), (1.1, 3)])
def test_alarms_are_counted(monkeypatch: pytest.MonkeyPatch, alpha: float, alarms: int) -> None:
    monkeypatch.setattr(controls, "ALPHA", alpha)
    assert false_alarms(*twice(), seeds=3, requests=20) == alarms


LAYOUT = LayoutConfig()


def sample(name: str, *chunks: tuple[int, ...]) -> Sample:
    text = SampleSegment("text", "t", (1, 2))
    segments = (text, *(SampleSegment("chunk", "c", tokens) for tokens in chunks), text)
    return Sample(name, "d", segments, ("yes",), 2)


def test_it_can_be_run_and_is_not_offered() -> None:
    assert isinstance(parse("shuffled"), Shuffled)
    assert "shuffled" not in names()


def test_chunks_get_other_tokens_of_the_same_number() -> None:
    text = Segment((1, 2))
    chunk = Segment((3, 4, 5), chunk=True, context=(8, 9))
    longer = Segment((6,), chunk=True, context=(8, 9))
    arranged = Shuffled().arrange([text, chunk, longer], LAYOUT)
    assert [segment.tokens for segment in arranged] == [(1, 2), (8, 9, 8), (8,)]
    assert [segment.context for segment in arranged] == [(), (), ()]
    assert [segment.chunk for segment in arranged] == [False, True, True]


def test_a_chunk_without_a_document_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a document"):
        Shuffled().arrange([Segment((3,), chunk=True)], LAYOUT)


def test_wrong_chunks_are_of_another_prompt() -> None:
    samples = [
        sample("a", (10,), (11,)),
        sample("b", (20,)),
        sample("c", (30,)),
        sample("d", (10,)),
    ]
    wrong = with_wrong_chunks(samples)
    assert [[chunk.context for chunk in s.chunks] for s in wrong] == [
        [(30,), (30,)],
        [(10,)],
        [(10,)],
        [(20,)],
    ]
    assert [s.tokens for s in wrong] == [s.tokens for s in samples], "prompts stay as they were"


def test_a_chunk_in_common_is_not_taken() -> None:
    wrong = with_wrong_chunks([sample("a", (10,), (30,)), sample("b", (10,), (20,))])
    assert wrong[0].chunks[0].context == (20,)


def test_prompts_that_have_the_same_chunks_cannot_be_used() -> None:
    with pytest.raises(ValueError, match="b has no chunk that a has not"):
        with_wrong_chunks([sample("a", (10,)), sample("b", (10,))])

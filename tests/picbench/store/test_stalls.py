"""Steps that took far longer than their engine's do."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from harness_fakes import Harness, make_sample, run_fakes
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.ledger import KINDS, Snapshot
from picbench.store.reader import read_run
from picbench.store.records import ENOUGH, FACTOR, Stalls, StepSeconds, find_stalls, step_seconds
from picbench.tables.run import stalled


def snapshots(steps: Iterable[tuple[float, float, float]]) -> list[Snapshot]:
    """Snapshots with (time, prompt blocks, decode blocks)."""
    found = []
    for number, (time, prompt, decode) in enumerate(steps):
        blocks = dict.fromkeys(KINDS, 0.0) | {"prompt": prompt, "decode": decode}
        found.append(Snapshot(number, time, 100, blocks | {"free": 100 - prompt - decode}))
    return found


def test_steps_are_told_apart_by_what_they_add() -> None:
    found = step_seconds(
        snapshots(
            [(0, 10, 0), (1, 20, 0), (3, 20, 1), (3.5, 20, 1), (4, 0, 0), (9, 5, 0), (10, 0, 0)]
        )
    )
    # From 4 to 9 nothing was running.
    assert found == StepSeconds(prompt=(1, 2, 1), other=(0.5, 0.5))
    assert step_seconds([]) == StepSeconds()


def test_a_step_out_of_proportion_is_a_stall() -> None:
    steps = StepSeconds((0.5,) * ENOUGH, (0.02,) * 300)
    assert find_stalls(steps) == Stalls(0, allowed_s=FACTOR * 0.5, longest_s=0.5)
    stuck = StepSeconds.of([steps, StepSeconds(other=(30.0,))])
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

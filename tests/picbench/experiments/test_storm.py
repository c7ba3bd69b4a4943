"""A small storm on a CPU, and what counts as a fault of a large one."""

import json
from pathlib import Path
from typing import Any

import pytest

from picbench.engines.request import Chunk, Hits, Request, Result, Text, Timings, TokenCounts
from picbench.errors import ConfigError
from picbench.experiments import storm
from picbench.experiments.storm import COUNTS, PLAIN, draw_requests, faults, is_tie, tally
from picbench.run.measurements import Storm

SETTINGS = Storm(model="shape:tiny", requests=22, longest=400, pool=80, preemptions=3)


def result(*tokens: int, likely: dict[int, float] | None = None) -> Result:
    logprobs = ({1: -0.1}, likely) if likely else None
    nothing = Timings(0.0, 0.0, None, 0.0)
    return Result("", tokens, (), nothing, TokenCounts(), Hits(), logprobs=logprobs)


def test_a_starved_pool_answers_like_a_large_one(tmp_path: Path) -> None:
    found = storm.measure(SETTINGS.model_copy(update={"commit": "abc", "output": tmp_path}))
    page = found.page
    assert found.code == 0
    assert page.splitlines()[-1] == "Nothing is wrong."
    assert page == (tmp_path / "storm-float32.md").read_text()
    written = json.loads((tmp_path / "storm-float32.json").read_text())
    assert written["provenance"]["commit"] == "abc"
    assert written["run"]["preemptions"] >= SETTINGS.preemptions
    assert written["run"]["compiled"] == {}
    rows = written["algorithms"].values()
    assert sum(row["requests"] for row in rows) == SETTINGS.requests
    answered = sum(row["answered"] for row in rows)
    assert 0 < answered == SETTINGS.requests - written["run"]["aborted"]


def test_plain_requests_and_long_ones_are_among_them() -> None:
    requests = draw_requests(100, 3000, seed=1)
    lengths = [sum(len(s.tokens or ()) for s in r.segments) for r in requests]
    assert all(2500 < length <= 3000 for length in lengths[24::25])
    assert max(length for i, length in enumerate(lengths) if i % 25 != 24) <= 1500
    plain = [r for r in requests if not any(isinstance(s, Chunk) for s in r.segments)]
    assert plain == requests[::7]
    assert {r.algorithm for r in plain} == {PLAIN}
    assert requests == draw_requests(100, 3000, seed=1) != draw_requests(100, 3000, seed=2)


def test_tokens_that_are_as_likely_tie() -> None:
    expected = result(1, 2, likely={2: -0.7, 3: -0.7001, 4: -0.9})
    assert is_tie(expected, result(1, 3), 1e-3)
    assert not is_tie(expected, result(1, 4), 1e-3)
    assert is_tie(expected, result(1, 4), 0.25)
    assert not is_tie(expected, result(1, 5), 0.25)
    assert not is_tie(expected, result(1), 0.25)


def counts(*numbers: int) -> dict[str, int]:
    return dict(zip(COUNTS, numbers, strict=True))


def test_answers_are_counted_by_algorithm() -> None:
    requests = [Request([Text(tokens=(1,))], name) for name in ("b", "a", "b", "b")]
    expected = {n: result(1, 2, likely={2: -0.7, 3: -0.7}) for n in range(4)}
    control = {n: result(1, 4 if n == 2 else 2) for n in range(4)}
    found = {0: result(1, 2), 1: result(1, 3), 3: result(9, 9)}
    assert tally(requests, expected, control, found, 1e-3) == {
        "a": counts(1, 1, 0, 1, 0, 0),
        "b": counts(3, 2, 1, 0, 1, 0),
    }


SOUND: dict[str, Any] = {"aborted": 8, "preemptions": 3, "unsound": 0, "drained": True}
SOUND |= {"compiled": {"vllm.b": 7}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, ""),
        ({"preemptions": 2}, "2 preemptions, not 3"),
        ({"unsound": 4}, "does not sum to the pool at 4 steps"),
        ({"drained": False}, "did not drain"),
        ({"compiled": {"picbench.kernels.a": 2, "vllm.b": 7}}, "2 kernels of picbench"),
        ({"aborted": 7}, "1 requests got no answer"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_every_fault_is_named(change: dict[str, Any], named: str) -> None:
    lines = faults(SETTINGS, {"a": counts(22, 14, 0, 1, 0, 2)}, SOUND | change)
    assert len(lines) == (1 if named else 0)
    assert named in "".join(lines)


@pytest.mark.parametrize(
    ("dtype", "differ", "wrong"),
    [("float32", 1, True), ("bfloat16", 44, False), ("bfloat16", 45, True)],
)
def test_only_roundings_may_change_answers(dtype: str, differ: int, wrong: bool) -> None:
    settings = SETTINGS.model_copy(update={"dtype": dtype, "requests": 200})
    tallies = {"a": counts(200, 200, differ, 0, 20, 9)}
    assert bool(faults(settings, tallies, SOUND | {"aborted": 0})) is wrong


def test_prompts_longer_than_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="`longest`: the model has 4096 positions"):
        storm.measure(Storm(model="testbed", requests=25, longest=8000))


def test_contexts_have_room_for_visible_pads() -> None:
    segments = [Text(tokens=(5,) * 10), *[Chunk(tokens=(7,) * 17)] * 9, Text(tokens=(6,) * 3)]
    padded = 16 + 9 * 32 + 16
    assert storm.positions(Request(segments, "mepic:pad=paper", 8)) >= padded + 8

"""Decoding beside plain requests: what is timed, what is refused, and the page."""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from local_servers import LocalLauncher

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Hits, Request, Result, Timings, TokenCounts
from picbench.errors import InvalidRun
from picbench.experiments import engine_speed as decode_cost
from picbench.experiments.engine_speed import (
    BATCHES,
    PLAIN,
    PLANNED,
    REPLY,
    DecodeCost,
    ReplyBatch,
    compare,
    decode_plan,
    decoding,
    highest,
    measure_decode_cost,
    require_decoding,
    time_replies,
)
from picbench.experiments.engine_speed import render_decode_cost as render
from picbench.run.measurements import DecodePlanned
from picbench.workloads import models

FACTS = {
    "cpu": "C",
    "threads": 2,
    "capability": "AVX2",
    "variables": {"OMP_NUM_THREADS": "2"},
    "torch": "T",
    "vllm": "V",
    "commit": "abc",
    "load": [1.04, 2.0, 3.0],
    "model": "M",
}

SMALL = ReplyBatch(2, 1)


def figures(batch: ReplyBatch, **times: Sequence[float]) -> dict[str, Sequence[float]]:
    """Figures in which every arm takes as long by either clock."""
    return {
        f"{batch.label} {arm} {clock}": times[arm] for arm in times for clock in ("cpu", "wall")
    }


def cost(*planned: float) -> DecodeCost:
    return compare(SMALL, "mepic", figures(SMALL, plain=[1.0] * len(planned), mepic=planned))


def result(tokens: int = REPLY, compiled: int = 0, **hits: int) -> Result:
    nothing = Timings(0.0, 0.0, None, 0.0)
    counts = TokenCounts(compiled=compiled)
    return Result("", tuple(range(tokens)), (), nothing, counts, Hits(**hits))


@pytest.fixture(scope="module")
def tiny() -> Iterator[Engine]:
    config = EngineConfig(
        model=str(models.resolve("shape:tiny").path),
        device="cpu",
        dtype="float32",
        context=SMALL.prompt + REPLY,
        kv_blocks=200,
        max_requests=SMALL.requests,
        tiers="",
    )
    with Engine(config) as engine:
        yield engine


def test_every_arm_of_a_real_engine_is_timed(tiny: Engine) -> None:
    for repeat in range(2):
        found = time_replies(tiny, f"any {repeat}", batch=SMALL)
        assert set(found) == set(figures(SMALL, **{arm: [] for arm in (PLAIN, *PLANNED)}))
        assert all(milliseconds > 0 for milliseconds in found.values())
    assert tiny.drained


def test_replies_that_do_not_fit_together_are_not_timed(tiny: Engine) -> None:
    """The engine runs two of three at a time."""
    with pytest.raises(InvalidRun, match="ended in steps"):
        time_replies(tiny, "any", batch=SMALL._replace(requests=3))


def test_arms_have_the_same_tokens_and_nothing_else_in_common() -> None:
    plain, *planned = (SMALL.drawn(arm) for arm in (PLAIN, *PLANNED))
    for requests, arm in zip(planned, PLANNED, strict=True):
        assert [tokens_of(request) for request in requests] == list(map(tokens_of, plain))
        assert {request.algorithm for request in requests} == {arm}
        chunks = [[s for s in r.segments if isinstance(s, Chunk)] for r in requests]
        assert list(map(len, chunks)) == [SMALL.chunks] * SMALL.requests
    assert all(len(request.segments) == 1 and request.algorithm is None for request in plain)
    assert {len(tokens_of(request)) for request in plain} == {SMALL.prompt}
    assert tokens_of(plain[0]) != tokens_of(plain[1])


def test_batches_fit_the_testbed_model() -> None:
    context = models.resolve("testbed").context
    assert context is not None
    assert max(batch.prompt for batch in BATCHES) + REPLY <= context
    assert {batch.requests for batch in BATCHES} == {1, 8}
    assert sorted({round(batch.prompt / 1000) for batch in BATCHES}) == [1, 4]


def tokens_of(request: Request) -> tuple[int, ...]:
    return tuple(token for segment in request.segments for token in segment.tokens or ())


def test_only_steps_that_decode_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks count steps: two prefill, and the rest decode."""
    ticks = count()
    monkeypatch.setattr(decode_cost, "_now", lambda: (tick := next(ticks), 10 * tick))

    class Steps:
        preemptions = 0

        def generate(self, *_: Any, **__: Any) -> None: ...

        def submit(self, request: Request, **_: Any) -> str:
            self.left = REPLY + 1
            return str(id(request))

        def step(self) -> dict[str, Result]:
            self.left -= 1
            hits = {} if self.arm == PLAIN else {"chunk": 3}
            return {} if self.left else {"a": result(**hits), "b": result(**hits)}

    engine: Any = Steps()
    for engine.arm in (PLAIN, "mepic"):
        found = list(decode_cost._time_arm(engine, engine.arm, SMALL.drawn(engine.arm)))
        assert found == [1e3 / SMALL.requests, 1e4 / SMALL.requests]


def test_replies_begin_after_as_many_steps_as_are_left() -> None:
    assert decoding([REPLY + 2, REPLY + 2]) == (3, REPLY + 2)
    with pytest.raises(InvalidRun, match=r"steps \[70, 71\]"):
        decoding([71, 70])


@pytest.mark.parametrize(
    ("arm", "results", "preemptions", "said"),
    [
        (PLAIN, [result()], 0, ""),
        ("mepic", [result(chunk=3), result(copied=1)], 0, ""),
        ("mepic", [result(chunk=3), result()], 0, "read no chunk"),
        ("mepic", [result(chunk=3, compiled=1)], 0, "computed chunks"),
        ("mepic", [result(chunk=3, tokens=REPLY - 1)], 0, "was cut short"),
        ("mepic", [result(chunk=3)], 1, "lost its blocks"),
        (PLAIN, [result(), result(chunk=1)], 0, "read chunks"),
    ],
)
def test_what_is_timed_did_what_it_is_timed_for(
    arm: str, results: list[Result], preemptions: int, said: str
) -> None:
    if not said:
        require_decoding(arm, results, preemptions)
        return
    with pytest.raises(InvalidRun, match=f"^{arm}: a request that is timed {said}$"):
        require_decoding(arm, results, preemptions)


def test_ratios_are_paired_within_a_round() -> None:
    """The machine was half as fast in the third round."""
    found = compare(SMALL, "mepic", figures(SMALL, plain=[2.0, 4.0, 8.0], mepic=[2.2, 4.8, 8.0]))
    ratio = found.ratio["cpu"]
    assert (ratio.median, ratio.best, ratio.n) == (pytest.approx(1.1), 1.0, 3)
    assert found.plain_ms["wall"].median == 4.0
    assert found.planned_ms["wall"].median == 4.8
    assert (found.requests, found.prompt, found.algorithm) == (2, SMALL.prompt, "mepic")


def test_the_page_has_ratios_and_a_verdict() -> None:
    costs = [cost(1.1, 1.2, 1.3), cost(1.0, 1.0, 1.0)]
    assert highest(costs) == pytest.approx(1.2)
    lines = render(costs, FACTS).splitlines()
    assert "| 2 | 312 | mepic | 1.00 | 1.20 | 1.20 (1.15 - 1.25) | 1.20 (1.15 - 1.25) |" in lines
    assert "C (AVX2), 2 threads, M, float32, torch T, vLLM V, commit abc." in lines
    assert "OMP_NUM_THREADS=2; load when it ended: 1.0, 2.0." in lines
    assert any("median of 3 rounds" in line for line in lines)
    [verdict] = (line for line in lines if line.startswith("The largest"))
    assert verdict.endswith("at most 1.3 of CPU time is kept.")
    missed = render([cost(1.2, 1.4, 1.4)], FACTS | {"variables": {}})
    assert "1.40 in CPU time" in missed
    assert "at most 1.3 of CPU time is MISSED." in missed
    assert "No variable set; load" in missed


@pytest.mark.parametrize(("planned", "code"), [(1.3, 0), (1.31, 1)])
def test_page_and_numbers_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: float, code: int
) -> None:
    monkeypatch.setattr(
        decode_cost,
        "_time_arm",
        lambda engine, arm, requests: iter([1.0 if arm == PLAIN else planned] * 2),
    )
    settings = DecodePlanned(model="shape:tiny", rounds=4, commit="abc", output=tmp_path)
    monkeypatch.setattr("picbench.run.runner.launch", LocalLauncher())
    found = measure_decode_cost(settings, [SMALL])
    assert (found.page, found.code) == ((tmp_path / "decode.md").read_text(), code)
    written = json.loads((tmp_path / "decode.json").read_text())
    assert written["provenance"]["commit"] == "abc"
    assert [row["algorithm"] for row in written["results"]] == list(PLANNED)
    assert (row := written["results"][0]["ratio"]["cpu"])["median"] == planned
    assert row["n"] == 4
    [config] = decode_plan(settings, [SMALL]).engines.values()
    assert (config.device, config.dtype, config.tiers) == ("cpu", "float32", "")
    assert config.context == SMALL.prompt + REPLY

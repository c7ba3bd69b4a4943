"""The engine beside stock vLLM, where few tokens are computed, and where requests decode."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from asked_engine import Asked
from harness_fakes import GPU_FACTS
from local_servers import LocalLauncher

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Hits, Request, Result, Timings, TokenCounts
from picbench.errors import InvalidRun
from picbench.experiments import engine_speed
from picbench.experiments.engine_speed import (
    BATCHES,
    CORPUS,
    ENGINE_COMPARISON,
    PLAIN,
    PLANNED,
    POOL,
    PROMPTS,
    REPLY,
    REQUESTS,
    SMALL_STEPS,
    ReplyBatch,
    SmallPrompt,
    compare,
    highest,
    measure_decode_cost,
    render_decode_cost,
    small_steps_plan,
    time_replies,
    ttft,
)
from picbench.experiments.engine_speed import SMALL_CHUNK as CHUNK
from picbench.run.measurements import DecodePlanned, SmallSteps
from picbench.tables.page import ratio_figures
from picbench.workloads import models

FACTS = GPU_FACTS | {"model": "M", "dtype": "bfloat16", "repeats": 2}


class OnDevice(Asked):
    device = "cpu"

    def describe(self) -> dict[str, Any]:
        return {"device": self.device}


def asked(
    prompt: SmallPrompt, name: str, *, stock: bool = False
) -> tuple[list[Request], dict[str, float]]:
    engine = OnDevice(EngineConfig("m", stock=stock))
    return engine.requests, ttft(engine, name, prompt=prompt)  # type: ignore[arg-type]


def tokens_of(request: Request) -> tuple[int, ...]:
    return tuple(token for segment in request.segments for token in segment.tokens or ())


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.name)
def test_prompts_have_the_chunks_that_they_say(prompt: SmallPrompt) -> None:
    requests, found = asked(prompt, "1")
    cached = {segment for request in requests[:-REQUESTS] for segment in request.segments}
    timed = requests[-REQUESTS:]
    for request in timed:
        chunks = [segment for segment in request.segments if isinstance(segment, Chunk)]
        known = [chunk for chunk in chunks if chunk in cached]
        assert (len(known), len(chunks)) == (prompt.warm, prompt.warm + prompt.new)
        assert len(tokens_of(request)) == prompt.tokens
    assert len({tokens_of(request) for request in timed}) == REQUESTS
    # Each answer takes a second longer than the one before: the median of the last ten.
    last = len(requests)
    assert found == {f"ttft {prompt.name}": 1000.0 * (last - (REQUESTS - 1) / 2)}


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.name)
def test_stock_vllm_finds_all_but_as_many_tokens(prompt: SmallPrompt) -> None:
    (common, *timed), _ = asked(prompt, "1", stock=True)
    found = len(tokens_of(common))
    assert found % BLOCK_SIZE == 0
    for request in timed:
        tokens = tokens_of(request)
        assert tokens[:found] == tokens_of(common)
        assert len(tokens) - found == prompt.computed
        assert len(tokens) == prompt.tokens


def test_no_repeat_asks_what_another_one_asked() -> None:
    [(one, _), (other, _)] = (asked(PROMPTS[-1], name) for name in ("1", "2"))
    assert not {*map(tokens_of, one[-REQUESTS:])} & {*map(tokens_of, other[-REQUESTS:])}
    assert one[:-REQUESTS] == other[:-REQUESTS]


def test_the_gpu_is_watched_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_speed, "_gpu_ms", lambda work: 5.5 * len(work()))
    engine: Any = OnDevice(EngineConfig("m"))
    engine.device = "cuda"
    assert ttft(engine, "1", prompt=PROMPTS[0])["gpu 3 warm"] == 5.5


def test_there_are_two_engines_of_each_size_and_a_cell_of_each_prompt() -> None:
    settings = SmallSteps(device="cpu", model="shape:tiny", graph_tokens=(64, 128), commit="c")
    plan = small_steps_plan(settings)
    assert list(plan.engines) == ["mepic, 64", "stock, 64", "mepic, 128", "stock, 128"]
    assert [engine.graph_tokens for engine in plan.engines.values()] == [64, 64, 128, 128]
    assert [cell.name for cell in plan.cells] == [prompt.name for prompt in PROMPTS]
    longest = max(prompt.tokens for prompt in PROMPTS)
    assert CORPUS * CHUNK + longest <= POOL * BLOCK_SIZE


def test_the_page_has_ratios_of_sizes_by_repeat() -> None:
    found = {
        "mepic, 512": {"ttft 3 warm": [10.0, 30.0], "gpu 3 warm": [5.0, 5.0]},
        "stock, 512": {"ttft 3 warm": [8.0, 8.0], "gpu 3 warm": [5.0, 6.0]},
        "mepic, 1024": {"ttft 3 warm": [5.0, 30.0], "gpu 3 warm": [5.0, 5.0]},
        "stock, 1024": {"ttft 3 warm": [8.0, 4.0]},
    }
    page = SMALL_STEPS.render(found, FACTS)
    assert "M, bfloat16: times, not answers" in page
    assert "| 3 warm | 48 | 20.0 (10.0 - 30.0) | 8.0 (8.0 - 8.0) | 17.5 (5.0 - 30.0) |" in page
    assert "| 3 warm | 48 | 5.0 (5.0 - 5.0) | 5.5 (5.0 - 6.0) | 5.0 (5.0 - 5.0) | - |" in page
    assert "| chunks | mepic, 1024 | stock, 1024 |" in page
    assert "| 3 warm | 0.75 (0.50 - 1.00) | 0.75 (0.50 - 1.00) |" in page


FOUND = {
    "stock": {
        "ttft_ms": [10.0, 30.0, 20.0],
        "tpot_ms": [4.0],
        "tokens_per_s": [100.0],
        "warm_ttft_ms": [800.0],
        "warm_tpot_ms": [5.0],
        "hit_ttft_ms": [40.0],
    },
    "picbench": {
        "ttft_ms": [21.0, 19.0, 22.0],
        "tpot_ms": [5.0],
        "tokens_per_s": [97.0],
        "warm_ttft_ms": [50.0],
        "warm_tpot_ms": [5.0],
    },
}


def test_ratios_are_ours_over_the_reference_and_the_page_names_what_ran() -> None:
    assert ratio_figures(ENGINE_COMPARISON.ratios, FOUND) == {
        "pic_off": {
            "throughput_ratio": pytest.approx(0.97),
            "ttft_ratio": pytest.approx(1.05),
            "tpot_ratio": pytest.approx(1.25),
        },
        "warm_32k": {
            "speedup_vs_full": pytest.approx(16.0),
            "ratio_vs_prefix_hit": pytest.approx(1.25),
        },
    }

    page = ENGINE_COMPARISON.render(FOUND, FACTS)
    assert "dummy weights" in page
    assert "20.00 (10.00 - 30.00, n=3)" in page
    assert "| 40.00 (40.00 - 40.00, n=1) | - |" in page


CPU_FACTS = {
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


def cost(*planned: float) -> dict[str, Any]:
    return compare(SMALL, "mepic", figures(SMALL, plain=[1.0] * len(planned), mepic=planned))


def result(tokens: int = REPLY, compiled: int = 0, **hits: int) -> Result:
    nothing = Timings(0.0, 0.0, None, 0.0)
    counts = TokenCounts(compile_work=compiled)
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
    assert max(batch.prompt for batch in BATCHES) + REPLY <= (
        models.resolve("testbed").context or 0
    )


class Steps:
    """Replies of a batch in one step after the first; one arm's may be spoiled."""

    def __init__(
        self, arm: str = "", spoiled: Mapping[str, int] | None = None, preemptions: int = 0
    ) -> None:
        self.arm, self.spoiled, self.preempted = arm, spoiled or {}, preemptions
        self.preemptions = 0

    def generate(self, *_: Any, **__: Any) -> None: ...

    def submit(self, request: Request, **_: Any) -> str:
        self.left, self.serves = REPLY + 1, request.algorithm or PLAIN
        return str(id(request))

    def step(self) -> dict[str, Result]:
        self.left -= 1
        if self.left:
            return {}
        hits = {} if self.serves == PLAIN else {"chunk": 3}
        if self.serves == self.arm:
            hits |= self.spoiled
            self.preemptions += self.preempted
        return {"a": result(**hits), "b": result(**hits)}


def test_only_steps_that_decode_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks count steps: two prefill, and the rest decode."""
    ticks = count()
    monkeypatch.setattr(engine_speed, "_now", lambda: (tick := next(ticks), 10 * tick))
    found = time_replies(Steps(), "any", batch=SMALL)  # type: ignore[arg-type]
    times = {"cpu": 1e3 / SMALL.requests, "wall": 1e4 / SMALL.requests}
    assert found == {
        f"{SMALL.label} {arm} {clock}": took
        for arm in (PLAIN, *PLANNED)
        for clock, took in times.items()
    }


@pytest.mark.parametrize(
    ("arm", "spoiled", "preemptions"),
    [
        ("mepic", {"chunk": 0}, 0),
        ("mepic", {"compiled": 1}, 0),
        ("mepic", {"tokens": REPLY - 1}, 0),
        ("mepic", {}, 1),
        (PLAIN, {"chunk": 1}, 0),
    ],
)
def test_what_is_timed_did_what_it_is_timed_for(
    arm: str, spoiled: dict[str, int], preemptions: int
) -> None:
    with pytest.raises(InvalidRun, match=f"^{arm}: not all replies were decoded in full"):
        time_replies(Steps(arm, spoiled, preemptions), "any", batch=SMALL)  # type: ignore[arg-type]


def test_ratios_are_paired_within_a_round() -> None:
    """The machine was half as fast in the third round."""
    found = compare(SMALL, "mepic", figures(SMALL, plain=[2.0, 4.0, 8.0], mepic=[2.2, 4.8, 8.0]))
    ratio = found["ratio"]["cpu"]
    assert (ratio["median"], ratio["best"], ratio["n"]) == (pytest.approx(1.1), 1.0, 3)
    assert found["plain_ms"]["wall"]["median"] == 4.0
    assert found["planned_ms"]["wall"]["median"] == 4.8


def test_the_page_has_ratios_and_a_verdict() -> None:
    costs = [cost(1.1, 1.2, 1.3), cost(1.0, 1.0, 1.0)]
    assert highest(costs) == pytest.approx(1.2)
    page = render_decode_cost(costs, CPU_FACTS)
    assert "| 2 | 312 | mepic | 1.00 | 1.20 | 1.20 (1.15 - 1.25) | 1.20 (1.15 - 1.25) |" in page
    assert "C (AVX2), 2 threads, M, float32, torch T, vLLM V, commit abc." in page
    assert "OMP_NUM_THREADS=2; load when it ended: 1.0, 2.0." in page
    assert "median of 3 rounds" in page
    assert "at most 1.3 of CPU time is kept." in page
    missed = render_decode_cost([cost(1.2, 1.4, 1.4)], CPU_FACTS | {"variables": {}})
    assert "1.40 in CPU time" in missed
    assert "at most 1.3 of CPU time is MISSED." in missed
    assert "No variable set; load" in missed


@pytest.mark.parametrize(("planned", "code"), [(1.3, 0), (1.31, 1)])
def test_page_and_numbers_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: float, code: int
) -> None:
    timed = figures(SMALL, plain=[1.0], **{arm: [planned] for arm in PLANNED})
    monkeypatch.setattr(
        engine_speed, "time_replies", lambda *_, **__: {k: v for k, [v] in timed.items()}
    )
    settings = DecodePlanned(model="shape:tiny", rounds=4, commit="abc", output=tmp_path)
    monkeypatch.setattr("picbench.run.runner.Server", LocalLauncher())
    found = measure_decode_cost(settings, [SMALL])
    assert (found.page, found.code) == ((tmp_path / "decode.md").read_text(), code)
    written = json.loads((tmp_path / "decode.json").read_text())
    assert written["provenance"]["commit"] == "abc"
    assert [row["algorithm"] for row in written["results"]] == list(PLANNED)
    assert (row := written["results"][0]["ratio"]["cpu"])["median"] == planned
    assert row["n"] == 4

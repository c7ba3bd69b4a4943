"""The engine beside stock vLLM, and where few tokens are computed: what is asked, and pages."""

from typing import Any

import pytest
from asked_engine import Asked
from harness_fakes import GPU_FACTS

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.request import Chunk, Request
from picbench.experiments import engine_speed
from picbench.experiments.engine_speed import (
    CORPUS,
    ENGINE_COMPARISON,
    POOL,
    PROMPTS,
    REQUESTS,
    SMALL_STEPS,
    SmallPrompt,
    small_steps_plan,
    ttft,
)
from picbench.experiments.engine_speed import SMALL_CHUNK as CHUNK
from picbench.experiments.engine_speed import SMALL_QUESTION as QUESTION
from picbench.run.measurements import SmallSteps
from picbench.tables.page import ratio_figures

FACTS = GPU_FACTS | {"model": "M", "dtype": "bfloat16", "repeats": 2}


class OnCpu(Asked):
    def describe(self) -> dict[str, Any]:
        return {"device": "cpu"}


class OnGpu(Asked):
    def describe(self) -> dict[str, Any]:
        return {"device": "cuda"}


def asked(
    prompt: SmallPrompt, name: str, *, stock: bool = False
) -> tuple[list[Request], dict[str, float]]:
    engine = OnCpu(EngineConfig("m", stock=stock))
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


def test_the_corpus_and_a_request_fit_the_pool() -> None:
    longest = max(prompt.tokens for prompt in PROMPTS)
    assert CORPUS * CHUNK + longest <= POOL * BLOCK_SIZE
    assert max(prompt.warm for prompt in PROMPTS) <= CORPUS


def test_what_is_computed_is_linked_or_new() -> None:
    assert SmallPrompt(3).computed == 2 * BLOCK_SIZE + QUESTION
    assert SmallPrompt(4, 1).computed == 4 * BLOCK_SIZE + CHUNK + QUESTION


def test_the_gpu_is_watched_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[Any]] = []

    def watched(work: Any) -> float:
        ran.append(work())
        return 5.5

    monkeypatch.setattr(engine_speed, "_gpu_ms", watched)
    engine: Any = OnGpu(EngineConfig("m"))
    assert ttft(engine, "1", prompt=PROMPTS[0])["gpu 3 warm"] == 5.5
    assert len(ran) == 1 and len(ran[0]) == 1


def test_there_are_two_engines_of_each_size_and_a_cell_of_each_prompt() -> None:
    settings = SmallSteps(device="cpu", model="shape:tiny", graph_tokens=(64, 128), commit="c")
    plan = small_steps_plan(settings)
    assert list(plan.engines) == ["mepic, 64", "stock, 64", "mepic, 128", "stock, 128"]
    assert [engine.graph_tokens for engine in plan.engines.values()] == [64, 64, 128, 128]
    engine: Any = OnCpu(EngineConfig("m"))
    for prompt, cell in zip(PROMPTS, plan.cells, strict=True):
        assert cell.name == prompt.name
        measure = cell.arms["mepic, 64"].measure
        assert list(measure(engine, "1")) == [f"ttft {prompt.name}"]


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


def test_a_page_of_one_size_has_no_ratios_and_without_a_gpu_no_times_of_one() -> None:
    page = SMALL_STEPS.render({"mepic, 512": {"ttft 3 warm": [10.0]}}, FACTS)
    assert "smallest graphs" not in page and "GPU computes" not in page


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


def test_ratios_are_ours_over_the_reference() -> None:
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


def test_the_page_names_what_ran_and_what_did_not() -> None:
    page = ENGINE_COMPARISON.render(FOUND, FACTS)
    assert "dummy weights" in page
    assert "20.00 (10.00 - 30.00, n=3)" in page
    assert "| 40.00 (40.00 - 40.00, n=1) | - |" in page

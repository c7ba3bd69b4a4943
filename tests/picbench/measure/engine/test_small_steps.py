"""TTFT where few tokens are computed: what is asked of the engines, and the page."""

from typing import Any

import pytest
from asked_engine import Asked
from harness_fakes import GPU_FACTS

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.request import Chunk, Request
from picbench.experiments import engine_speed as small_steps
from picbench.experiments.engine_speed import CORPUS, POOL, PROMPTS, REQUESTS, SmallPrompt, ttft
from picbench.experiments.engine_speed import SMALL_STEPS_CHUNK as CHUNK
from picbench.experiments.engine_speed import SMALL_STEPS_QUESTION as QUESTION
from picbench.experiments.engine_speed import render_small_steps as render
from picbench.experiments.engine_speed import small_step_measures as measures

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

    monkeypatch.setattr(small_steps, "_gpu_ms", watched)
    engine: Any = OnGpu(EngineConfig("m"))
    assert ttft(engine, "1", prompt=PROMPTS[0])["gpu 3 warm"] == 5.5
    assert len(ran) == 1 and len(ran[0]) == 1


def test_each_prompt_is_measured_by_itself() -> None:
    engine: Any = OnCpu(EngineConfig("m"))
    for prompt, (name, measure) in zip(PROMPTS, measures(PROMPTS).items(), strict=True):
        assert name == prompt.name
        assert list(measure(engine, "1")) == [f"ttft {prompt.name}"]


def test_the_page_has_ratios_of_sizes_by_repeat() -> None:
    found = {
        "mepic, 512": {"ttft 3 warm": [10.0, 30.0], "gpu 3 warm": [5.0, 5.0]},
        "stock, 512": {"ttft 3 warm": [8.0, 8.0], "gpu 3 warm": [5.0, 6.0]},
        "mepic, 1024": {"ttft 3 warm": [5.0, 30.0], "gpu 3 warm": [5.0, 5.0]},
        "stock, 1024": {"ttft 3 warm": [8.0, 4.0]},
    }
    page = render(found, FACTS)
    assert "M, bfloat16: times, not answers" in page
    assert "| 3 warm | 48 | 20.0 (10.0 - 30.0) | 8.0 (8.0 - 8.0) | 17.5 (5.0 - 30.0) |" in page
    assert "| 3 warm | 48 | 5.0 (5.0 - 5.0) | 5.5 (5.0 - 6.0) | 5.0 (5.0 - 5.0) | - |" in page
    assert "| chunks | mepic, 1024 | stock, 1024 |" in page
    assert "| 3 warm | 0.75 (0.50 - 1.00) | 0.75 (0.50 - 1.00) |" in page


def test_a_page_of_one_size_has_no_ratios_and_without_a_gpu_no_times_of_one() -> None:
    page = render({"mepic, 512": {"ttft 3 warm": [10.0]}}, FACTS)
    assert "smallest graphs" not in page and "GPU computes" not in page

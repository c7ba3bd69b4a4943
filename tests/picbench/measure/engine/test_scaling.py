"""Throughput on several GPUs against one: what is asked of the engines, and the page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import GPU_FACTS

from picbench.engines.config import EngineConfig
from picbench.engines.request import Chunk, Hits, Request, Result, Timings, TokenCounts
from picbench.measure.engine import scaling as measuring
from picbench.measure.engine.scaling import render, scaling, serve, write

FACTS = GPU_FACTS | {"model": "M", "dtype": "bfloat16", "concurrency": 3, "repeats": 3}

#: The order is not that of the numbers of GPUs.
FOUND = {
    "16": {"tokens_per_s": [1500.0, 9000.0, 1750.0], "ttft_ms": [50.0, 40.0, 60.0]},
    "1": {"tokens_per_s": [1000.0, 400.0, 500.0], "ttft_ms": [70.0, 70.0, 90.0]},
}


@dataclass
class Asked:
    """Notes what an engine is asked; request n has its first token after n seconds."""

    requests: list[Request] = field(default_factory=list)

    def generate(
        self, requests: Sequence[Request], *, max_tokens: int, ignore_eos: bool, concurrency: int
    ) -> list[Result]:
        assert (max_tokens, ignore_eos, concurrency) == (128, True, 3)
        self.requests += requests
        return [
            Result("", (5,), (), Timings(float(n), 0.0, None, 0.0), TokenCounts(), Hits())
            for n in range(len(requests))
        ]


def ask(name: str) -> tuple[list[Request], dict[str, float]]:
    engine = Asked()
    return engine.requests, serve(engine, name, concurrency=3)  # type: ignore[arg-type]


def test_all_repeats_have_the_same_chunks_and_their_own_questions() -> None:
    (first, _), (second, _) = ask("serve 0"), ask("serve 1")
    assert len(first) == len(second) == 6
    for ours, theirs in zip(first, second, strict=True):
        assert ours.segments[:-1] == theirs.segments[:-1]
        assert ours.segments[-1] != theirs.segments[-1]
    assert len({request.segments[-1].tokens for request in first + second}) == 12
    chunks = {segment.tokens for request in first for segment in request.segments[:-1]}
    assert 64 < len(chunks) <= 128


def test_requests_are_as_long_as_the_page_says() -> None:
    [request, *_], _ = ask("serve 0")
    assert [len(segment.tokens or ()) for segment in request.segments] == [504] * 64 + [80]
    assert all(isinstance(segment, Chunk) for segment in request.segments[:-1])
    assert len({segment.tokens for segment in request.segments}) == 65
    assert request.algorithm == "mepic"


def test_figures_are_of_the_whole_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 14.0])
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(times))
    _, found = ask("serve 0")
    # 6 replies of 128 tokens in 4 s; the middle one of 0, 1, ... 5 s.
    assert found == {"tokens_per_s": 6 * 128 / 4, "ttft_ms": 2500.0}


def test_the_ratio_is_that_of_medians_whatever_the_order() -> None:
    assert scaling(FOUND) == pytest.approx(3.5)


def test_the_page_has_a_row_for_each_number_of_gpus() -> None:
    page = render(FOUND, FACTS)
    assert "| 16 | 1,750 (1,500 - 9,000) | 50 (40 - 60) |" in page
    assert "| 1 | 500 (400 - 1,000) | 70 (70 - 90) |" in page
    assert "Throughput: 3.50 times that of one GPU." in page
    assert "mepic on M, bfloat16: times, not answers; G, driver D, vLLM V, torch T" in page
    assert "3 requests in flight, 64 of 128 warm chunks of 504 tokens each" in page


def test_files_and_figure_carry_the_number_of_gpus(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"tp2_scaling": 1.5}')
    write(FOUND, FACTS, tmp_path)
    noted = json.loads((tmp_path / "scaling-16.json").read_text())
    assert (noted["found"], noted["provenance"]) == (FOUND, FACTS)
    assert (tmp_path / "scaling-16.md").read_text() == render(FOUND, FACTS)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"tp2_scaling": 1.5, "tp16_scaling": pytest.approx(3.5)}


def test_the_engines_differ_in_nothing_but_their_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, EngineConfig] = {}

    def run(arms: dict[str, EngineConfig], measures: dict[str, Any], repeats: int) -> Any:
        started.update(arms)
        assert (list(measures), repeats) == (["serve"], 7)
        return {name: {"tokens_per_s": [float(name)], "ttft_ms": [1.0]} for name in arms}

    monkeypatch.setattr(measuring, "run_interleaved", run)
    measuring.measure("testbed", "cpu", 4, 9, 7, "abc", tmp_path)
    assert {name: config.tensor_parallel for name, config in started.items()} == {"1": 1, "4": 4}
    one, four = started.values()
    assert (one.model, one.context, one.kv_blocks) == (four.model, four.context, four.kv_blocks)
    assert one.max_requests == four.max_requests == 9
    assert json.loads((tmp_path / "summary.json").read_text()) == {"tp4_scaling": 4.0}
    noted = json.loads((tmp_path / "scaling-4.json").read_text())["provenance"]
    assert (noted["commit"], noted["concurrency"], noted["repeats"]) == ("abc", 9, 7)

"""TTFT against the length of the context: what is asked of the engines, and the page."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asked_engine import Asked
from harness_fakes import GPU_FACTS

from picbench.engines.config import EngineConfig
from picbench.engines.request import Request, Text
from picbench.measure.engine import context
from picbench.measure.engine.context import (
    ARMS,
    CHUNK,
    QUESTION,
    curves,
    measures,
    render,
    ttft,
    write,
)

FACTS = GPU_FACTS | {"model": "M", "dtype": "bfloat16", "repeats": 3}

FOUND = {
    "stock": {"full 2": [30.0, 10.0, 20.0], "full 98": [1000.0, 3000.0, 2000.0]},
    "picbench": {"mepic 2": [5.0, 5.5, 6.0], "epic:k=16:copy=shared 98": [7.0]},
}


def ask(stock: bool, name: str, chunks: int) -> tuple[Asked, dict[str, float]]:
    engine = Asked(EngineConfig("m", stock=stock))
    return engine, ttft(engine, name, chunks=chunks)  # type: ignore[arg-type]


def chunks_of(request: Request) -> list[tuple[int, ...]]:
    return [segment.tokens or () for segment in request.segments[:-1]]


def test_stock_vllm_sees_the_chunks_new_and_then_in_another_order() -> None:
    engine, found = ask(True, "4 chunks 1", 4)
    assert found == {"full 4": 1000.0, "prefix 4": 2000.0}
    new, again = map(chunks_of, engine.requests)
    assert sorted(new) == sorted(again)
    assert new[0] != again[0]
    assert [request.algorithm for request in engine.requests] == ["prefix", "prefix"]


def test_every_arm_has_seen_its_chunks_in_another_order() -> None:
    engine, found = ask(False, "2 chunks 1", 2)
    assert found == {f"{arm} 2": 2000.0 * (n + 1) for n, arm in enumerate(ARMS)}
    for arm, before, timed in zip(ARMS, engine.requests[::2], engine.requests[1::2], strict=True):
        assert before.algorithm == timed.algorithm == arm
        assert chunks_of(timed) == chunks_of(before)[::-1]
        assert before.segments[-1] != timed.segments[-1]


@pytest.mark.parametrize("stock", [True, False])
def test_no_repeat_has_anything_of_another(stock: bool) -> None:
    repeats = [ask(stock, f"3 chunks {n}", 3)[0].requests for n in range(3)]
    seen = [{tokens for request in asked for tokens in chunks_of(request)} for asked in repeats]
    assert all(len(chunks) == 3 for chunks in seen)
    assert len(set.union(*seen)) == 9
    questions = [request.segments[-1] for asked in repeats for request in asked]
    assert all(isinstance(question, Text) for question in questions)
    assert len({question.tokens for question in questions}) == len(questions)


def test_prompts_are_as_long_as_the_page_says() -> None:
    engine, _ = ask(True, "5 chunks 1", 5)
    lengths = [len(segment.tokens or ()) for segment in engine.requests[0].segments]
    assert lengths == [512] * 5 + [80]
    found = {"stock": {"full 5": [1.0]}}
    assert list(curves(found)["full"]) == [sum(lengths)]


def test_each_length_is_measured_by_itself() -> None:
    found = measures([2, 7])
    assert list(found) == ["2 chunks", "7 chunks"]
    engine = Asked(EngineConfig("m", stock=True))
    figures = found["7 chunks"](engine, "any")  # type: ignore[arg-type]
    assert list(figures) == ["full 7", "prefix 7"]


def test_curves_are_by_arm_and_tokens() -> None:
    assert curves(FOUND) == {
        "full": {1104: [30.0, 10.0, 20.0], 50256: [1000.0, 3000.0, 2000.0]},
        "mepic": {1104: [5.0, 5.5, 6.0]},
        "epic:k=16:copy=shared": {50256: [7.0]},
    }


def test_the_page_has_medians_with_their_spread() -> None:
    lines = render(curves(FOUND), FACTS).splitlines()
    assert "| prompt tokens | full | mepic | epic:k=16:copy=shared |" in lines
    assert "| 1,104 | 20.0 (10.0 - 30.0) | 5.5 (5.0 - 6.0) | - |" in lines
    assert "| 50,256 | 2,000.0 (1,000.0 - 3,000.0) | - | 7.0 (7.0 - 7.0) |" in lines
    assert lines[2].startswith("M, bfloat16: times, not answers; G, driver D, vLLM V, torch T,")
    assert "commit C. Chunks of 512 random tokens" in lines[2]
    assert "n=3" in lines[2]


def test_page_figure_and_numbers_are_written(tmp_path: Path) -> None:
    write(FOUND, FACTS, tmp_path / "new")
    noted = json.loads((tmp_path / "new" / "context.json").read_text())
    assert noted["provenance"] == FACTS
    assert noted["ttft_ms"]["full"]["1104"] == [30.0, 10.0, 20.0]
    assert (tmp_path / "new" / "context.md").read_text() == render(curves(FOUND), FACTS)
    figure = (tmp_path / "new" / "context.svg").read_text()
    assert "context, thousand tokens" in figure
    assert "driver D" in figure
    assert (tmp_path / "new" / "context.png").exists()


@pytest.fixture
def competed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the engines would have been started with and asked; none is."""
    noted: dict[str, Any] = {}

    def run(arms: Any, measures: Any, repeats: int) -> Any:
        noted.update(arms=arms, measures=measures, repeats=repeats)
        return FOUND

    monkeypatch.setattr(context, "run_interleaved", run)
    yield noted


def test_both_engines_have_room_for_the_longest_prompt(
    competed: dict[str, Any], tmp_path: Path
) -> None:
    context.measure("testbed", "cpu", 5, 10, "abc", tmp_path)
    assert (list(competed["measures"]), competed["repeats"]) == (
        ["2 chunks", "4 chunks", "8 chunks"],
        5,
    )
    stock, ours = competed["arms"]["stock"], competed["arms"]["picbench"]
    assert (stock.stock, stock.algorithm, ours.stock) == (True, "prefix", False)
    for config in (stock, ours):
        assert config.context > 8 * CHUNK + QUESTION
        assert config.kv_blocks * 16 >= 4 * 8 * CHUNK
        assert (config.device, config.tiers) == ("cpu", "")
    noted = json.loads((tmp_path / "context.json").read_text())["provenance"]
    assert (noted["commit"], noted["repeats"]) == ("abc", 5)
    assert noted["model"] == "testbed model"

"""TTFT of warm chunks: what the engines are asked, and the page."""

import json
from pathlib import Path
from typing import Any

import pytest
from asked_engine import Asked
from harness_fakes import GPU_FACTS

from picbench.engines.algorithms import parse
from picbench.engines.config import EngineConfig
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.plan import Plan
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.engines.request import Chunk, Request
from picbench.measure.engine import warm_chunks
from picbench.measure.engine.warm_chunks import ARMS, CHUNK, SECTIONS, ratios, render, ttft, write

FACTS = GPU_FACTS | {"model": "M", "dtype": "bfloat16", "chunks": 64, "prompt_tokens": 32_400}

TIMES = {
    "mepic": [10.0, 20.0, 30.0],
    "mepic:context=document": [11.0, 20.0, 33.0],
    "full": [100.0, 200.0, 300.0],
}


def ask(stock: bool, repeat: int, chunks: int = 8) -> tuple[list[Request], dict[str, float]]:
    engine = Asked(EngineConfig("m", stock=stock))
    found = ttft(engine, f"{chunks} chunks {repeat}", chunks=chunks)  # type: ignore[arg-type]
    return engine.requests, found


def planned(request: Request, arm: str) -> Plan:
    algorithm = parse(arm)
    given = [
        Segment(
            segment.tokens or (),
            chunk=isinstance(segment, Chunk),
            context=tuple(getattr(segment, "document", None) or ())[:-CHUNK],
        )
        for segment in request.segments
    ]
    layout = LayoutConfig(pad=algorithm.pads, documents=algorithm.documents)
    return lay_out(given, algorithm.plan_chunk, layout)


def chunks_of(request: Request) -> list[Chunk]:
    return [segment for segment in request.segments if isinstance(segment, Chunk)]


def test_the_first_repeat_compiles_chunks_in_another_order() -> None:
    asked, found = ask(False, 0)
    assert list(found) == list(ARMS)
    for before, timed in zip(asked[::2], asked[1::2], strict=True):
        assert before.algorithm == timed.algorithm
        assert chunks_of(before) == chunks_of(timed)[::-1]


def test_later_repeats_time_the_same_chunks_in_new_orders_under_arms_in_new_orders() -> None:
    repeats = [ask(False, n)[0] for n in range(4)]
    known = {chunk.tokens for chunk in chunks_of(repeats[0][0])}
    assert all({c.tokens for c in chunks_of(r)} == known for asked in repeats for r in asked)
    assert len({tuple(c.tokens for c in chunks_of(asked[-1])) for asked in repeats}) == 4
    assert len({tuple(request.algorithm for request in asked) for asked in repeats[1:]}) > 1
    questions = [request.segments[-1].tokens for asked in repeats for request in asked]
    assert len(set(questions)) == len(questions)


def test_chunks_stand_in_documents_of_several() -> None:
    asked, _ = ask(False, 1)
    lengths = sorted(len(chunk.document or ()) for chunk in chunks_of(asked[0]))
    assert lengths == sorted(CHUNK * n for n in range(1, SECTIONS + 1) for _ in range(2))
    for chunk in chunks_of(asked[0]):
        assert tuple(chunk.document or ())[-CHUNK:] == chunk.tokens


def test_stock_vllm_sees_new_chunks_in_each_repeat() -> None:
    (first, found), (second, _) = ask(True, 0), ask(True, 1)
    assert found == {"full": 1000.0}
    assert [request.algorithm for request in first] == ["prefix"]
    tokens = [{chunk.tokens for chunk in chunks_of(asked[0])} for asked in (first, second)]
    assert not tokens[0] & tokens[1]


def test_what_chunks_were_compiled_after_makes_no_difference_to_the_work() -> None:
    """The same slots at the same positions, and as many of them computed."""
    asked, _ = ask(False, 1)
    plans = {arm: planned(asked[0], arm) for arm in ARMS}
    mepic, naive = plans["mepic"], plans["naive"]
    for arm, plan in plans.items():
        same = naive if arm.startswith("naive") else mepic
        assert (plan.positions, plan.kinds) == (same.positions, same.kinds)
        assert (plan.shared, len(plan.pages)) == (same.shared, len(same.pages))
    assert {plan.canonicals[0].key for plan in plans.values()} != {mepic.canonicals[0].key}


def test_ratios_are_of_the_same_repeat() -> None:
    found = {arm: spread.median for arm, spread in ratios(TIMES).items()}
    assert found == {"mepic:context=document": pytest.approx(1.1), "full": pytest.approx(10.0)}


def test_the_page_has_medians_quartiles_and_ratios(tmp_path: Path) -> None:
    found = {"picbench": {k: v for k, v in TIMES.items() if k != "full"}}
    write(found | {"stock": {"full": TIMES["full"]}}, FACTS, tmp_path / "new")
    page = (tmp_path / "new" / "warm-chunks.md").read_text()
    assert page == render(TIMES, FACTS)
    lines = page.splitlines()
    assert "| `mepic` | 20.0 (15.0 - 25.0) | 1.000 | - |" in lines
    assert "| `full` | 200.0 (150.0 - 250.0) | 10.000 | 10.000 (10.000 - 10.000) |" in lines
    assert "n=3" in lines[2]
    noted = json.loads((tmp_path / "new" / "warm-chunks.json").read_text())
    assert noted["ttft_ms"] == TIMES


def test_both_engines_have_room_for_all_arms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noted: dict[str, Any] = {}

    def run(arms: Any, measures: Any, repeats: int) -> Any:
        noted.update(arms=arms, repeats=repeats)
        return {"picbench": {"mepic": [1.0, 2.0]}, "stock": {"full": [3.0, 4.0]}}

    monkeypatch.setattr(warm_chunks, "run_interleaved", run)
    warm_chunks.measure("testbed", "cpu", 2, 4, "C", tmp_path)
    stock, ours = noted["arms"]["stock"], noted["arms"]["picbench"]
    assert (stock.stock, ours.stock, noted["repeats"]) == (True, False, 2)
    assert ours.kv_blocks * 16 > 3 * 4 * CHUNK
    assert ours.context > 4 * CHUNK
    assert json.loads((tmp_path / "warm-chunks.json").read_text())["provenance"]["commit"] == "C"

"""TTFT of warm chunks: what the engines are asked, and the page."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import GPU_FACTS

from picbench.engines.algorithms import parse
from picbench.engines.config import EngineConfig
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.plan import Plan
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.engines.request import Chunk, Request
from picbench.errors import InvalidRun
from picbench.experiments import warm_chunks
from picbench.experiments.warm_chunks import (
    ARMS,
    CHUNK,
    FULL,
    HIT,
    SECTIONS,
    FirstToken,
    ask_stock,
    ask_warm,
    measure,
    render,
    summary_of,
    write,
)
from picbench.run.measurements import WarmChunks

FACTS = GPU_FACTS | {"model": "M", "dtype": "bfloat16", "chunks": 64, "prompt_tokens": 32_400}
FACTS |= {"chunk": 504, "sections": 4, "head": 64, "question": 80, "busy_cores": 8}

TIMES = {
    "mepic": [10.0, 20.0, 30.0],
    "mepic:context=document": [11.0, 20.0, 33.0],
    "prefix hit": [20.0, 20.0, 40.0],
    "full": [100.0, 200.0, 300.0],
}


@dataclass
class AskedServed:
    """Notes what a served engine is asked; each answer takes a millisecond longer than the last."""

    config: EngineConfig
    cached: int = 0
    requests: list[Request] = field(default_factory=list)

    def first_token(self, request: Request) -> FirstToken:
        self.requests.append(request)
        return FirstToken(len(self.requests), length(request), self.cached)

    def call(self, function: Any) -> Any:
        return function(self)

    def ready(self) -> dict[str, object]:
        return {}

    def close(self) -> None: ...


def length(request: Request) -> int:
    return sum(len(segment.tokens or ()) for segment in request.segments)


def ask(repeat: int, chunks: int = 8) -> tuple[list[Request], dict[str, FirstToken]]:
    engine: Any = AskedServed(EngineConfig("m"))
    found = ask_warm(engine, name=f"{repeat} quiet", chunks=chunks, first=not repeat)
    return engine.requests, found


def ask_of_stock(repeat: int, cached: int = 4000) -> tuple[list[Request], dict[str, FirstToken]]:
    engine: Any = AskedServed(EngineConfig("m", device="cuda", stock=True), cached)
    found = ask_stock(engine, name=f"{repeat} quiet", chunks=8, fresh=8 * CHUNK + 144 - 4000)
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
    asked, found = ask(0)
    assert list(found) == list(ARMS)
    for before, timed in zip(asked[::2], asked[1::2], strict=True):
        assert before.algorithm == timed.algorithm
        assert chunks_of(before) == chunks_of(timed)[::-1]


def test_later_repeats_time_the_same_chunks_in_new_orders_under_arms_in_new_orders() -> None:
    repeats = [ask(n)[0] for n in range(4)]
    known = {chunk.tokens for chunk in chunks_of(repeats[0][0])}
    assert all({c.tokens for c in chunks_of(r)} == known for asked in repeats for r in asked)
    assert len({tuple(c.tokens for c in chunks_of(asked[-1])) for asked in repeats}) == 4
    assert len({tuple(request.algorithm for request in asked) for asked in repeats[1:]}) > 1
    questions = [request.segments[-1].tokens for asked in repeats for request in asked]
    assert len(set(questions)) == len(questions)


def test_chunks_stand_in_documents_of_several() -> None:
    asked, _ = ask(1)
    lengths = sorted(len(chunk.document or ()) for chunk in chunks_of(asked[0]))
    assert lengths == sorted(CHUNK * n for n in range(1, SECTIONS + 1) for _ in range(2))
    for chunk in chunks_of(asked[0]):
        assert tuple(chunk.document or ())[-CHUNK:] == chunk.tokens


def test_stock_vllm_sees_new_chunks_in_each_repeat() -> None:
    (first, found), (second, _) = ask_of_stock(1), ask_of_stock(2)
    assert list(found) == [HIT, FULL]
    assert {request.algorithm for request in first} == {"prefix"}
    tokens = [{chunk.tokens for chunk in chunks_of(asked[-1])} for asked in (first, second)]
    assert not tokens[0] & tokens[1]


def test_a_prefix_hit_leaves_as_many_tokens_as_are_asked_for() -> None:
    """And all that it may begin with is in the cache, however long ago it was used."""
    (known, first, _), (again, later, _) = ask_of_stock(0)[0], ask_of_stock(1)[0]
    before, now = (
        tuple(token for segment in request.segments for token in segment.tokens or ())
        for request in (known, again)
    )
    assert before == now
    hits = [tuple(s.tokens or () for s in request.segments) for request in (first, later)]
    assert all(prefix == before[:4000] for prefix, _ in hits)
    assert {length(request) for request in (known, first, later)} == {8 * CHUNK + 144}
    assert hits[0][1] != hits[1][1]


def test_a_prefix_that_was_lost_ends_the_run() -> None:
    with pytest.raises(InvalidRun, match="computed 192 tokens, not 176"):
        ask_of_stock(1, cached=4000 - 16)


def test_what_chunks_were_compiled_after_makes_no_difference_to_the_work() -> None:
    """The same slots at the same positions, and as many of them computed."""
    asked, _ = ask(1)
    plans = {arm: planned(asked[0], arm) for arm in ARMS}
    mepic, naive = plans["mepic"], plans["naive"]
    for arm, plan in plans.items():
        same = naive if arm.startswith("naive") else mepic
        assert (plan.positions, plan.kinds) == (same.positions, same.kinds)
        assert (plan.shared, len(plan.pages)) == (same.shared, len(same.pages))
    assert {plan.canonicals[0].key for plan in plans.values()} != {mepic.canonicals[0].key}


def answers(times: dict[str, list[float]]) -> dict[str, list[FirstToken]]:
    return {arm: [FirstToken(ms, 32_400, 31_296) for ms in own] for arm, own in times.items()}


LOADS = {
    "quiet": answers(TIMES),
    "busy": answers({arm: [ms * 1.5 for ms in own] for arm, own in TIMES.items()}),
}


def test_ratios_are_of_the_same_repeat() -> None:
    found = summary_of(LOADS)
    assert found == {"ms": 20.0, "vs_prefix_hit": 0.75, "busy_ratio": 1.5}
    assert "busy_ratio" not in summary_of({"quiet": LOADS["quiet"]})


def test_the_page_has_medians_quartiles_and_ratios(tmp_path: Path) -> None:
    write(LOADS, FACTS, tmp_path / "new")
    page = (tmp_path / "new" / "warm-chunks.md").read_text()
    assert page == render(LOADS, FACTS)
    lines = page.splitlines()
    assert "| `mepic` | 1,104 | 20.0 (15.0 - 25.0) | 1.000 | - |" in lines
    assert "| `full` | 1,104 | 200.0 (150.0 - 250.0) | 10.000 | 10.000 (10.000 - 10.000) |" in lines
    assert "`mepic` takes 0.750 (0.625 - 0.875) of a prefix hit" in page
    assert "| `mepic` | 30.0 (22.5 - 37.5) | 1.500 (1.500 - 1.500) |" in lines
    assert "n=3" in lines[2]
    noted = json.loads((tmp_path / "new" / "warm-chunks.json").read_text())
    assert noted["ttft_ms"]["quiet"] == TIMES
    assert noted["new_tokens"]["mepic"] == [1104]
    summary = json.loads((tmp_path / "new" / "summary.json").read_text())
    assert summary == {"warm_ttft": summary_of(LOADS)}


def test_a_quiet_host_alone_has_no_second_table() -> None:
    page = render({"quiet": LOADS["quiet"]}, FACTS)
    assert "cores compute" not in page


def test_both_engines_have_room_for_all_arms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And serve the same loads; stock vLLM leaves as many tokens as the linker counted."""
    engines: dict[str, Any] = {}
    busy: list[int] = []

    def launch(name: str, config: EngineConfig, log: Path) -> Any:
        engines[name] = AskedServed(config, 4 * CHUNK)
        return engines[name]

    @contextmanager
    def keep_busy(count: int) -> Iterator[None]:
        busy.append(count)
        yield

    monkeypatch.setattr(warm_chunks, "busy_cores", keep_busy)
    settings = WarmChunks(
        model="testbed", repeats=2, chunks=4, busy_cores=3, commit="C", output=tmp_path
    )
    page = measure(settings, launch).page
    assert page == (tmp_path / "warm-chunks.md").read_text()
    stock, ours = engines["stock"].config, engines["picbench"].config
    assert (stock.stock, ours.stock) == (True, False)
    assert ours.kv_blocks * 16 > 3 * 4 * CHUNK
    assert ours.context > 4 * CHUNK
    assert busy == [0, 3, 3, 0, 0, 3]
    assert len(engines["stock"].requests) == 3 * 2 * 3
    noted = json.loads((tmp_path / "warm-chunks.json").read_text())
    assert noted["provenance"]["commit"] == "C"
    assert noted["new_tokens"][HIT] == [144]
    assert {len(times) for load in noted["ttft_ms"].values() for times in load.values()} == {2}

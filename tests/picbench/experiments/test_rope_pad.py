"""The 2x2 ablation: what its engines are asked, that they differ in nothing else, and the page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import GPU_FACTS, make_snapshot

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.ledger import Snapshot
from picbench.engines.request import Chunk, Hits, Request, Result, Text, Timings, TokenCounts
from picbench.engines.vllm.device import CPU, find
from picbench.experiments import rope_pad
from picbench.experiments.rope_pad import (
    PairedScores,
    ScoredPrompt,
    measure,
    paired_scores,
    plain,
    ratios,
    render,
    scored_plan,
    scores,
    timed_config,
    timed_plan,
    times,
)
from picbench.run.measurements import RopePadAblation

ASKED = RopePadAblation(
    model="testbed", device="cpu", dtype="float32", chunks=8, repeats=2, rows=11, commit="abc"
)


@dataclass
class Asked:
    """Notes what an engine is asked; replies are what each request's first token says."""

    replies: Mapping[int, str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    limits: list[int | None] = field(default_factory=list)
    memory: Sequence[Snapshot] = ()
    workspace_bytes: int = 3 << 20

    def measure(self) -> None:
        self.memory = [make_snapshot(n, n, held) for n, held in enumerate((5.0, 40.0, 38.0))]

    def generate(
        self,
        requests: Sequence[Request],
        *,
        max_tokens: int | None = None,
        ignore_eos: bool = False,
    ) -> list[Result]:
        self.requests += requests
        self.limits.append(max_tokens)
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Result:
        first = (request.segments[0].tokens or (0,))[0]
        text = self.replies.get(first, "")
        timings = Timings(ttft=0.25, prefill=0.2, tpot=0.002, e2e=1.0)
        return Result(text, (5,), (), timings, TokenCounts(linked=96), Hits(chunk=30))


def timed(name: str) -> tuple[list[Request], dict[str, float]]:
    engine = Asked()
    return engine.requests, times(engine, name, chunks=6)  # type: ignore[arg-type]


def chunks(request: Request) -> list[Any]:
    return [segment for segment in request.segments if isinstance(segment, Chunk)]


def test_both_pads_are_timed_on_one_prompt_that_was_compiled_in_another_order() -> None:
    requests, _ = timed("chunks 1")
    compiled, asked = requests[::2], requests[1::2]
    assert {request.algorithm for request in asked} == {"mepic", "mepic:pad=paper"}
    assert [r.algorithm for r in compiled] == [r.algorithm for r in asked]
    assert asked[0].segments == asked[1].segments
    assert chunks(asked[0]) != chunks(compiled[0])
    assert set(chunks(asked[0])) == set(chunks(compiled[0]))
    lengths = [len(segment.tokens or ()) for segment in asked[0].segments]
    assert lengths == [16, *[504] * 6, 80]


def test_repeats_share_chunks_and_nothing_else() -> None:
    (_, one, *_), (_, two, *_) = timed("chunks 1")[0], timed("chunks 2")[0]
    assert set(chunks(one)) == set(chunks(two))
    assert chunks(one) != chunks(two)
    assert one.segments[0] != two.segments[0]
    assert one.segments[-1] != two.segments[-1]


def test_neither_kind_of_pad_is_always_timed_first() -> None:
    assert len({timed(f"chunks {n}")[0][0].algorithm for n in range(12)}) == 2


def test_figures_are_those_of_the_timed_request() -> None:
    _, found = timed("chunks 1")
    figures = {"ttft_ms": 250, "tpot_ms": 2, "blocks": 40, "own_blocks": 10, "linked": 96}
    assert found == {f"{p} {key}": v for p in ("masked", "paper") for key, v in figures.items()}


def test_a_prompt_without_chunks_is_new_in_every_repeat() -> None:
    engine = Asked()
    found = [plain(engine, f"no chunks {n}", tokens=300) for n in range(2)]  # type: ignore[arg-type]
    assert found == [{"ttft_ms": 250.0, "tpot_ms": 2.0, "workspace_mib": 3.0}] * 2
    one, two = engine.requests
    assert one.algorithm == two.algorithm == "prefix"
    assert one.segments != two.segments
    assert [len(request.segments[0].tokens or ()) for request in engine.requests] == [300] * 2


def test_each_row_has_a_score_under_each_kind_of_pad() -> None:
    engine = Asked(replies={1: "home of Y is Rome", 2: "home of Y is Bern"})
    rows = [
        ScoredPrompt("musique", n, Request([Text(tokens=(first,))]), ("Rome",))
        for n, first in enumerate((1, 2))
    ]
    found = scores(engine, "rows", prompts=rows)  # type: ignore[arg-type]
    assert found == {
        "masked musique 0": 1.0,
        "masked musique 1": 0.0,
        "paper musique 0": 1.0,
        "paper musique 1": 0.0,
    }
    assert [r.algorithm for r in engine.requests] == ["mepic"] * 2 + ["mepic:pad=paper"] * 2


def test_engines_differ_in_their_keys_alone() -> None:
    plans = [timed_plan(ASKED, timed_config(ASKED)), scored_plan(ASKED)]
    for plan in plans:
        default, fused = plan.engines.values()
        assert fused == replace(default, keys_without_rope=True)
        assert not default.keys_without_rope
    timing, scoring = plans
    assert [cell.name for cell in timing.cells] == ["chunks", "no chunks"]
    assert (timing.rounds, scoring.rounds) == (2, 1)
    measures: list[Any] = [cell.arms["default"].measure for cell in scoring.cells]
    assert [len(measure.keywords["prompts"]) for measure in measures] == [60, 6]
    assert all(cell.arms["default"].warm_up is None for cell in scoring.cells)


def test_page_figures_and_settings_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"timed": repeats(1.0), "scored": scored()}
    monkeypatch.setattr(
        rope_pad, "run", lambda plan, record, *_, **__: record.found.update(found[plan.name])
    )
    page = measure(ASKED.model_copy(update={"output": tmp_path})).page
    assert page == (tmp_path / "rope-pad-ablation.md").read_text()
    written = json.loads((tmp_path / "rope-pad-ablation.json").read_text())
    known = {"model": "testbed model", "device": "cpu", "dtype": "float32", "chunks": 8}
    assert written["provenance"]["settings"] == known | {"repeats": 2, "rows": 11, "eager": False}
    # 8 layers, keys and values, 2 heads of 64, 16 slots, 4 bytes.
    assert written["provenance"]["block_bytes"] == 8 * 2 * 2 * 64 * 16 * 4
    assert written["ratios"]["default paper"]["ttft_ms"]["median"] == 1.5
    assert written["scores"]["default paper"]["changed"] == 1
    assert written["scored"]["fused"]["masked musique 0"] == 1.0


@pytest.fixture
def config(llama: Path) -> EngineConfig:
    if find("auto") is not CPU:
        pytest.skip("this vLLM does not run on CPU")
    asked = RopePadAblation(model=str(llama), device="cpu", dtype="float32", chunks=4)
    return timed_config(asked)


@pytest.mark.engine
@pytest.mark.parametrize("without_rope", [False, True])
def test_real_engines_find_all_chunks_cached_and_pads_cost_what_they_must(
    config: EngineConfig, without_rope: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Result] = []
    real = Engine.generate

    def generate(self: Engine, *arguments: Any, **options: Any) -> list[Result]:
        found = real(self, *arguments, **options)
        results.extend(found)
        return found

    monkeypatch.setattr(Engine, "generate", generate)
    with Engine(replace(config, keys_without_rope=without_rope)) as engine:
        found = [times(engine, f"chunks {n}", chunks=3) for n in range(2)]
        assert plain(engine, "no chunks", tokens=100)["ttft_ms"] > 0
    assert [r.counts.compiled for r in results[1:-1:2]] == [0] * 4
    for figures in found:
        # Eight of the sixteen tokens that the paper's form recomputes of a chunk are pads.
        assert (figures["masked linked"], figures["paper linked"]) == (48, 24)
        # 31 of each chunk's 32 blocks are shared where the first one is recomputed as a whole.
        assert figures["masked blocks"] == figures["paper blocks"] == 13 + 3 * 31
        # Linked tokens and the question are packed; 16 + 48 + 80 + 64 slots.
        assert figures["masked own_blocks"] == figures["paper own_blocks"] == 13


SETTINGS = {"model": "M", "device": "cuda", "dtype": "bfloat16", "chunks": 64}
FACTS = GPU_FACTS | {
    "settings": SETTINGS | {"repeats": 3, "rows": 2, "eager": False},
    "block_bytes": 2 << 20,
    "cores": 16,
    "load": [1.0, 2.0, 3.25],
    "chunk": 504,
    "question": 80,
    "plain": 8064,
    "reply": 64,
}


def figures(factor: float) -> dict[str, list[float]]:
    """Three repeats, each twice as long as the one before; the paper's pads take 1.5 times."""
    found = {f"masked {name}": [100.0, 200.0, 400.0] for name in ("ttft_ms", "tpot_ms")}
    found |= {name: [10.0, 20.0, 40.0] for name in ("ttft_ms", "tpot_ms")}
    found = {name: [value * factor for value in values] for name, values in found.items()}
    found |= {
        f"paper {name}": [1.5 * value for value in found[f"masked {name}"]]
        for name in ("ttft_ms", "tpot_ms")
    }
    for pad, held in {"masked": 70.0, "paper": 74.0}.items():
        found |= {f"{pad} blocks": [held] * 3, f"{pad} own_blocks": [held - 62] * 3}
        found[f"{pad} linked"] = [held / 2] * 3
    return found | {"workspace_mib": [5.0, 9.0, 9.0]}


def repeats(factor: float) -> dict[str, dict[str, list[float]]]:
    return {"default": figures(1.0), "fused": figures(factor)}


def scored(fused_paper: float = 1.0) -> dict[str, dict[str, list[float]]]:
    """Two rows of two sets: all right, but for the paper's pads on one row."""
    rows = [f"{name} {n}" for name in ("musique", "needle") for n in range(2)]
    right = {f"{pad} {row}": [1.0] for pad in ("masked", "paper") for row in rows}
    return {
        "default": right | {"paper needle 1": [0.0]},
        "fused": right | {"paper musique 0": [fused_paper]},
    }


def page_of(factor: float, **facts: Any) -> str:
    return render(repeats(factor), scored(), FACTS | facts)


def test_ratios_are_taken_within_repeats() -> None:
    """Over all repeats one value is four times another; within each they are 1.25 apart."""
    found = ratios(repeats(1.25), "fused", "masked ttft_ms", "masked ttft_ms")
    assert (found.q25, found.median, found.q75, found.n) == (1.25, 1.25, 1.25, 3)
    assert ratios(repeats(1.25), "default", "paper ttft_ms", "masked ttft_ms").median == 1.5


def test_scores_are_compared_row_by_row() -> None:
    found = paired_scores(scored(), "default", "paper")
    assert (found.mean, found.difference, found.changed, found.n) == (0.75, -0.25, 1, 4)
    assert found.error == pytest.approx(0.5 / sqrt(4))
    assert paired_scores(scored(), "default", "paper", "musique ").difference == 0
    assert paired_scores(scored(0.5), "fused", "paper", "musique ").mean == 0.75
    cancelled = PairedScores.of([1.0, 0.0], [0.0, 1.0])
    assert (cancelled.difference, cancelled.changed) == (0.0, 2)
    assert cancelled.error == pytest.approx(1.0)


def test_each_cell_has_a_row_and_the_first_is_what_others_are_compared_with() -> None:
    rows = [line for line in page_of(1.25).splitlines() if line.startswith("| with")]
    assert len(rows) == 10
    first = "| with RoPE, re-rotated by the shift | masked | 200.0 (150.0 - 300.0) "
    assert rows[0].startswith(first + "| 1.000 (1.000 - 1.000) |")
    assert rows[0].endswith("| 70 | 8 | 140.0 | 35 |")
    assert "| paper | 300.0 (225.0 - 450.0) | 1.500 (1.500 - 1.500) |" in rows[1]
    assert rows[1].endswith("| 74 | 12 | 148.0 | 37 |")
    assert "| 1.250 (1.250 - 1.250) |" in rows[2]
    assert rows[7].endswith("| 1.000 | 0.500 | 0.750 | -0.250 ± 0.250 | 1 of 4 |")


@pytest.mark.parametrize(
    ("factor", "word"),
    [(1.015, "negligible"), (0.985, "negligible"), (1.25, "more"), (0.9, "less")],
)
def test_what_is_negligible_is_said_by_the_numbers(factor: float, word: str) -> None:
    told = page_of(factor)
    ratio = f"{factor:.3f} ({factor:.3f} - {factor:.3f}) of the default's, {word};"
    assert f"- time per token without chunks: {ratio}" in told
    assert f"- time to the first token after cached chunks, every key without RoPE: {ratio}" in told
    assert "- score: -0.250 ± 0.250 with the paper's pads, +0.000 ± 0.000 with every key" in told
    both = repeats(factor)
    both["fused"]["tpot_ms"] = [9.0, 20.0, 44.0]
    said = "1.000 (0.950 - 1.050) of the default's, not to be told from 1 in this spread"
    assert f"- time per token without chunks: {said}" in render(both, scored(), FACTS)


def test_the_page_says_what_the_device_does_with_keys() -> None:
    settings = FACTS["settings"] | {"device": "cpu", "eager": True}
    told = page_of(1.0, settings=settings, block_bytes=0)
    assert "| chunks' without RoPE, others with it | masked |" in told
    load = "16 cores, load average 3.2 over the last 15 minutes"
    assert f"bfloat16, eager; {load}. Times and blocks: M, 64 cached chunks of 504" in told
    assert "| 70 | 8 | - | 35 |" in told

"""The 2x2 ablation: what its four cells are asked, and that they differ in nothing else."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import make_snapshot

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.ledger import Snapshot
from picbench.engines.request import Chunk, Hits, Request, Result, Text, Timings, TokenCounts
from picbench.engines.vllm.device import CPU, find
from picbench.experiments import rope_pad as measuring
from picbench.experiments.rope_pad import (
    AblationSettings,
    ScoredPrompt,
    plain,
    scores,
    timed_config,
    times,
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


def test_engines_differ_in_their_keys_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[Any, ...]] = []

    def run(arms: Any, measures: Any, repeats: int, *, warm_up: bool = True) -> Any:
        runs.append((arms, measures, repeats, warm_up))
        if warm_up:
            figures = ("ttft_ms", "tpot_ms", "blocks", "own_blocks", "linked")
            names = [*(f"{p} {f}" for p in ("masked", "paper") for f in figures), *figures[:2]]
            return {arm: {key: [1.0, 2.0] for key in [*names, "workspace_mib"]} for arm in arms}
        rows = [prompt for measure in measures.values() for prompt in measure.keywords["prompts"]]
        names = [f"{p} {r.dataset} {r.row}" for p in ("masked", "paper") for r in rows]
        return {arm: {key: [0.5] for key in names} for arm in arms}

    monkeypatch.setattr(measuring, "run_interleaved", run)
    asked = AblationSettings("testbed", "cpu", "float32", chunks=8, repeats=2, rows=11)
    page = measuring.measure(asked, "abc", tmp_path)
    for arms, *_ in runs:
        default, fused = arms.values()
        assert fused == replace(default, keys_without_rope=True)
        assert not default.keys_without_rope
    (_, timing, repeats, _), (_, scoring, once, _) = runs
    assert (list(timing), repeats, once) == (["chunks", "no chunks"], 2, 1)
    assert [len(m.keywords["prompts"]) for m in scoring.values()] == [60, 6]
    written = json.loads((tmp_path / "rope-pad-ablation.json").read_text())
    assert written["provenance"]["settings"] == {
        "model": "testbed model",
        "device": "cpu",
        "dtype": "float32",
        "chunks": 8,
        "repeats": 2,
        "rows": 11,
        "eager": False,
    }
    # 8 layers, keys and values, 2 heads of 64, 16 slots, 4 bytes.
    assert written["provenance"]["block_bytes"] == 8 * 2 * 2 * 64 * 16 * 4
    assert page == (tmp_path / "rope-pad-ablation.md").read_text()
    assert "0 of 66" in page


@pytest.fixture
def config(llama: Path) -> EngineConfig:
    if find("auto") is not CPU:
        pytest.skip("this vLLM does not run on CPU")
    asked = AblationSettings("", "cpu", "float32", chunks=3)
    return timed_config(asked, str(llama))


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

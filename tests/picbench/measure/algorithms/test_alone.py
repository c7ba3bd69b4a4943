"""Requests in a batch of all algorithms and alone: what is asked, and what the page says."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pytest
from harness_fakes import GPU_FACTS, Harness, make_sample

from picbench.engines.config import EngineConfig
from picbench.engines.request import Hits, Request, Result, Timings, TokenCounts
from picbench.errors import InvalidRun
from picbench.experiments import serve_arms
from picbench.experiments import serve_arms as alone
from picbench.experiments.serve_arms import Differing, ServeSettings, first_difference, render
from picbench.experiments.serve_arms import measure_alone as measure
from picbench.run.workload import Workload
from picbench.settings import RunConfig

SETTINGS = ServeSettings(
    "testbed", ("musique", "needle"), algo=("naive", "mepic"), device="cpu", dtype="float32"
)
FACTS = GPU_FACTS | {"dtype": "float32", "eager": True, "arms": 3, "datasets": 2, "tokens": 1234}


def reply(*tokens: int, gaps: Sequence[float] = ()) -> Result:
    """A reply; at each token the second best one is this much less likely."""
    steps = tuple({token: -0.1, 99: -0.1 - gap} for token, gap in zip(tokens, gaps, strict=False))
    counts = TokenCounts(prompt=36)
    return Result("", tokens, (), Timings(0, 0, None, 0), counts, Hits(), "stop", logprobs=steps)


@dataclass
class Shaky:
    """Gives some requests another token when they are in a batch."""

    wrong: int = 0
    calls: list[str] = field(default_factory=list)
    served: list[Request] = field(default_factory=list)

    def __call__(self, config: EngineConfig) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def reset(self) -> None:
        self.calls.append("reset")

    def generate(self, requests: Sequence[Request], *, logprobs: int) -> list[Result]:
        assert logprobs == 2
        self.calls.append(f"generate {len(requests)}")
        self.served += requests
        wrong = self.wrong if len(requests) > 1 else 0
        right = reply(5, 6, gaps=(1.0, 0.25))
        return [reply(5, 7, gaps=(1.0, 0.5)) if n < wrong else right for n in range(len(requests))]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Shaky:
    def load(config: RunConfig) -> Workload:
        return Harness([make_sample(n) for n in range(10)]).load(config)

    found = Shaky()
    monkeypatch.setattr(serve_arms, "load_workload", load)
    monkeypatch.setattr(alone, "Engine", found)
    return found


def noted(folder: Path, dtype: str = "float32") -> Any:
    return json.loads((folder / f"alone-{dtype}.json").read_text())


def test_each_request_is_served_again_alone_in_an_empty_engine(
    engine: Shaky, tmp_path: Path
) -> None:
    assert measure(SETTINGS, 7, "C", tmp_path) == []
    assert engine.calls == ["generate 7", *["reset", "generate 1"] * 7]
    assert engine.served[:7] == engine.served[7:]
    assert {request.algorithm for request in engine.served} == {"full", "naive", "mepic"}
    assert noted(tmp_path)["requests"] == 7
    assert noted(tmp_path)["provenance"]["tokens"] == 14


def test_other_tokens_are_written_and_invalid_in_float32(engine: Shaky, tmp_path: Path) -> None:
    engine.wrong = 2
    with pytest.raises(InvalidRun, match="2 of 7 requests differ from those alone"):
        measure(SETTINGS, 7, "C", tmp_path)
    first, second = noted(tmp_path)["differing"]
    assert (first["token"], first["gap"]) == (1, pytest.approx(0.25))
    assert second["arm"] in ("full", "naive", "mepic")
    found = measure(replace(SETTINGS, dtype="bfloat16"), 7, "C", tmp_path)
    assert len(found) == len(noted(tmp_path, "bfloat16")["differing"]) == 2


def test_a_reply_that_ends_early_differs_after_its_last_token() -> None:
    long, short = reply(5, 6, gaps=(1.0, 0.75)), reply(5, gaps=(1.0,))
    assert first_difference(long, short) == (1, pytest.approx(0.75))
    assert first_difference(short, long) == (1, pytest.approx(0.75))


def test_the_page_says_what_differs_and_how_closely() -> None:
    lines = render([Differing("needle", 3, "mepic", 12, 3e-5)], 200, FACTS).splitlines()
    assert "1 of 200 requests have other tokens (1,234 in all)." in lines
    assert "| needle | 3 | `mepic` | 12 | 3.0e-05 |" in lines
    assert "float32, eager; G, driver D" in lines[2]
    assert "200 requests of 3 arms and 2 data sets" in lines[2]

"""Rows served by every arm: the batch, what is kept, and where a stopped measurement goes on."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import pytest
from harness_fakes import Harness, make_sample

from picbench.engines.config import EngineConfig
from picbench.engines.request import Hits, Request, Result, Timings, TokenCounts
from picbench.errors import ConfigError, InvalidRun
from picbench.experiments import serve_arms
from picbench.experiments.arm_scores import Case, ScoredPart
from picbench.experiments.serve_arms import WINDOW, ServeSettings, measure
from picbench.run.workload import Workload
from picbench.settings import RunConfig

ARMS = ("full", "naive", "mepic")
SETTINGS = ServeSettings(
    "testbed", ("musique",), rows=2 * WINDOW + 1, algo=("naive", "mepic"), device="cpu"
)


@dataclass
class Batches:
    """An engine that is right except under naive, and notes each batch it is given."""

    linked: int = 16
    fails: bool = False
    batches: list[list[Request]] = field(default_factory=list)
    configs: list[EngineConfig] = field(default_factory=list)

    def __call__(self, config: EngineConfig) -> Self:
        self.configs.append(config)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def generate(self, requests: Sequence[Request]) -> list[Result]:
        self.batches.append(list(requests))
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Result:
        linked = self.linked if request.algorithm == "mepic" else 0
        counts = TokenCounts(prompt=36, reused=0 if request.algorithm == "full" else 20)
        return Result(
            "no" if request.algorithm == "naive" else "yes",
            (5,),
            (),
            Timings(0.1, 0.1, None, 0.1),
            replace(counts, linked=linked),
            Hits(),
            "error" if self.fails else "stop",
            error="a fault" if self.fails else None,
        )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Batches]:
    def load(config: RunConfig) -> Workload:
        return Harness([make_sample(n) for n in range(100)]).load(config)

    found = Batches()
    monkeypatch.setattr(serve_arms, "load_workload", load)
    monkeypatch.setattr(serve_arms, "Engine", found)
    yield found


def read(folder: Path) -> ScoredPart:
    return ScoredPart.read(folder / "testbed-musique.json")


def test_every_arm_has_every_row_in_order(engine: Batches, tmp_path: Path) -> None:
    assert measure(SETTINGS, "C", tmp_path)
    part = read(tmp_path)
    assert (part.case, part.rows, tuple(part.arms)) == (Case("testbed", "musique"), 21, ARMS)
    assert {arm: set(rows.score) for arm, rows in part.arms.items()} == {
        "full": {1.0},
        "naive": {0.0},
        "mepic": {1.0},
    }
    # Two chunks of one block: all of them is linked by mepic and by full.
    assert part.arms["mepic"].linked == part.arms["full"].linked == [32] * 21
    assert part.arms["naive"].computed == [16] * 21
    assert (part.prompt[0], part.chunk[0]) == (36, 32)


def test_a_batch_has_all_arms_in_random_order(engine: Batches, tmp_path: Path) -> None:
    measure(SETTINGS, "C", tmp_path)
    first, second, _ = engine.batches
    assert [len(batch) for batch in engine.batches] == [3 * WINDOW, 3 * WINDOW, 3]
    order = [request.algorithm for request in first]
    assert sorted(map(str, order)) == sorted(ARMS * WINDOW)
    assert order != sorted(map(str, order))
    assert order != [request.algorithm for request in second]


def test_another_run_has_the_same_order(engine: Batches, tmp_path: Path) -> None:
    for name in ("a", "b"):
        measure(replace(SETTINGS, rows=WINDOW), "C", tmp_path / name)
    assert engine.batches[0] == engine.batches[1]
    measure(replace(SETTINGS, rows=WINDOW, seed=1), "C", tmp_path / "c")
    assert engine.batches[0] != engine.batches[2]


def test_a_measurement_that_was_stopped_goes_on(engine: Batches, tmp_path: Path) -> None:
    stopped = replace(SETTINGS, seconds=1e-9)
    assert not measure(stopped, "C", tmp_path)
    begun = ScoredPart.begin(Case("testbed", "musique"), 21, {}, ARMS)
    assert not (tmp_path / f"{begun.case.name}.json").exists()
    assert measure(SETTINGS, "C", tmp_path)
    whole = read(tmp_path)
    partly = json.loads((tmp_path / "testbed-musique.json").read_text())
    for name in ("prompt", "chunk"):
        partly[name] = partly[name][:WINDOW]
    for rows in partly["arms"].values():
        for name in rows:
            rows[name] = rows[name][:WINDOW]
    (tmp_path / "testbed-musique.json").write_text(json.dumps(partly))
    engine.batches.clear()
    assert measure(SETTINGS, "C", tmp_path)
    assert [len(batch) for batch in engine.batches] == [3 * WINDOW, 3]
    assert read(tmp_path) == whole


def test_what_is_complete_starts_no_engine(engine: Batches, tmp_path: Path) -> None:
    measure(SETTINGS, "C", tmp_path)
    assert measure(SETTINGS, "C", tmp_path)
    assert len(engine.configs) == 1
    with pytest.raises(ConfigError, match="other settings"):
        measure(replace(SETTINGS, dtype="float32"), "C", tmp_path)


def test_the_first_rows_can_be_left_out(engine: Batches, tmp_path: Path) -> None:
    measure(replace(SETTINGS, rows=WINDOW, first=WINDOW - 2), "C", tmp_path)
    part = ScoredPart.read(tmp_path / "testbed-musique-from-8.json")
    assert (part.rows, part.wanted, part.case.first) == (2, 2, WINDOW - 2)
    chunks = {request.segments[1].tokens for request in engine.batches[0]}
    assert chunks == {(1000 + row,) * 16 for row in (8, 9)}
    with pytest.raises(ConfigError, match="`first` 10: fake has no row after that"):
        measure(replace(SETTINGS, datasets=("fake",), rows=10, first=10), "C", tmp_path)


def test_data_sets_without_lead_passages_are_left_out_of_drop(
    engine: Batches, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, datasets=("needle", "hotpotqa"), drop=True, rows=1)
    assert measure(settings, "C", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["testbed-hotpotqa-drop.json"]


def test_a_request_that_fails_or_links_more_than_its_plan_is_invalid(
    engine: Batches, tmp_path: Path
) -> None:
    engine.linked = 33
    with pytest.raises(InvalidRun, match="mepic on row 0 of testbed-musique linked 33 tokens"):
        measure(SETTINGS, "C", tmp_path)
    engine.fails = True
    with pytest.raises(InvalidRun, match="full on row 0 of testbed-musique failed: a fault"):
        measure(SETTINGS, "C", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_engine_gets_the_settings(engine: Batches, tmp_path: Path) -> None:
    measure(replace(SETTINGS, kv_blocks=2000, max_requests=7, eager=True), "C", tmp_path)
    [config] = engine.configs
    assert (config.kv_blocks, config.max_requests, config.tiers) == (2000, 7, "")
    assert (config.device, config.dtype, config.eager) == ("cpu", "bfloat16", True)


@pytest.mark.engine
def test_a_real_engine_links_what_plans_say(tmp_path: Path) -> None:
    settings = replace(
        SETTINGS,
        datasets=("multi_news",),
        rows=2,
        algo=("mepic:anchored=on:context=document", "cacheblend:r=0.15"),
        dtype="float32",
        eager=True,
        kv_blocks=1024,
    )
    assert measure(settings, "C", tmp_path)
    part = ScoredPart.read(tmp_path / "testbed-multi_news.json")
    full, own, blend = part.arms.values()
    assert full.score == pytest.approx([1.0, 1.0], abs=0.1)
    assert full.linked == part.chunk
    assert all(0 < linked < chunk for linked, chunk in zip(own.linked, part.chunk, strict=True))
    assert blend.linked == [int(0.15 * chunk) for chunk in part.chunk]

"""Engines in alternation, each in its own process; and what engines do before being measured."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from failing_measures import gone, wrong
from harness_fakes import FakeEngine

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.engines.vllm.device import CPU, find
from picbench.errors import ConfigError, EngineError
from picbench.experiments import engines as interleaved
from picbench.experiments import engines as started_engines
from picbench.experiments.engines import ArmFigures, run_interleaved
from picbench.measure.engine.context import ARMS, ttft
from picbench.run.server import Server, launch

pytestmark = pytest.mark.engine


@pytest.fixture
def config(llama: Path) -> EngineConfig:
    if find("auto") is not CPU:
        pytest.skip("this vLLM does not run on CPU")
    return EngineConfig(str(llama), device="cpu", dtype="float32", context=1200, kv_blocks=300)


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    """The arms that were started, none of which is left after the test."""
    found: list[Server] = []

    def begin(name: str, config: EngineConfig, log: Path) -> Server:
        found.append(launch(name, config, log))
        return found[-1]

    monkeypatch.setattr(started_engines, "launch", begin)
    yield found
    assert all(remote._process.poll() is not None for remote in found)


@dataclass
class LocalArm:
    """Calls measures with its own name in place of an engine, and notes which, in `order`."""

    name: str
    order: list[tuple[str, str]]

    def call(self, function: Any) -> Any:
        _, name = function.args
        self.order.append((self.name, name))
        return function(self.name)


@dataclass
class Keeping:
    """An engine that keeps what it answers."""

    engine: Engine
    results: list[Result] = field(default_factory=list)

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    def generate(self, *arguments: Any, **options: Any) -> list[Result]:
        found = self.engine.generate(*arguments, **options)
        self.results += found
        return found


def place(engine: str, name: str) -> dict[str, float]:
    """The number of the repeat, and a figure that one arm alone has."""
    repeat = float(name.split()[-1])
    return {"repeat": repeat} | ({"ours": -repeat} if engine == "b" else {})


def refused(engine: str, name: str) -> dict[str, float]:
    raise ConfigError(f"{engine} cannot serve {name}")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Who was asked what, in order, where no engine is started."""
    found: list[tuple[str, str]] = []

    @contextmanager
    def started(arms: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, LocalArm], dict[str, str]]]:
        yield {name: LocalArm(name, found) for name in arms}, {}

    monkeypatch.setattr(interleaved, "started_engines", started)
    return found


def between(measures: Mapping[str, Any], repeats: int) -> ArmFigures:
    config = EngineConfig("m")
    return run_interleaved({"a": config, "b": config}, measures, repeats)


def test_arms_alternate_and_the_first_repeat_is_not_kept(order: list[tuple[str, str]]) -> None:
    found = between({"x": place, "y": place}, 2)
    assert order == [(arm, f"{label} {n}") for label in "xy" for n in range(3) for arm in "ab"]
    assert found == {
        "a": {"repeat": [1.0, 2.0, 1.0, 2.0]},
        "b": {"repeat": [1.0, 2.0, 1.0, 2.0], "ours": [-1.0, -2.0, -1.0, -2.0]},
    }


def test_without_a_warm_up_all_repeats_are_kept(order: list[tuple[str, str]]) -> None:
    config = EngineConfig("m")
    found = run_interleaved({"a": config}, {"x": place}, 2, warm_up=False)
    assert order == [("a", "x 1"), ("a", "x 2")]
    assert found == {"a": {"repeat": [1.0, 2.0]}}


def test_an_error_of_an_engine_is_raised_and_no_other_is_asked(
    order: list[tuple[str, str]],
) -> None:
    with pytest.raises(ConfigError, match="a cannot serve x 0"):
        between({"x": refused}, 2)
    assert order == [("a", "x 0")]


@pytest.mark.parametrize(
    ("end", "said"),
    [(gone, "a: the engine's process ended with exit code 9"), (wrong, "a: ValueError: not x 0")],
)
def test_an_engine_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, started: list[Server], end: Any, said: str
) -> None:
    # The child process must find the fakes.
    folder = str(Path(__file__).parents[2])
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{path}" if path else folder)

    def begin(name: str, config: EngineConfig, log: Path) -> Server:
        started.append(Server(name, FakeEngine, log))
        return started[-1]

    monkeypatch.setattr(started_engines, "launch", begin)
    with pytest.raises(EngineError, match=said):
        between({"x": end}, 2)
    assert len(started) == 2


def test_two_real_engines_are_up_at_once_and_end(
    config: EngineConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = replace(config, stock=True, algorithm="prefix")
    measures = {"short": partial(ttft, chunks=1), "long": partial(ttft, chunks=2)}
    found = run_interleaved({"stock": stock, "picbench": config}, measures, 2)
    assert list(found) == ["stock", "picbench"]
    assert list(found["stock"]) == ["full 1", "prefix 1", "full 2", "prefix 2"]
    assert list(found["picbench"]) == [f"{arm} {n}" for n in (1, 2) for arm in ARMS]
    for figures in found.values():
        assert all(len(values) == 2 and min(values) > 0 for values in figures.values())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["stock", "picbench", "short", "long"]
    assert "'kv_blocks': 300" in lines[0]
    assert "'attention': 'stock'" in lines[0]


def test_an_engine_that_cannot_start_says_why_and_none_is_left(config: EngineConfig) -> None:
    wrong = replace(config, algorithm="mepik")
    with pytest.raises(ConfigError, match="unknown algorithm 'mepik'"):
        run_interleaved({"bad": wrong, "good": config}, {}, 1)


def test_what_is_timed_has_its_chunks_cached_and_nothing_else(config: EngineConfig) -> None:
    """A question of 80 tokens is new, and what an arm recomputes of its chunks."""
    with Engine(config) as engine:
        kept = Keeping(engine)
        for repeat in range(2):
            ttft(kept, f"2 chunks {repeat}", chunks=2)  # type: ignore[arg-type]
    timed = kept.results[1::2]
    assert [result.hits.prefix for result in timed] == [0] * 2 * len(ARMS)
    assert all(result.counts.compiled == 0 for result in timed)
    assert all(r.counts.reused + r.counts.linked + 80 == r.counts.prompt for r in timed)
    assert [result.counts.linked > 0 for result in timed[:4]] == [False, True, True, True]


def test_stock_vllm_finds_nothing_of_a_prompt_in_another_order(config: EngineConfig) -> None:
    with Engine(replace(config, stock=True, algorithm="prefix")) as engine:
        kept = Keeping(engine)
        for repeat in range(3):
            ttft(kept, f"2 chunks {repeat}", chunks=2)  # type: ignore[arg-type]
    assert [result.counts.reused for result in kept.results] == [0] * 6


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """All that any engine of this process answers."""
    found: list[Result] = []
    real = Engine.generate

    def generate(self: Engine, *arguments: Any, **options: Any) -> list[Result]:
        results = real(self, *arguments, **options)
        found.extend(results)
        return results

    monkeypatch.setattr(Engine, "generate", generate)
    return found


@pytest.mark.parametrize("stock", [False, True])
def test_warming_up_leaves_no_trace(
    config: EngineConfig, served: list[Result], stock: bool
) -> None:
    like = replace(config, stock=True, algorithm="prefix") if stock else config
    rehearsed = [Text(tokens=(1,) * 40)]
    if not stock:
        rehearsed = [*(Chunk(tokens=(n + 1,) * 50) for n in range(12)), *rehearsed]
    with Engine(like) as engine:
        engine.warm_up()
        assert len(served) == (2 if stock else 6)
        assert served[-1].counts.reused > 0
        assert engine.memory == []
        assert stock or engine.cache.chunks == []
        [again] = engine.generate([Request(rehearsed)])
    assert (again.counts.compiled, again.hits.prefix) == (0 if stock else 600, 0)
    assert not again.hits.tiers


@pytest.mark.parametrize(
    ("context", "blocks", "algorithm", "count"),
    [
        (16, 2, "mepic", 2),
        (3, 2, "mepic", 2),
        (2, 2, "mepic", 0),
        # Room for the tokens of twelve chunks, and not for the blocks that they take.
        (642, 82, "mepic", 4),
        (642, 82, "epic:k=0", 2),
        (642, 82, "cacheblend", 2),
    ],
)
def test_an_engine_without_room_warms_up_with_what_fits(
    config: EngineConfig,
    served: list[Result],
    context: int,
    blocks: int,
    algorithm: str,
    count: int,
) -> None:
    small = replace(config, context=context, kv_blocks=blocks, algorithm=algorithm)
    with Engine(small) as engine:
        engine.warm_up()
        assert len(served) == count
        assert engine.memory == []
        assert engine.cache.chunks == []

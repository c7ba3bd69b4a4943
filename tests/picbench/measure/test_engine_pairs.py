"""Engines in turns, each in a process of its own; and what engines do before they are measured."""

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.engines.vllm.device import CPU, find
from picbench.errors import ConfigError, EngineError
from picbench.measure import engine_pairs
from picbench.measure.context import ARMS, ttft
from picbench.measure.engine_pairs import Found, compete

pytestmark = pytest.mark.engine


@pytest.fixture
def config(llama: Path) -> EngineConfig:
    if find("auto") is not CPU:
        pytest.skip("this vLLM does not run on CPU")
    return EngineConfig(str(llama), device="cpu", dtype="float32", context=1200, kv_blocks=300)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No test leaves a process behind."""
    yield
    assert multiprocessing.active_children() == []


@dataclass
class Pipe:
    """An arm's end of a pipe; `order` is shared, to see who was asked what and when."""

    name: str
    order: list[tuple[str, str]]
    asked: Any = None

    def send(self, asked: Any) -> None:
        self.asked = asked

    def recv(self) -> Mapping[str, float]:
        measure, name = self.asked
        self.order.append((self.name, name))
        return measure(self.name, name)  # type: ignore[no-any-return]


@dataclass
class EvictionListener:
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
    """The number of the turn, and a figure that one arm alone has."""
    turn = float(name.split()[-1])
    return {"turn": turn} | ({"ours": -turn} if engine == "b" else {})


def refused(engine: str, name: str) -> ConfigError:
    return ConfigError(f"{engine} cannot serve {name}")


def gone(engine: str, name: str) -> dict[str, float]:
    raise EOFError


def reset(engine: str, name: str) -> dict[str, float]:
    raise ConnectionResetError


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Who was asked what, in order, where no engine is started."""
    found: list[tuple[str, str]] = []

    @contextmanager
    def started(arms: Mapping[str, Any]) -> Iterator[Mapping[str, Pipe]]:
        yield {name: Pipe(name, found) for name in arms}

    monkeypatch.setattr(engine_pairs, "_started", started)
    return found


def between(measures: Mapping[str, Any], repeats: int) -> Found:
    config = EngineConfig("m")
    return compete({"a": config, "b": config}, measures, repeats)


def test_arms_take_turns_and_the_first_one_is_not_kept(order: list[tuple[str, str]]) -> None:
    found = between({"x": place, "y": place}, 2)
    assert order == [(arm, f"{label} {n}") for label in "xy" for n in range(3) for arm in "ab"]
    assert found == {
        "a": {"turn": [1.0, 2.0, 1.0, 2.0]},
        "b": {"turn": [1.0, 2.0, 1.0, 2.0], "ours": [-1.0, -2.0, -1.0, -2.0]},
    }


def test_an_error_of_an_engine_is_raised_and_nobody_is_asked_again(
    order: list[tuple[str, str]],
) -> None:
    with pytest.raises(ConfigError, match="a cannot serve x 0"):
        between({"x": refused}, 2)
    assert order == [("a", "x 0")]


@pytest.mark.parametrize("end", [gone, reset])
def test_an_engine_that_is_gone_is_named(order: list[tuple[str, str]], end: Any) -> None:
    with pytest.raises(EngineError, match="a: the engine's process ended"):
        between({"x": end}, 2)


def test_two_real_engines_are_up_at_once_and_end(
    config: EngineConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = replace(config, stock=True, algorithm="prefix")
    measures = {"short": partial(ttft, chunks=1), "long": partial(ttft, chunks=2)}
    found = compete({"stock": stock, "picbench": config}, measures, 2)
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
        compete({"bad": wrong, "good": config}, {}, 1)


def test_what_is_timed_has_its_chunks_cached_and_nothing_else(config: EngineConfig) -> None:
    """A question of 80 tokens is new, and what an arm recomputes of its chunks."""
    with Engine(config) as engine:
        heard = EvictionListener(engine)
        for turn in range(2):
            ttft(heard, f"2 chunks {turn}", chunks=2)  # type: ignore[arg-type]
    timed = heard.results[1::2]
    assert [result.hits.prefix for result in timed] == [0] * 2 * len(ARMS)
    assert all(result.counts.compiled == 0 for result in timed)
    assert all(r.counts.reused + r.counts.linked + 80 == r.counts.prompt for r in timed)
    assert [result.counts.linked > 0 for result in timed[:4]] == [False, True, True, True]


def test_stock_vllm_finds_nothing_of_a_prompt_in_another_order(config: EngineConfig) -> None:
    with Engine(replace(config, stock=True, algorithm="prefix")) as engine:
        heard = EvictionListener(engine)
        for turn in range(3):
            ttft(heard, f"2 chunks {turn}", chunks=2)  # type: ignore[arg-type]
    assert [result.counts.reused for result in heard.results] == [0] * 6


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

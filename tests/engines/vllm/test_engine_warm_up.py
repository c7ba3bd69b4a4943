"""What an engine does before it is measured: requests that leave no trace."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.engines.vllm.device import CPU, find

pytestmark = pytest.mark.engine


@pytest.fixture
def config(llama: Path) -> EngineConfig:
    if find("auto") is not CPU:
        pytest.skip("this vLLM does not run on CPU")
    return EngineConfig(str(llama), device="cpu", dtype="float32", context=1200, kv_blocks=300)


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
    assert (again.counts.compile_work, again.hits.prefix) == (0 if stock else 600, 0)
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

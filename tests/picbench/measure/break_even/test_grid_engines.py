"""Engines of a grid: what they are to be, and what they tell each other; the servers are fakes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any

import pytest

from picbench.engines.config import EngineConfig
from picbench.experiments import grid as grid_engines
from picbench.experiments.grid import CellWork, ServedCells, open_engines
from picbench.experiments.grid_plan import GRIDS


class Server:
    """Notes the shortest loop that others have met, and has met one of its own."""

    def __init__(self, own: float) -> None:
        self.own, self.told = own, list[float | None]()

    def call(self, function: Callable[[Any], Any]) -> ServedCells:
        _, shortest = function.args  # type: ignore[attr-defined]
        self.told.append(shortest)
        return ServedCells([], None if shortest is None else min(shortest, self.own))


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Server]:
    found = {"picbench": Server(2.0), "stock": Server(1.0)}

    @contextmanager
    def started(
        configs: Mapping[str, EngineConfig],
    ) -> Iterator[tuple[dict[str, Server], dict[str, dict[str, object]]]]:
        assert all(config.kv_blocks for config in configs.values())
        yield (
            {name: found[name] for name in configs},
            {name: {"stock": config.stock} for name, config in configs.items()},
        )

    monkeypatch.setattr(grid_engines, "started_engines", started)
    return found


def test_stock_vllm_serves_what_it_can_on_a_gpu(servers: dict[str, Server]) -> None:
    for device, stock in (("cuda", {"full", "prefix", "reorder"}), ("cpu", set())):
        config = EngineConfig(model="testbed", device=device)
        with open_engines(config, GRIDS[device]) as (engines, described):
            assert {arm for arm in described if engines.is_stock(arm)} == stock
            assert {arm for arm, own in described.items() if own["stock"]} == stock


def test_engines_hold_cores_against_the_quietest_of_all(servers: dict[str, Server]) -> None:
    config = EngineConfig(model="testbed", device="cuda")
    with open_engines(config, GRIDS["cuda"]) as (engines, _):
        for arm in ("mepic", "prefix", "naive", "full"):
            assert engines.serve(CellWork(arm, (), 1)) == []
    assert servers["picbench"].told == [inf, 1.0]
    assert servers["stock"].told == [2.0, 1.0]


def test_a_cpus_cores_are_taken_as_they_are(servers: dict[str, Server]) -> None:
    config = EngineConfig(model="testbed", device="cpu")
    with open_engines(config, GRIDS["cpu"]) as (engines, _):
        assert engines.serve(CellWork("mepic", (), 1)) == []
        assert engines.serve(CellWork("full", (), 1)) == []
    assert servers["picbench"].told == [None, None]

"""A workload is loaded once for all cells that send the same requests."""

from pathlib import Path
from typing import Any

import pytest
from sweep_fakes import SweepHarness

from picbench.experiments.sweep import UNREAD, SharedWorkloads
from picbench.run.workload import load_workload
from picbench.settings import RunConfig, parse_config


@pytest.fixture
def harness(tmp_path: Path) -> SweepHarness:
    return SweepHarness(model=tmp_path)


def config(**settings: Any) -> RunConfig:
    return parse_config({"algo": ("full",), "dataset": "fake", **settings})


def test_cells_with_the_same_requests_load_them_once(harness: SweepHarness) -> None:
    cells = [config(kv_blocks=40, output="a"), config(kv_blocks=60, output="b"), config(limit=2)]
    shared = SharedWorkloads(harness.load, [*cells, *cells])
    found = [shared.load(cell) for cell in (*cells, *cells)]
    assert harness.loads == 2
    assert found[0] is found[1] is found[3] is found[4]
    assert [len(workload.samples) for workload in found[:3]] == [6, 6, 2]


def test_a_workload_is_let_go_after_its_last_use(harness: SweepHarness) -> None:
    shared = SharedWorkloads(harness.load, [config()] * 2)
    for _ in range(3):
        shared.load(config())
    assert harness.loads == 2


def test_what_there_is_no_room_for_is_loaded_again(harness: SweepHarness) -> None:
    small, large = config(limit=1), config(limit=6)
    shared = SharedWorkloads(harness.load, [small, large] * 2, room=3 * 36)
    for cell in (small, large, small, large):
        shared.load(cell)
    assert harness.loads == 3


def test_no_workload_depends_on_what_is_not_decisive(tmp_path: Path) -> None:
    """Loading asks for none of these settings."""
    read: set[str] = set()

    class Asked(RunConfig):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    asked = Asked(algo=("full", "mepic"), dataset="musique", limit=1, rate=2.0)
    load_workload(asked)
    assert {"dataset", "limit", "algo", "seed", "rate"} <= read
    assert read & UNREAD == set()
    assert set(RunConfig.model_fields) > UNREAD

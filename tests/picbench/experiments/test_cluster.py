"""Sweeps on two local Ray nodes: what comes back, and what a lost node costs."""

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slow_cells import slow_services
from sweep_fakes import make_cells

from picbench.errors import ConfigError
from picbench.experiments.cluster import pack, run_on_ray, unpack
from picbench.experiments.sweep import SweepCell, run_sweep
from picbench.run.schedule import Progress
from picbench.store.records import SampleRow

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

GRID = "{seed: [0, 1, 2, 3], limit: [2, 4]}"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that runs nothing, and two nodes of one core."""
    here = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parent}")
    small = {"object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    made.lost = [made.add_node(num_cpus=1, **small) for _ in range(2)][-1]
    yield made
    made.shutdown()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """One for the model, one for the cells that begin."""
    made = tmp_path / "model", tmp_path / "begun"
    for folder in made:
        folder.mkdir()
    return made


def found(cell: SweepCell) -> list[SampleRow]:
    """The rows of a cell, whose times are the fakes' own."""
    assert cell.run is not None
    return list(cell.run.rows)


def test_a_sweep_is_complete_though_a_node_is_lost(
    cluster: Any, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    cells = make_cells(tmp_path, GRID)
    said = list[str]()
    for number, cell in enumerate(
        run_on_ray(cells, cluster.address, slow_services(*folders, 1.5), said.append)
    ):
        assert cell.status == "complete", cell.reason
        if number == 1:
            while len(list(folders[1].iterdir())) < 4:
                time.sleep(0.01)
            cluster.remove_node(cluster.lost, allow_graceful=False)
    assert said[-1].startswith("8 of 8 cells: ")
    # One was under way on the node that was lost.
    assert len(list(folders[1].iterdir())) == 9

    (tmp_path / "here").mkdir()
    local = make_cells(tmp_path / "here", GRID)
    services = slow_services(*folders, 0.0)
    for cell in local:
        cell.plan(services)
    for cell, other in zip(
        run_sweep(local, services, lambda total: Progress(total, None), said.append),
        cells,
        strict=True,
    ):
        assert found(other) == found(cell)
        assert other.run is not None
        assert other.run.manifest["config"]["output"] == str(other.path)


def test_a_cell_that_fails_says_why_and_stops_no_other(
    cluster: Any, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    cells = make_cells(tmp_path, "{tensor_parallel: [1, 3]}")
    ended = list(run_on_ray(cells, cluster.address, slow_services(*folders, 0.0), [].append))
    assert {cell.settings["tensor_parallel"]: cell.status for cell in ended} == {
        1: "complete",
        3: "failed",
    }
    assert "tensor_parallel" in (cells[1].reason or "")
    # What is complete is kept, and not run again.
    for cell in cells:
        cell.read()
    begun = len(list(folders[1].iterdir()))
    again = list(run_on_ray(cells[:1], cluster.address, slow_services(*folders, 0.0), [].append))
    assert [cell.status for cell in again] == ["complete"]
    assert len(list(folders[1].iterdir())) == begun


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:1", "ray://127.0.0.1:1", "ray://x:y"])
def test_a_cluster_that_is_not_there_is_named(tmp_path: Path, address: str) -> None:
    cells = make_cells(tmp_path, "{limit: [2]}")
    with pytest.raises(ConfigError, match="no such cluster"):
        list(run_on_ray(cells, address, slow_services(tmp_path, tmp_path, 0.0), [].append))


def test_a_packed_directory_is_the_same_elsewhere(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    [cell] = make_cells(tmp_path, "{limit: [2]}")
    services = slow_services(*folders, 0.0)
    cell.plan(services)
    list(run_sweep([cell], services, lambda total: Progress(total, None), [].append))
    unpack(pack(cell.path), tmp_path / "there")
    [there] = make_cells(tmp_path, "{limit: [2]}")
    there.config = cell.config.model_copy(update={"output": str(tmp_path / "there")})
    there.read()
    assert found(there) == found(cell)
    assert pack(tmp_path / "nothing") == b""
    unpack(b"", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()

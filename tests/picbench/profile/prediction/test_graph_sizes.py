"""Which CUDA graphs engines of a grid had, and what to know where others had other ones."""

from dataclasses import replace

import pytest

from picbench.profile.costs import captured, graph_sizes, graph_warning, same_graphs
from picbench.profile.grid import GridFacts, packaged_grids, read_grid

STOCK, LINKED = ("full", "prefix", "reorder"), ("mepic", "naive")
CPU = GridFacts("a host", {"driver": "none"}, "m", "float32", 1024, 100, 4, "")
UNKNOWN = replace(CPU, hardware="a GPU", versions={"driver": "580"})


def facts(stock: int, linked: int) -> GridFacts:
    sizes = dict.fromkeys(STOCK, stock) | dict.fromkeys(LINKED, linked)
    return replace(UNKNOWN, graph_tokens=sizes)


@pytest.mark.parametrize(
    ("grid", "sizes", "said"),
    [
        (facts(512, 1024), (512, 1024), "512 (full, prefix, reorder) and 1,024 (mepic, naive)"),
        (facts(128, 128), (128, 128), "CUDA graphs of up to 128 tokens"),
        (facts(0, 0), (0, 0), "no CUDA graphs"),
        (UNKNOWN, (128, 128), "does not say"),
        (CPU, (0, 0), "no CUDA graphs"),
    ],
    ids=["of either kind", "the same", "eager", "not recorded", "CPU"],
)
def test_each_kind_of_arms_has_graphs_of_its_own(
    grid: GridFacts, sizes: tuple[int, int], said: str
) -> None:
    assert (captured(grid, linked=False), captured(grid, linked=True)) == sizes
    assert said in graph_sizes(grid)


@pytest.mark.parametrize(
    ("measured", "grid", "same"),
    [
        (facts(512, 1024), facts(512, 1024), True),
        (facts(512, 1024), replace(UNKNOWN, graph_tokens={"mepic": 1024}), True),
        (facts(512, 1024), facts(512, 512), False),
        (facts(512, 1024), UNKNOWN, False),
        (UNKNOWN, UNKNOWN, True),
        (CPU, replace(CPU, graph_tokens={"mepic": 0}), True),
    ],
    ids=["same", "arms in common", "other", "one not recorded", "neither recorded", "CPU"],
)
def test_other_graphs_are_warned_of(measured: GridFacts, grid: GridFacts, same: bool) -> None:
    assert same_graphs(measured, grid) is same_graphs(grid, measured) is same
    said = graph_warning(measured, grid, "--calibration")
    assert (said is None) is same
    if said:
        assert said.startswith("--calibration: CUDA graphs")
        assert "--grid: CUDA graphs" in said
        assert "\n" not in said


def test_the_packages_grids_say_what_they_had() -> None:
    grids = {name: read_grid(path).facts for name, path in packaged_grids().items()}
    assert captured(grids["h200-llama-3.1-8b"], linked=True) >= 128
    assert captured(grids["cpu-testbed"], linked=True) == 0
    assert all(each.graph_tokens for each in grids.values())

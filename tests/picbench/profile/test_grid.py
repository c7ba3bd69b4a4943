"""Grids as files, and which CUDA graphs their engines had."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from picbench.errors import ConfigError
from picbench.profile.grid import (
    ALONE,
    SCHEMA,
    ArmCell,
    GridFacts,
    GridPoint,
    MeasuredCell,
    MeasuredGrid,
    choose_calibration,
    choose_grid,
    packaged_grids,
    read_grid,
    write_grid,
)

FACTS = GridFacts(
    "a machine",
    {"vllm": "1"},
    "a model",
    "float32",
    1024,
    100,
    4,
    "shared",
    graph_tokens={"full": 512, "mepic": 1024},
)
POINT = GridPoint(
    reuse=0.5, chunks=2, chunk_tokens=48, corpus=24, load=ALONE, output=4, cache="cold"
)
ARM = ArmCell(
    requests=2,
    ttft_s=0.1,
    ttft_p95_s=0.2,
    requests_s=5.0,
    peak_blocks=7.5,
    prompt=144,
    computed=100,
    output=4,
)
GRID = MeasuredGrid(FACTS, [MeasuredCell(POINT, 0, {"full": ARM, "mepic": ARM}, 3.5)])


def test_a_grid_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_grid(tmp_path / "deep" / "grid.json", GRID)
    found = read_grid(tmp_path / "deep" / "grid.json")
    assert found == GRID
    assert found.arms == ("full", "mepic")
    assert "a machine" in found.about()
    assert "shared" in found.about()


def test_a_file_that_does_not_say_its_graphs_is_read(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    write_grid(path, GRID)
    document = json.loads(path.read_text())
    del document["facts"]["graph_tokens"]
    path.write_text(json.dumps(document | {"schema": 2}))
    found = read_grid(path)
    assert found.facts.graph_tokens is None
    assert found == MeasuredGrid(replace(FACTS, graph_tokens=None), GRID.cells)


def test_what_is_no_grid_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    for text, message in (
        ("[", "JSON"),
        ('{"schema": 0}', f"schema {SCHEMA}"),
        (f'{{"schema": {SCHEMA}, "cells": []}}', "facts"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_grid(path)
    with pytest.raises(ConfigError, match=r"grid\.json"):
        choose_grid("nothing")


def test_the_packages_grids_say_where_they_were_measured() -> None:
    assert choose_grid("none") is None
    for name, path in packaged_grids().items():
        grid = read_grid(path)
        assert grid.facts.hardware, name
        assert grid.facts.versions["vllm"], name
        assert len({cell.seed for cell in grid.cells}) >= 3, name
        assert grid.facts.graph_tokens, name
        graphs = grid.facts.captured(linked=True)
        assert graphs == 0 if name.startswith("cpu") else graphs >= 128, name


def test_a_gpus_grid_is_the_default() -> None:
    grid = choose_grid(None)
    assert grid is not None
    assert grid == choose_grid("h200-llama-3.1-8b")
    assert grid.facts.hardware == "NVIDIA H200"


def test_errors_name_what_was_asked_for(tmp_path: Path) -> None:
    grid = MeasuredGrid(FACTS, ())
    with pytest.raises(ConfigError, match="`calibration` nowhere: No such file") as caught:
        choose_calibration("nowhere", grid)
    assert caught.value.hint == "name a grid.json"
    (tmp_path / "other").write_text("{}")
    with pytest.raises(ConfigError, match=r"`calibration` .*: no grid of schema"):
        choose_calibration(str(tmp_path / "other"), grid)
    with pytest.raises(ConfigError, match="`grid` nowhere") as caught:
        choose_grid("nowhere")
    assert "cpu-testbed" in str(caught.value.hint)


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
    assert (grid.captured(linked=False), grid.captured(linked=True)) == sizes
    assert said in grid.graphs()


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
    assert measured.same_graphs(grid) is grid.same_graphs(measured) is same
    said = measured.graph_warning(grid, "--calibration")
    assert (said is None) is same
    if said:
        assert said.startswith("--calibration: CUDA graphs")
        assert "--grid: CUDA graphs" in said
        assert "\n" not in said

"""Grids as files."""

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


def test_a_gpus_grid_is_the_default() -> None:
    grid = choose_grid(None)
    assert grid is not None
    assert grid == choose_grid("h200-llama-3.1-8b")
    assert grid.facts.hardware == "NVIDIA H200"
    assert {cell.point.cache for cell in grid.cells} == {"cold", "warm"}


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

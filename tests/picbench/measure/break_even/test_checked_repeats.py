"""The file of repeats: what is read is what was written, and others are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from picbench.errors import ConfigError, IncomparableRuns
from picbench.experiments.profile_check import (
    CheckedRepeat,
    CheckedRepeats,
    CheckedServing,
    add_repeat,
    read_own_repeats,
    read_repeats,
)
from picbench.profile.grid import ALONE, ArmCell, GridFacts, GridPoint

FACTS = GridFacts("a machine", {"commit": "abc"}, "m", "float32", 1 << 20, 100, 4, "")


def repeat(number: int, ttft: float) -> CheckedRepeat:
    cell = ArmCell(
        requests=4,
        ttft_s=ttft,
        ttft_p95_s=ttft,
        requests_s=1 / ttft,
        peak_blocks=10,
        prompt=100,
        computed=80,
        output=4,
        compiled=3.0,
        middle=(80.0, 3.0),
    )
    point = GridPoint(
        reuse=0.5, chunks=2, chunk_tokens=64, corpus=24, load=ALONE, output=4, cache="cold"
    )
    serving = CheckedServing(cell, replace(cell, output=5), ((point, cell), (point, cell)))
    return CheckedRepeat(number, {"popular": {"mepic": serving}})


def test_repeats_are_read_in_order_as_written(tmp_path: Path) -> None:
    path = tmp_path / "made" / "profile-cells.json"
    assert read_repeats(path) is None
    assert read_own_repeats(path, FACTS) == CheckedRepeats(FACTS, ())
    later, sooner = repeat(2, 0.3), repeat(0, 0.1)
    add_repeat(path, FACTS, later)
    assert add_repeat(path, FACTS, sooner).repeats == [sooner, later]
    assert read_own_repeats(path, replace(FACTS, caveat="other")).repeats == [sooner, later]


def test_a_repeat_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "profile-cells.json"
    first = repeat(0, 0.1)
    add_repeat(path, FACTS, first)
    assert add_repeat(path, FACTS, repeat(0, 0.2)).repeats == [first]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (replace(FACTS, dtype="bfloat16"), "dtype float32, here is bfloat16"),
        (replace(FACTS, versions={"commit": "def"}), "commit abc, here is def"),
        (replace(FACTS, versions={"commit": "abc", "torch": "2"}), "torch None, here is 2"),
        (replace(FACTS, graph_tokens={"full": 512}), "graph_tokens None, here is"),
    ],
)
def test_other_engines_are_refused(tmp_path: Path, other: GridFacts, says: str) -> None:
    path = tmp_path / "profile-cells.json"
    add_repeat(path, FACTS, repeat(0, 0.1))
    with pytest.raises(IncomparableRuns, match=says):
        add_repeat(path, other, repeat(1, 0.1))
    assert len(read_own_repeats(path, FACTS).repeats) == 1


def test_other_traces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile-cells.json"
    add_repeat(path, FACTS, repeat(0, 0.1), 5)
    with pytest.raises(IncomparableRuns, match="drawn with seed 5, not 77"):
        add_repeat(path, FACTS, repeat(1, 0.1))
    assert len(add_repeat(path, FACTS, repeat(1, 0.1), 5).repeats) == 2
    older = json.loads(path.read_text())
    del older["seed"]
    path.write_text(json.dumps(older))
    assert len(read_own_repeats(path, FACTS).repeats) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1, "repeats": []}', "{"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile-cells.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"profile-cells.json: ."):
        read_repeats(path)


def test_a_repeat_without_its_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile-cells.json"
    add_repeat(path, FACTS, repeat(0, 0.1))
    found = json.loads(path.read_text())
    del found["repeats"][0]["traces"]["popular"]["mepic"]["alone"]["ttft_s"]
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=r"repeats.0.traces.popular.mepic.alone.ttft_s"):
        read_repeats(path)

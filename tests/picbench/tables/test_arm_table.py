"""No line is too short for the numbers of a run."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from harness_fakes import Harness, make_sample, run_fakes
from rich.console import Console

from picbench.metrics import metrics_shown
from picbench.store.reader import read_run
from picbench.store.summary import ArmSummary
from picbench.tables.run import run_table

LONG = "mepic:anchored=on:context=document"


@pytest.fixture
def arms(tmp_path: Path) -> dict[str, ArmSummary]:
    path = run_fakes(Harness([make_sample(0)]), tmp_path / "run", "full", "mepic")
    found = dict(read_run(path).summary)
    simulated = replace(found["full"], provenance="simulated")
    return found | {LONG: found["mepic"], "epic:k=16": found["mepic"], "sim": simulated}


def printed(arms: dict[str, ArmSummary], width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(run_table(arms))
    assert all(len(line) <= width for line in stream.getvalue().splitlines())
    return stream.getvalue()


@pytest.mark.parametrize("width", [50, 60, 80, 100, 120, 140])
def test_names_and_numbers_are_whole_in_lines_of_any_length(
    arms: dict[str, ArmSummary], width: int
) -> None:
    text = printed(arms, width)
    assert "…" not in text
    cells = [cell.strip() for cell in re.split("[│┃\\n]", text)]
    for metric in metrics_shown(arms.values()):
        for arm in arms.values():
            assert metric.text(arm) in cells
    for name in ("full", "epic:k=16"):
        assert name in cells


def test_no_line_is_so_short_that_a_simulated_arm_does_not_say_so(
    arms: dict[str, ArmSummary],
) -> None:
    cut = [width for width in range(50, 141) if "(simulated)" not in printed(arms, width)]
    assert cut == []


def test_an_arm_is_a_row_where_there_is_room(arms: dict[str, ArmSummary]) -> None:
    wide, narrow = printed(arms, 140).splitlines(), printed(arms, 80).splitlines()
    assert sum(line.startswith("│ full ") for line in wide) == 1
    assert sum(line.startswith("│ TTFT p50 ms ") for line in narrow) >= 1

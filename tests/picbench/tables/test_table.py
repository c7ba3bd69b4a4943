"""Tables in Markdown and on a terminal; no line is too short for the numbers of a run."""

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness_fakes import Harness, make_sample, run_fakes
from rich.console import Console

from picbench.cli.guard import PIPE_CLOSED
from picbench.store.reader import read_run
from picbench.store.summary import ArmSummary
from picbench.tables.metrics import metrics_shown
from picbench.tables.run import run_table
from picbench.tables.table import table


@pytest.mark.parametrize(
    ("right", "rule"),
    [(None, "| --- | --- |"), (0, "| ---: | ---: |"), (1, "| --- | ---: |")],
)
def test_a_row_is_a_line_and_numbers_are_to_the_right(right: int | None, rule: str) -> None:
    page = table(("arm", "ms"), [["mepic", "1.0"], ["full", "2.0"]], right=right)
    assert page.splitlines() == ["| arm | ms |", rule, "| mepic | 1.0 |", "| full | 2.0 |"]


def test_a_command_whose_reader_went_away_is_no_regression() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stream:
        command = [sys.executable, "-P", "-m", "picbench", "explain", "mepic"]
        ended = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (PIPE_CLOSED, b"")


LONG = "mepic:anchor=head:context=document"


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

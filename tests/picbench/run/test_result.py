"""What a run prints: progress on a clock that the test owns, and the last line."""

import io
import json
from pathlib import Path

import pytest
from harness_fakes import Harness, make_sample, run_fakes

from picbench.run.result import status_line
from picbench.run.schedule import Progress, minutes
from picbench.store.writer import SUMMARY


def spoken(times: list[float], total: int, *done: int) -> list[str]:
    """What is said when one request ends at each time after the start; `done` ended before."""
    stream = io.StringIO()
    clock = iter([0.0, *(0.0 for _ in done), *times])
    progress = Progress(total, stream, lambda: next(clock))
    for before in done:
        progress.begin(before)
    for _ in times:
        progress.advance("mepic", 1)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("seconds", "total", "done", "said"),
    [
        (20.0, 10, [0], "1/10 requests, last by mepic, 0.05 requests/s, 3:00 left"),
        # Requests of earlier attempts do not count for the rate.
        (20.0, 10, [7], "8/10 requests, last by mepic, 0.05 requests/s, 0:40 left"),
        (20.0, 10, [6, 1], "8/10 requests, last by mepic, 0.05 requests/s, 0:40 left"),
        (20.0, 1, [0], "1/1 requests, last by mepic, 0.05 requests/s, took 0:20"),
        (0.0, 1, [0], "1/1 requests, last by mepic"),
    ],
)
def test_rate_and_time_left(seconds: float, total: int, done: list[int], said: str) -> None:
    assert spoken([seconds], total, *done) == [f"picbench: {said}"]


def test_lines_come_now_and_then_and_at_the_end() -> None:
    lines = spoken([float(second) for second in range(1, 26)], 25, 0)
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(1, None)
    progress.say("mepic is up")
    progress.begin()
    progress.advance("mepic", 1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3600, "60:00")])
def test_minutes(seconds: float, text: str) -> None:
    assert minutes(seconds) == text


def test_the_last_line_has_scores_of_real_weights_and_no_arms_without_results(
    tmp_path: Path,
) -> None:
    harness = Harness([make_sample(n) for n in range(2)], weights="real")
    folder = run_fakes(harness, tmp_path / "run", "full", "mepic")
    line = status_line(folder, 0)
    assert "\n" not in line
    assert json.loads(line)["arms"]["mepic"]["score"] == 1.0
    (folder / SUMMARY).unlink()
    assert json.loads(status_line(folder, 130))["arms"] == {}

"""What a run prints: progress on a clock that the test owns, and the last line."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness_fakes import Harness, make_sample, run_fakes

from picbench.run.result import status_line
from picbench.run.schedule import PlainProgress, is_live, minutes, open_progress
from picbench.store.writer import SUMMARY


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def spoken(times: list[float], total: int, done: int = 0) -> list[str]:
    """What is said when one request ends at each time after the start; `done` ended before."""
    stream = io.StringIO()
    clock: Iterator[float] = iter([0.0, 0.0, *times])
    progress = PlainProgress(total, stream, lambda: next(clock))
    progress.begin(done)
    for _ in times:
        progress.advance("mepic", 1)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("seconds", "total", "done", "said"),
    [
        (20.0, 10, 0, "1/10 requests, last by mepic, 0.05 requests/s, 3:00 left"),
        # Requests of an earlier attempt do not count for the rate.
        (20.0, 10, 7, "8/10 requests, last by mepic, 0.05 requests/s, 0:40 left"),
        (20.0, 1, 0, "1/1 requests, last by mepic, 0.05 requests/s, took 0:20"),
        (0.0, 1, 0, "1/1 requests, last by mepic"),
    ],
)
def test_rate_and_time_left(seconds: float, total: int, done: int, said: str) -> None:
    assert spoken([seconds], total, done) == [f"picbench: {said}"]


def test_requests_of_earlier_runs_count_as_done() -> None:
    stream = io.StringIO()
    clock = iter([0.0, 0.0, 1.0, 2.0, 22.0])
    progress = PlainProgress(10, stream, lambda: next(clock))
    progress.begin(1)
    progress.advance("mepic", 5)
    progress.begin(1)
    progress.advance("mepic", 1)
    assert (
        stream.getvalue() == "picbench: 8/10 requests, last by mepic, 0.05 requests/s, 0:40 left\n"
    )


def test_lines_come_now_and_then_and_at_the_end() -> None:
    lines = spoken([float(second) for second in range(1, 26)], total=25)
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]


@pytest.mark.parametrize("variable", ["CI", "NO_COLOR"])
def test_no_bar_where_none_is_wanted(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert is_live(Terminal())
    assert not is_live(io.StringIO())
    monkeypatch.setenv(variable, "1")
    assert not is_live(Terminal())


@pytest.mark.parametrize(("done", "shown"), [(0, "1/9"), (7, "8/9")])
def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, done: int, shown: str) -> None:
    stream = Terminal()
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    with open_progress(9) as progress:
        progress.say("mepic is up")
        progress.begin(done)
        progress.advance("mepic", 1)
    assert "mepic is up" in stream.getvalue()
    assert shown in stream.getvalue()


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress(1, quiet=True) as progress:
        progress.say("mepic is up")
        progress.begin()
        progress.advance("mepic", 1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3600, "60:00")])
def test_minutes(seconds: float, text: str) -> None:
    assert minutes(seconds) == text


def test_scores_of_real_weights_are_told(tmp_path: Path) -> None:
    harness = Harness([make_sample(n) for n in range(2)], weights="real")
    line = status_line(run_fakes(harness, tmp_path / "run", "full", "mepic"), 0)
    assert "\n" not in line
    assert json.loads(line)["arms"]["mepic"]["score"] == 1.0


def test_a_run_without_results_has_no_arms(tmp_path: Path) -> None:
    folder = run_fakes(Harness([make_sample(0)]), tmp_path / "run", "mepic")
    (folder / SUMMARY).unlink()
    assert json.loads(status_line(folder, 130))["arms"] == {}

"""Progress lines, on a clock that the test owns."""

import io
from collections.abc import Iterator

import pytest

from picbench.run.progress import LaterProgress, PlainProgress, is_live, minutes, open_progress


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


def test_rate_and_time_left() -> None:
    assert spoken([20.0], total=10) == [
        "picbench: 1/10 requests, last by mepic, 0.05 requests/s, 3:00 left"
    ]


def test_requests_of_an_earlier_attempt_do_not_count_for_the_rate() -> None:
    assert spoken([20.0], total=10, done=7) == [
        "picbench: 8/10 requests, last by mepic, 0.05 requests/s, 0:40 left"
    ]


def test_requests_of_earlier_runs_count_as_done() -> None:
    stream = io.StringIO()
    clock = iter([0.0, 0.0, 0.0, 20.0])
    whole = PlainProgress(10, stream, lambda: next(clock))
    for before in (0, 6):
        LaterProgress(whole, before).begin(1)
    LaterProgress(whole, 6).advance("mepic", 1)
    assert stream.getvalue().startswith("picbench: 8/10 requests, last by mepic, 0.05 requests/s")


def test_the_last_line_tells_the_whole_time() -> None:
    assert spoken([20.0], total=1) == [
        "picbench: 1/1 requests, last by mepic, 0.05 requests/s, took 0:20"
    ]


def test_lines_come_now_and_then_and_at_the_end() -> None:
    lines = spoken([float(second) for second in range(1, 26)], total=25)
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]


def test_the_first_instant_has_no_rate() -> None:
    assert spoken([0.0], total=1) == ["picbench: 1/1 requests, last by mepic"]


@pytest.mark.parametrize("variable", ["CI", "NO_COLOR"])
def test_no_bar_where_none_is_wanted(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert is_live(Terminal())
    assert not is_live(io.StringIO())
    monkeypatch.setenv(variable, "1")
    assert not is_live(Terminal())


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    with open_progress(3) as progress:
        progress.say("mepic is up")
        progress.begin()
        progress.advance("mepic", 3)
    assert "mepic is up" in stream.getvalue()
    assert "3/3" in stream.getvalue()


def test_a_bar_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    with open_progress(9) as progress:
        progress.begin(7)
        progress.advance("mepic", 1)
    assert "8/9" in stream.getvalue()


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress(1, quiet=True) as progress:
        progress.say("mepic is up")
        progress.begin()
        progress.advance("mepic", 1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3600, "60:00")])
def test_minutes(seconds: float, text: str) -> None:
    assert minutes(seconds) == text

"""What captions say of the points above them, and blocks at the peak that tables are made of."""

from pathlib import Path

import pytest

from picbench.papers.data import ExperimentData, PointArm, PointData
from picbench.papers.judge import Evidence
from picbench.papers.page import draw
from picbench.papers.settings import Drawing, Published

CONDITIONS = {"caption": "here", "model": "no weights", "hardware": "a machine", "commit": "abc"}
PUBLISHED = Published(paper="a paper", hardware="a machine", model="a model", note="")
TIME = Drawing(name="fig", kind="lines", metric="time", label="time, s")


def points_of(requests: dict[str, int]) -> ExperimentData:
    """Two seeds of a point at each of these places, with so many requests."""
    points = tuple(
        PointData(label, seed, {"requests": count}, {"mepic": PointArm({"time": float(count)})})
        for label, count in requests.items()
        for seed in (1, 2)
    )
    return ExperimentData("mepic", "rate", "cpu", "arrivals per second", CONDITIONS, points)


def drawn(folder: Path, drawing: Drawing, requests: dict[str, int]) -> list[str]:
    evidence = Evidence({("cpu", "rate"): points_of(requests)}, {})
    return draw(drawing, "rate", evidence, PUBLISHED, folder)


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ({"5": 50, "15": 200, "50": 200}, "At 5: 50 requests, not 200."),
        ({"5": 200, "15": 200, "50": 200}, None),
        # The number is what varies.
        ({"200": 200, "400": 400}, None),
    ],
)
def test_points_of_fewer_requests_are_named(
    tmp_path: Path, requests: dict[str, int], said: str | None
) -> None:
    assert drawn(tmp_path, TIME, requests) == ["fig-cpu"]
    found = " ".join((tmp_path / "fig-cpu.svg").read_text().split())
    assert "Mean of 2 seeds, bars: sd." in found
    assert (said in found) if said else ("requests, not" not in found)


@pytest.mark.parametrize(
    ("labels", "order"),
    [
        (["1024", "64", "256"], ["64", "256", "1024"]),
        (["1", "0", "0 at 8/s"], ["1", "0", "0 at 8/s"]),
    ],
)
def test_lines_pass_from_number_to_number(labels: list[str], order: list[str]) -> None:
    assert points_of(dict.fromkeys(labels, 4)).labels == order


def test_only_the_points_of_a_drawing_are_drawn(tmp_path: Path) -> None:
    requests = dict.fromkeys(("0", "1", "0 at 8/s"), 4)
    two = TIME.model_copy(update={"points": ["0", "1"]})
    assert drawn(tmp_path, two, requests) == ["fig-cpu"]
    assert "8/s" not in (tmp_path / "fig-cpu.svg").read_text()
    nowhere = TIME.model_copy(update={"name": "none", "points": ["2"]})
    assert drawn(tmp_path, nowhere, requests) == []
    assert not list(tmp_path.glob("none*"))

"""What captions say of the points above them."""

from pathlib import Path

import pytest

from picbench.papers.data import ExperimentData, PointArm, PointData
from picbench.papers.drawings import draw
from picbench.papers.judge import Evidence
from picbench.papers.settings import Drawing, Published

CONDITIONS = {"caption": "here", "model": "no weights", "hardware": "a machine", "commit": "abc"}
PUBLISHED = Published("a paper", "a machine", "a model", {})


def caption(folder: Path, requests: dict[str, int]) -> str:
    """All words of a drawing of points with these numbers of requests."""
    points = tuple(
        PointData(label, seed, {"requests": count}, {"mepic": PointArm({"time": float(count)})})
        for label, count in requests.items()
        for seed in (1, 2)
    )
    data = ExperimentData("mepic", "rate", "cpu", "arrivals per second", CONDITIONS, points)
    drawing = Drawing(name="fig", kind="lines", metric="time", label="time, s")
    evidence = Evidence({("cpu", "rate"): data}, {})
    assert draw(drawing, "rate", evidence, PUBLISHED, folder) == ["fig-cpu"]
    return " ".join((folder / "fig-cpu.svg").read_text().split())


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
    found = caption(tmp_path, requests)
    assert "Mean of 2 seeds, bars: sd." in found
    assert (said in found) if said else ("requests, not" not in found)


def points_of(labels: list[str]) -> ExperimentData:
    """A point at each of these places."""
    arms = {"mepic": PointArm({"time": 1.0})}
    points = tuple(PointData(label, 1, {"requests": 4}, arms) for label in labels)
    return ExperimentData("mepic", "rate", "cpu", "arrivals per second", CONDITIONS, points)


@pytest.mark.parametrize(
    ("labels", "order"),
    [
        (["1024", "64", "256"], ["64", "256", "1024"]),
        (["1", "0", "0 at 8/s"], ["1", "0", "0 at 8/s"]),
    ],
)
def test_lines_pass_from_number_to_number(labels: list[str], order: list[str]) -> None:
    assert points_of(labels).labels == order


def test_only_the_points_of_a_drawing_are_drawn(tmp_path: Path) -> None:
    evidence = Evidence({("cpu", "rate"): points_of(["0", "1", "0 at 8/s"])}, {})
    drawing = Drawing(name="fig", kind="lines", metric="time", label="time, s", points=["0", "1"])
    assert draw(drawing, "rate", evidence, PUBLISHED, tmp_path) == ["fig-cpu"]
    assert "8/s" not in (tmp_path / "fig-cpu.svg").read_text()
    nowhere = drawing.model_copy(update={"name": "none", "points": ["2"]})
    assert draw(nowhere, "rate", evidence, PUBLISHED, tmp_path) == []
    assert not list(tmp_path.glob("none*"))

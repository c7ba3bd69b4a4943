"""What captions say of the points above them."""

from pathlib import Path

import pytest

from picbench.papers.experiments.experiment_data import ExperimentData, PointArm, PointData
from picbench.papers.judging.evidence import Evidence
from picbench.papers.paper_drawings import draw
from picbench.papers.paper_settings import Drawing
from picbench.papers.published import Published

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

"""What captions say of the points above them, and the ledger that tables are made of."""

from pathlib import Path

import numpy as np
import pytest
from harness_fakes import make_snapshot
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.ledger import KINDS
from picbench.papers.data import ExperimentData, PointArm, PointData
from picbench.papers.judge import Evidence
from picbench.papers.page import draw
from picbench.papers.settings import Drawing, Published
from picbench.store.reader import HELD, Series, read_series
from picbench.store.writer import RunDirectory

EXACT = st.integers(0, 16 * 50).map(lambda slots: slots / 16)

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


def test_series_are_what_the_run_wrote(tmp_path: Path) -> None:
    snapshots = [make_snapshot(0, 0.0, 10), make_snapshot(1, 0.5, 25), make_snapshot(2, 1.0, 5)]
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_memory({"mepic": snapshots, "full": snapshots[:1]})
    series = read_series(tmp_path / "run" / "memory.parquet")
    assert list(series) == ["mepic", "full"]
    assert list(series["mepic"].time) == [0.0, 0.5, 1.0]
    assert list(series["mepic"].referenced) == [10, 25, 5]
    assert series["mepic"].at_peak() == dict.fromkeys(HELD, 0.0) | {"prompt": 25.0}


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(HELD, EXACT)), min_size=1, max_size=9))
def test_kinds_at_the_peak_sum_to_the_peak_exactly(steps: list[dict[str, float]]) -> None:
    pool = 16 * 50 * len(HELD)
    blocks = {kind: np.array([step.get(kind, 0.0) for step in steps]) for kind in KINDS}
    blocks["free"] = pool - sum(blocks[kind] for kind in HELD)
    series = Series(np.arange(len(steps), dtype=np.float64), blocks, pool)
    assert sum(series.at_peak().values()) == max(sum(step.values()) for step in steps)

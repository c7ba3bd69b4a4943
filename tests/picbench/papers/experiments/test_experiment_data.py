"""What is kept of an experiment says how much of it there is."""

import pytest

from picbench.papers.data import ExperimentData, PointArm, PointData


@pytest.mark.parametrize(
    ("seeds", "expected"), [((3, 3), "3"), ((3, 2), "2 to 3"), ((1,), "1"), ((1, 3, 2), "1 to 3")]
)
def test_points_with_fewer_seeds_are_not_said_to_have_all(
    seeds: tuple[int, ...], expected: str
) -> None:
    points = [
        PointData(str(label), seed, {}, {"naive": PointArm({"x": 1.0})})
        for label, count in enumerate(seeds)
        for seed in range(count)
    ]
    assert ExperimentData("mepic", "e", "cpu", "x", {}, points).repeated == expected

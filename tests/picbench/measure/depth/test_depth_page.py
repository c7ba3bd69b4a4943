"""The page about depth is what the program makes of the committed scores."""

import json
from pathlib import Path

import pytest

from picbench.errors import DataError
from picbench.experiments import depth as depth_page
from picbench.experiments.depth import CUTS
from picbench.figures import canvas as paper_canvas

RESULTS = Path(__file__).parents[4] / "results" / "testbed"


def test_a_section_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them, and one format: all take half a minute."""
    monkeypatch.setattr(depth_page, "CUTS", CUTS[-1:])
    monkeypatch.setattr(paper_canvas, "FORMATS", ("svg",))
    page = depth_page.write(RESULTS / "algorithms", tmp_path)
    [section] = [f"## {text}" for text in page.split("## ") if text.startswith(CUTS[-1].title)]
    assert section in (RESULTS / "depth.md").read_text(), "picbench measure algorithms depth"
    found = json.loads((tmp_path / "depth.json").read_text())
    committed = json.loads((RESULTS / "depth.json").read_text())
    assert found["cuts"] == {name: committed["cuts"][name] for name in found["cuts"]}
    assert found["needle"] == committed["needle"]
    for name in ("depth-needle", "depth-needle-heading"):
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000


def test_every_row_is_in_a_bin() -> None:
    found = json.loads((RESULTS / "depth.json").read_text())["cuts"]
    whole = {name: sum(one["rows"] for one in cut["bins"]) for name, cut in found.items()}
    assert list(whole) == [cut.name for cut in CUTS]
    assert list(whole.values()) == [200, 600, 600, 600, 200, 200]


def test_scores_without_an_arm_are_refused(tmp_path: Path) -> None:
    part = json.loads((RESULTS / "algorithms" / "testbed-needle.json").read_text())
    del part["arms"]["mepic"]
    (tmp_path / "testbed-needle.json").write_text(json.dumps(part))
    with pytest.raises(DataError, match="testbed-needle: no scores of mepic"):
        depth_page.write(tmp_path, tmp_path)

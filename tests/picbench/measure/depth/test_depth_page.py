"""The page about depth is what the program makes of the committed scores."""

import json
from pathlib import Path

from picbench.measure.depth import depth_page

RESULTS = Path(__file__).parents[4] / "results" / "testbed"


def test_the_page_is_current(tmp_path: Path) -> None:
    page = depth_page.write(RESULTS / "algorithms", tmp_path)
    assert page == (RESULTS / "depth.md").read_text(), "picbench measure algorithms depth"
    names = {path.name for path in RESULTS.glob("depth*")}
    assert {path.name for path in tmp_path.iterdir()} == names
    found = json.loads((tmp_path / "depth.json").read_text())
    whole = [sum(one["rows"] for one in cut["bins"]) for cut in found["cuts"].values()]
    assert whole == [200, 510, 510, 510, 200, 200]
    assert len(found["needle"]["score"]["naive"]) == 5

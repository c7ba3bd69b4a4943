"""Every figure of the results can be read in a paper's column."""

from pathlib import Path

import pytest
from printed_figure import check_printed

RESULTS = Path(__file__).parents[4] / "results"


@pytest.mark.parametrize("folder", ["break_even", "gpu", "papers", "testbed"])
def test_every_figure_is_made_for_print(folder: str) -> None:
    found = [path.with_suffix("") for path in sorted((RESULTS / folder).rglob("*.png"))]
    assert found
    for base in found:
        check_printed(base)


def test_no_figure_is_elsewhere() -> None:
    folders = {path.relative_to(RESULTS).parts[0] for path in RESULTS.rglob("*.png")}
    assert folders == {"break_even", "gpu", "papers", "testbed"}

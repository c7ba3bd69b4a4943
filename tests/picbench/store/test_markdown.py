"""Tables in Markdown."""

import pytest

from picbench.tables.table import table


@pytest.mark.parametrize(
    ("right", "rule"),
    [(None, "| --- | --- |"), (0, "| ---: | ---: |"), (1, "| --- | ---: |")],
)
def test_a_row_is_a_line_and_numbers_are_to_the_right(right: int | None, rule: str) -> None:
    page = table(("arm", "ms"), [["mepic", "1.0"], ["full", "2.0"]], right=right)
    assert page.splitlines() == ["| arm | ms |", rule, "| mepic | 1.0 |", "| full | 2.0 |"]

"""The block ledger as areas over time."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.ledger import KINDS
from picbench.report import charts as memory_chart
from picbench.report.charts import COLOURS, arm_class
from picbench.store.reader import Series

STYLE = Path(memory_chart.__file__).parent / "templates" / "report.css"


def series(prompt: list[int], pool: int = 100) -> Series:
    blocks = {kind: np.zeros(len(prompt)) for kind in KINDS}
    blocks["prompt"] = np.array(prompt, dtype=np.float64)
    blocks["chunk_idle"] = np.full(len(prompt), 3.0)
    blocks["free"] = pool - 3.0 - blocks["prompt"]
    return Series(np.arange(len(prompt), dtype=np.float64), blocks, pool)


@given(st.lists(st.integers(0, 97), min_size=1, max_size=60), st.integers(1, 10))
def test_few_columns_keep_the_peak_and_the_sum(prompt: list[int], count: int) -> None:
    times, blocks = memory_chart.columns(series(prompt), count)
    assert len(times) <= count
    assert times == sorted(times)
    assert max(blocks["prompt"]) == max(prompt)
    assert {sum(step) for step in zip(*blocks.values(), strict=True)} == {100.0}


def test_every_kind_and_arm_has_a_colour() -> None:
    style = STYLE.read_text()
    assert {*memory_chart.STACKED, "free"} == set(KINDS)
    assert [kind for kind in memory_chart.STACKED if f".k-{kind} {{" not in style] == []
    assert [n for n in range(COLOURS) if f".{arm_class(n)} {{" not in style] == []

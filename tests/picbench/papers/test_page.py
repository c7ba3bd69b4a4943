"""Tables of papers' pages, and the ledger that they are made of."""

from pathlib import Path

import numpy as np
import pytest
from harness_fakes import make_snapshot
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.ledger import KINDS, summarise
from picbench.papers.data import ExperimentData, PointData
from picbench.papers.page import workload_table
from picbench.papers.settings import Published
from picbench.store.reader import HELD, Series, read_series
from picbench.store.writer import RunDirectory

EXACT = st.integers(0, 16 * 50).map(lambda slots: slots / 16)


@pytest.mark.parametrize(
    ("tokens", "reuse", "like"),
    [
        ((1000, 2100), 0.52, "of about the same length and reuse"),
        ((1000, 2100), 0.6, "of about the same length but with reuse up to 10 points from its"),
        ((1500, 3000), 0.5, "of about the same reuse, but of 1.5 times its length"),
        ((1000, 3000), 0.5, "of about the same reuse, but of 1.0 to 1.5 times its length"),
        ((500, 2000), 0.48, "of about the same reuse, but of 0.5 to 1.0 times its length"),
        (
            (500, 2000),
            0.4,
            "of 0.5 to 1.0 times its length and with reuse up to 10 points from its",
        ),
    ],
)
def test_workloads_that_are_unlike_the_papers_say_so(
    tokens: tuple[int, int], reuse: float, like: str
) -> None:
    rows = {
        "short": {"tokens": 1000, "reuse_pct": 50.0},
        "long": {"tokens": 2000, "reuse_pct": 50.0},
    }
    published = Published("a paper", "a machine", "a model", {"table1": {"rows": rows}})
    facts = {"requests": 3, "reuse": reuse, "fresh_tokens": 10}
    points = tuple(
        PointData(label, 1, facts | {"mean_tokens": size}, {})
        for label, size in zip(("short", "long", "ours"), (*tokens, 7), strict=True)
    )
    data = ExperimentData("mepic", "workloads", "cuda", "workload", {}, points)
    table = workload_table(data, published)
    assert table.name == "table1-cuda"
    assert f"synthetic rows {like}." in table.notes[0]


def test_series_are_what_the_run_wrote(tmp_path: Path) -> None:
    snapshots = [make_snapshot(0, 0.0, 10), make_snapshot(1, 0.5, 25), make_snapshot(2, 1.0, 5)]
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_memory({"mepic": snapshots, "full": snapshots[:1]})
    series = read_series(tmp_path / "run" / "memory.parquet")
    assert list(series) == ["mepic", "full"]
    assert list(series["mepic"].time) == [0.0, 0.5, 1.0]
    assert list(series["mepic"].referenced) == [10, 25, 5]
    assert max(series["mepic"].resident) == summarise(snapshots).peak_resident
    assert series["mepic"].at_peak() == dict.fromkeys(HELD, 0.0) | {"prompt": 25.0}


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(HELD, EXACT)), min_size=1, max_size=9))
def test_kinds_at_the_peak_sum_to_the_peak_exactly(steps: list[dict[str, float]]) -> None:
    pool = 16 * 50 * len(HELD)
    blocks = {kind: np.array([step.get(kind, 0.0) for step in steps]) for kind in KINDS}
    blocks["free"] = pool - sum(blocks[kind] for kind in HELD)
    series = Series(np.arange(len(steps), dtype=np.float64), blocks, pool)
    assert sum(series.at_peak().values()) == max(sum(step.values()) for step in steps)

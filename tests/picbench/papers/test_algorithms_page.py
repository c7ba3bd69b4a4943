"""The page of all algorithms: made of parts alone, with intervals, the frontier and the orders."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness_fakes import GPU_FACTS
from printed_figure import check_printed

from picbench.errors import DataError
from picbench.papers.algorithms_page import ORDERS, PublishedOrder, judge, score_arms, scored_page
from picbench.papers.arm_scores import ArmRows, Case, ScoredPart, arms_of
from picbench.run.measurements import ScoredPage

OWN = "mepic:anchored=on:context=document"
COSTLY = "mepic:anchored=on"
FACTS = GPU_FACTS | {"dtype": "bfloat16", "eager": False, "seed": 0}


def part(dataset: str, own: float, *, model: str = "testbed", drop: bool = False) -> ScoredPart:
    """100 rows: full is right, naive half the time, ours as often as said."""
    shares = {"full": (1.0, 80), "naive": (0.5, 0), "mepic": (0.6, 32), OWN: (own, 32)}
    shares |= {COSTLY: (1.0, 33), "epic:k=16": (0.7, 16)}
    arms = {
        arm: ArmRows([1.0] * round(100 * s) + [0.0] * round(100 - 100 * s), [n] * 100, [50] * 100)
        for arm, (s, n) in shares.items()
    }
    return ScoredPart(Case(model, dataset, drop), 100, FACTS, arms, [110] * 100, [80] * 100)


def written(folder: Path, parts: Sequence[ScoredPart]) -> list[str]:
    for found in parts:
        found.write(folder / "parts")
    page = scored_page(ScoredPage(parts=folder / "parts", output=folder / "out")).page
    assert (folder / "out" / "algorithms.md").read_text() == page
    return page.splitlines()


def test_scores_are_beside_full_recomputes_on_the_same_rows() -> None:
    scores = score_arms(part("musique", 0.98))
    naive = scores["naive"]
    assert (naive.score, naive.rows, naive.linked, naive.share) == (0.5, 100, 0, 0.0)
    assert naive.difference.value == pytest.approx(-0.5)
    assert naive.difference.low == pytest.approx(-0.6, abs=0.02)
    assert str(naive.kept).startswith("0.500 [0.4")
    assert scores["full"].share == pytest.approx(1.0)
    assert str(scores["full"].kept) == "1.000 [1.000, 1.000]"


def test_the_page_has_tables_orders_and_the_frontier(tmp_path: Path) -> None:
    tuned = part("musique", 0.9, model="testbed:block")
    tuned.arms["block-attention"] = tuned.arms[OWN]
    lines = written(tmp_path, [part("needle", 0.98), part("musique", 1.0), tuned])
    assert "| arm | musique | needle |" in lines
    assert "| `naive` | 0.500 (0) | 0.500 (0) |" in lines
    [row] = [line for line in lines if line.startswith(f"| `{OWN}` | yes")]
    assert "0.980 [0.9" in row and row.endswith("(needle) | 1 of 2 | none | none |")
    [costly] = [line for line in lines if line.startswith(f"| `{COSTLY}` | no | 1.000 ")]
    assert costly.endswith("| 2 of 2 | none | musique, needle |")
    assert lines.index(row) < lines.index(costly)
    [order] = [line for line in lines if line.startswith("| mepic >= epic |")]
    assert "fails -0.100 [" in order
    assert any(line.startswith("- musique: `mepic` - `epic:k=16`: -0.100") for line in lines)
    assert "## testbed:block" in lines
    assert "G, driver D, vLLM V" in lines[2]
    assert "100 rows, of tuned models 100." in (tmp_path / "out" / "algorithms.svg").read_text()
    check_printed(tmp_path / "out" / "algorithms")
    noted = json.loads((tmp_path / "out" / "algorithms.json").read_text())
    naive = noted["workloads"]["testbed"]["musique"]["naive"]
    assert naive["kept"][0] == pytest.approx(0.5)
    assert naive["difference"][1] < -0.5 < naive["difference"][2]
    [pairs] = [order["pairs"] for order in noted["orders"] if order["claim"] == "mepic >= epic"]
    assert [pair["verdict"] for pair in pairs] == ["fails", "fails"]


def test_an_arm_reaches_the_frontier_on_every_data_set_or_not_at_all(tmp_path: Path) -> None:
    lines = written(tmp_path, [part("musique", 0.98), part("needle", 0.96)])
    [row] = [line for line in lines if line.startswith(f"| `{OWN}` | no | 0.960 ")]
    assert row.endswith("(needle) | 0 of 2 | needle | none |")


def test_other_prompts_and_other_rows_are_workloads_of_their_own(tmp_path: Path) -> None:
    rest = part("musique", 0.7)
    rest.case = Case("testbed", "musique", first=100)
    parts = [part("musique", 0.99), part("musique", 0.5, drop=True), rest]
    lines = written(tmp_path, parts)
    assert "## testbed, rows from 100 on" in lines
    at = lines.index("## testbed, lead passages left out")
    assert f"| `{OWN}` | 0.500 (32) |" in lines[at:]
    assert f"| `{OWN}` | 0.990 (32) |" in lines[:at]


def test_rows_that_nothing_can_be_compared_with_are_refused() -> None:
    wrong = part("musique", 0.5)
    wrong.arms["full"].score = [0.0] * 100
    with pytest.raises(DataError, match="testbed-musique: 100 rows of which"):
        score_arms(wrong)


FULL, CHEAP = ("testbed", "full"), ("testbed", "naive")
ORDER = PublishedOrder("full >= naive", "0000.00000", (FULL, CHEAP))


def rows_of(scores: dict[str, Sequence[float]], model: str = "testbed") -> ScoredPart:
    rows = len(next(iter(scores.values())))
    arms = {arm: ArmRows(list(found), [0] * rows, [0] * rows) for arm, found in scores.items()}
    return ScoredPart(Case(model, "musique"), rows, {}, arms, [10] * rows, [8] * rows)


def verdict(full: Sequence[float], naive: Sequence[float]) -> str:
    found = rows_of({"full": full, "naive": naive})
    [step] = judge(ORDER, {found.case: found})
    return step.verdict


def test_orders_hold_fail_or_are_undecided() -> None:
    half = [1.0, 0.0] * 50
    assert verdict([1.0] * 100, half) == "holds"
    assert verdict(half, half) == "holds"
    assert verdict(half, [1.0] * 100) == "fails"
    assert verdict([*half[:98], 1.0, 0.0], [*half[:98], 0.0, 1.0]) == "undecided"


def test_a_tuned_model_is_compared_with_the_untuned_one() -> None:
    order = PublishedOrder("tuned", "0000.00000", (("testbed:link", "naive"), CHEAP))
    tuned, plain = rows_of({"naive": [1.0] * 9}, "testbed:link"), rows_of({"naive": [0.5] * 9})
    [step] = judge(order, {tuned.case: tuned, plain.case: plain})
    assert (step.difference.value, step.verdict) == (pytest.approx(0.5), "holds")
    assert judge(order, {plain.case: plain}) == []


def test_every_arm_of_an_order_is_measured() -> None:
    for order in ORDERS:
        for model, arm in order.arms:
            assert arm in arms_of(model)

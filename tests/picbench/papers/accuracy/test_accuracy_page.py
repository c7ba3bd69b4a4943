"""Pages about trained models, from scores made by hand."""

import json
from pathlib import Path

import pytest

from picbench.experiments.arm_scores import ArmRows, Case, ScoredPart
from picbench.papers.accuracy import PublishedGap, read_accuracy, read_models, write_accuracy

FACTS = {"gpu": "a GPU", "vllm": "1", "dtype": "bfloat16", "commit": "0123456789"}
MODEL = "mistralai/Mistral-7B-Instruct-v0.2"


def put(folder: Path, model: str, dataset: str = "2wikimqa", **arms: list[float]) -> None:
    rows = len(next(iter(arms.values())))
    part = ScoredPart.begin(Case(model, dataset), rows, FACTS, list(arms))
    part.prompt, part.chunk = [100] * rows, [80] * rows
    for arm, scores in arms.items():
        part.arms[arm] = ArmRows(scores, [8] * rows, [20] * rows)
    part.write(folder)


def test_gaps_are_paired_by_row_and_stand_beside_published_ones(tmp_path: Path) -> None:
    full = [1.0, 0.5] * 20
    put(tmp_path / "scores", MODEL, full=full, naive=[score - 0.25 for score in full])
    verdicts = write_accuracy(read_accuracy(), tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert f"Measured: {MODEL}." in page
    assert "| `naive` | 0.500; -0.250 [-0.250, -0.250] |" in page
    assert f"naive | -37.5 | {MODEL} | -25.0 | -25.0 to -25.0 |" in page
    # Arms that others tuned a model for are not set beside ours.
    assert "block-attention | -10.7 | - | - | - |" in page
    assert (tmp_path / "kept-mistralai--Mistral-7B-Instruct-v0.2.png").exists()
    [naive] = [one for one in verdicts if "Naive reuse loses" in one.claim]
    assert (naive.verdict, naive.ours) == ("holds", "-0.25 (2wikimqa: naive less full)")
    assert naive.run is not None
    assert f"{MODEL}, 40 rows a set" in naive.run
    rows = json.loads((tmp_path / "arms.json").read_text())["rows"]
    assert [row["linked"] for row in rows] == [0.1, 0.1]


def test_the_testbed_is_beside_other_models(tmp_path: Path) -> None:
    put(tmp_path / "scores", MODEL, full=[1.0, 0.5], naive=[0.0, 0.0])
    put(tmp_path / "testbed", "testbed", full=[1.0, 0.5])
    put(tmp_path / "testbed", "testbed:block", full=[1.0, 0.5])
    found = read_models(read_accuracy(), tmp_path, tmp_path / "testbed")
    assert [one.model for one in found] == [MODEL, "testbed"]
    alone = write_accuracy(read_accuracy(), tmp_path / "other", tmp_path / "testbed")
    assert "No trained model" in (tmp_path / "other" / "README.md").read_text()
    assert {one.verdict for one in alone} == {"undecided"}


@pytest.mark.parametrize("full", [[0.0] * 8, [0.0] * 7 + [1.0]])
def test_where_full_recompute_scores_nothing_no_ratio_is_taken(
    tmp_path: Path, full: list[float]
) -> None:
    put(tmp_path / "scores", MODEL, **{"full": full, "epic:k=2": [0.0] * 8})
    verdicts = write_accuracy(read_accuracy(), tmp_path)
    [lego] = [one for one in verdicts if "LegoLink-2" in one.claim]
    assert lego.verdict == "undecided"
    assert "no score is above zero" in lego.why or "too few rows score" in lego.why
    assert not list(tmp_path.glob("kept-*"))


def test_a_published_range_makes_a_range_of_gaps() -> None:
    gap = PublishedGap(
        source="s", model="m", rows="r", full=(27.6, 28.1), arms={"naive": (25.8, 28.2)}
    )
    assert gap.gap("naive") == pytest.approx((-2.3, 0.6))
    assert gap.kept("naive") == pytest.approx((91.815, 102.174), abs=1e-3)

"""What is committed of papers is what the program makes of the committed data."""

import json
from pathlib import Path

import pytest

from picbench.papers.accuracy import judge_model, read_accuracy, read_models
from picbench.papers.judge import Evidence, judge_all, write_claims
from picbench.papers.settings import PAPERS, read_settings

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results" / "papers"
SCORES = Path("results/testbed/algorithms")


@pytest.mark.parametrize("paper", PAPERS)
def test_verdicts_are_current(paper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    evidence = Evidence.read(RESULTS / paper / "data", SCORES)
    found = judge_all(read_settings(paper).claims, evidence)
    committed = json.loads((RESULTS / paper / "verdicts.json").read_text())
    assert [one.model_dump(mode="json") for one in found] == committed, "make claims"


def test_verdicts_about_trained_models_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = read_accuracy()
    models = read_models(settings, RESULTS / "accuracy", SCORES)
    found = [
        one.model_dump(mode="json") for model in models for one in judge_model(settings, model)
    ]
    committed = json.loads((RESULTS / "accuracy" / "verdicts.json").read_text())
    assert found == committed, "make claims"


def test_the_page_of_claims_has_their_table(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "claims.md").read_text()
    copy = tmp_path / "claims.md"
    copy.write_text(page)
    titles = [(read_settings(paper).paper, RESULTS / paper) for paper in PAPERS]
    write_claims(copy, [(title.partition(",")[0], folder) for title, folder in titles])
    assert copy.read_text() == page, "make claims"

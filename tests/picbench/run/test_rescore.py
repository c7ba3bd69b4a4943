"""Scores anew: from stored replies and answers, and without losing the old ones."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from harness_fakes import REFUSED, FakeEngine, Harness, make_sample, run_fakes

from picbench.engines.request import Request, Result
from picbench.errors import ConfigError, InvalidRun
from picbench.run.result import rescore
from picbench.run.workload import Workload
from picbench.settings import RunConfig
from picbench.store.reader import read_run
from picbench.store.records import Grader
from picbench.store.writer import MANIFEST, SAMPLES, SUMMARY

GOLDEN = Path(__file__).parents[1] / "store" / "golden"

#: The right answer is "Ada Lovelace"; replies of `mepic` by sample.
REPLIES = ("Ada Lovelace", "ada", "The passages do not mention it.", "", "unused")


@dataclass
class TalkingEngine(FakeEngine):
    """Says what `REPLIES` has; the token of a sample's own chunk tells which."""

    def _answer(self, request: Request) -> Result:
        found = super()._answer(request)
        number = found.prompt_tokens[2] - 1000
        return found if self.algorithm == "full" else replace(found, text=REPLIES[number])


class WrongHarness(Harness):
    """Scores every reply as a quarter."""

    def load(self, config: RunConfig) -> Workload:
        return replace(super().load(config), grader=Grader(lambda reply, answers: 0.25))


def make_run(folder: Path, dataset: str = "musique") -> Path:
    samples = [make_sample(n, first=REFUSED if n == 4 else 1) for n in range(5)]
    answers = ("Ada Lovelace", "yes")
    samples = [replace(sample, dataset=dataset, answers=answers) for sample in samples]
    harness = WrongHarness(samples, engines={a: TalkingEngine(a) for a in ("full", "mepic")})
    return run_fakes(harness, folder / "run", "full", "mepic", concurrency=1)


def test_scores_are_those_of_the_metric(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    changed, _ = rescore(folder)
    rows = [(r.score, r.outcome) for r in read_run(folder).rows if r.arm == "mepic"]
    assert rows == [
        (1.0, "answered"),
        (pytest.approx(2 / 3), "answered"),
        (0.0, "abstained"),
        (None, "unparsed"),
        (None, "error"),
    ]
    summary = read_run(folder).summary["mepic"]
    assert summary.score == changed["mepic"].after
    assert summary.score.mean == pytest.approx((1 + 2 / 3) / 4)
    assert summary.score.parsed_mean == pytest.approx((1 + 2 / 3) / 3)
    assert summary.outcomes == {"answered": 2, "abstained": 1, "unparsed": 1, "error": 1}
    # The blank reply had no score before, either.
    assert (changed["mepic"].scores, changed["mepic"].outcomes) == (3, 1)
    assert changed["full"].before.mean == 0.25


@pytest.mark.parametrize(("metric", "second"), [("em", 0.0), ("f1", 2 / 3), ("rouge-l", None)])
def test_another_metric(tmp_path: Path, metric: str, second: float | None) -> None:
    folder = make_run(tmp_path)
    rescore(folder, metric)
    run = read_run(folder)
    assert run.summary["mepic"].score.metric == run.manifest["workload"]["metric"] == metric
    scores = [row.score for row in run.rows if row.arm == "mepic"]
    assert scores[0] == pytest.approx(1.0)
    assert second is None or scores[1] == pytest.approx(second)


def test_nothing_but_scores_changes_and_old_files_stay(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    before = [(folder / name).read_bytes() for name in (SAMPLES, SUMMARY)]
    rows = read_run(folder).rows
    _, kept = rescore(folder)
    assert kept == [folder / "samples.1.jsonl", folder / "summary.1.json"]
    assert [path.read_bytes() for path in kept] == before
    again, kept = rescore(folder)
    assert kept == [folder / "samples.2.jsonl", folder / "summary.2.json"]
    assert {arm.scores for arm in again.values()} == {0}
    new = [replace(row, score=None, outcome="answered") for row in read_run(folder).rows]
    assert new == [replace(row, score=None, outcome="answered") for row in rows]


def test_only_finished_runs_with_answers_are_scored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`metric` 'bleu': unknown"):
        rescore(GOLDEN / "3", "bleu")
    folder = make_run(tmp_path, dataset="synthetic")
    with pytest.raises(ConfigError, match="random tokens"):
        rescore(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"status": "interrupted"}))
    with pytest.raises(ConfigError, match="not finished"):
        rescore(folder)


def test_a_run_that_lacks_rows_is_not_scored_as_if_it_had_sent_fewer(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    lines = (folder / SAMPLES).read_bytes().splitlines(keepends=True)
    (folder / SAMPLES).write_bytes(b"".join(lines[:3]))
    before = (folder / SUMMARY).read_bytes()
    with pytest.raises(InvalidRun, match="rows of full, and measured 5"):
        rescore(folder)
    assert (folder / SUMMARY).read_bytes() == before
    assert not (folder / "summary.1.json").exists()

"""Scores of a finished run anew, from the replies and answers that its directory has."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError
from picbench.files import write_json
from picbench.run.workload import make_grader
from picbench.store.manifest import FINAL
from picbench.store.reader import Run, check_rows, read_run
from picbench.store.records import Grader, SampleRow
from picbench.store.summary import ScoreSummary, count_outcomes, summarise_scores
from picbench.store.writer import MANIFEST, SAMPLES, SUMMARY, hold, write_rows
from picbench.workloads import datasets, models
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.scoring import METRICS, find_scorer, scorer_by_name
from picbench.workloads.traffic.corpus import SYNTHETIC


@dataclass(frozen=True, slots=True)
class ArmRescored:
    """Scores of an arm before and after, and how many of its rows have another score or outcome."""

    before: ScoreSummary
    after: ScoreSummary
    scores: int
    outcomes: int


@dataclass(frozen=True, slots=True)
class Rescored:
    """What changed, by arm; `kept` are the files as they were before."""

    arms: Mapping[str, ArmRescored]
    kept: Sequence[Path]


def rescore(path: Path, metric: str | None = None) -> Rescored:
    """Score all replies of a run by `metric` (one of METRICS), or by its own as it is today.

    Rewrites samples.jsonl and summary.json and keeps the old ones under numbers. Raises ConfigError
    for what is no finished run, for one without answers, and for an unknown metric, and InvalidRun
    for one that lacks rows.
    """
    if metric is not None and metric not in METRICS:
        raise ConfigError(f"`metric` {metric!r}: unknown", hint=f"one of {', '.join(METRICS)}")
    run = read_run(path)
    _check(run)
    with hold(path):
        name, grade = _graders(run, metric)
        rows = [_rescored(row, run, grade) for row in run.rows]
        changed = {arm: _compare(run, arm, rows, name) for arm in run.summary}
        return Rescored(changed, _write(run, rows, changed, name))


def _check(run: Run) -> None:
    if run.manifest["status"] not in FINAL:
        raise ConfigError(
            f"{run.path}: not finished", hint="give the command that began the run again first"
        )
    if SYNTHETIC in run.manifest["workload"]["dataset"].split(","):
        raise ConfigError(f"{run.path}: random tokens have no answers", hint="use a data set")
    check_rows(run)


def _graders(run: Run, metric: str | None) -> tuple[str, Callable[[str], Grader]]:
    """The metric's name in tables, and graders by data set."""
    model, config = run.manifest["model"], run.manifest["config"]

    @cache
    def tokenizer() -> Tokenizer:
        return models.load_tokenizer(models.resolve(config["model"]))

    @cache
    def found(name: str) -> tuple[str, Grader]:
        dataset = datasets.find(name)
        if metric is None:
            scorer = find_scorer(dataset, config["scoring"], tokenizer)
        else:
            scorer = scorer_by_name(dataset, metric, tokenizer)
        return scorer.metric, make_grader(dataset, scorer, restates=model["restates"])

    first = next(iter(run.workload.values())).dataset
    return found(first)[0], lambda name: found(name)[1]


def _rescored(row: SampleRow, run: Run, grade: Callable[[str], Grader]) -> SampleRow:
    if row.error is not None:
        return row
    sample = run.workload[row.sample]
    score, outcome = grade(sample.dataset)(row.text or "", sample.answers)
    return replace(row, score=score, outcome=outcome)


def _compare(run: Run, arm: str, rows: Sequence[SampleRow], metric: str) -> ArmRescored:
    before = run.summary[arm].score
    pairs = [(old, new) for old, new in zip(run.rows, rows, strict=True) if new.arm == arm]
    answered = [new for _, new in pairs if new.error is None]
    return ArmRescored(
        before=before,
        after=summarise_scores(answered, metric, meaningful=before.meaningful),
        scores=sum(old.score != new.score for old, new in pairs),
        outcomes=sum(old.outcome != new.outcome for old, new in pairs),
    )


def _write(
    run: Run, rows: Sequence[SampleRow], changed: Mapping[str, ArmRescored], metric: str
) -> list[Path]:
    kept = _keep(run.path)
    write_rows(run.path / SAMPLES, rows)
    for name in (SUMMARY, MANIFEST):
        document: dict[str, Any] = json.loads((run.path / name).read_bytes())
        document["workload"]["metric"] = metric
        if name == SUMMARY:
            for arm, change in changed.items():
                own = [row for row in rows if row.arm == arm]
                document["arms"][arm]["score"] = asdict(change.after)
                document["arms"][arm]["outcomes"] = count_outcomes(own)
        write_json(run.path / name, document)
    return kept


def _keep(folder: Path) -> list[Path]:
    """Copy the files that will be replaced under the next number that is free."""
    number = 1
    while (folder / _numbered(SUMMARY, number)).exists():
        number += 1
    copies = [folder / _numbered(name, number) for name in (SAMPLES, SUMMARY)]
    for name, copy in zip((SAMPLES, SUMMARY), copies, strict=True):
        shutil.copyfile(folder / name, copy)
    return copies


def _numbered(name: str, number: int) -> str:
    """``summary.json`` as ``summary.1.json``."""
    path = Path(name)
    return f"{path.stem}.{number}{path.suffix}"

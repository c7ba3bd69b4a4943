"""Verdicts on claims, from compact data of experiments and scores row by row."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import numpy as np

from picbench.errors import ConfigError, DataError
from picbench.files import write_json, write_whole
from picbench.papers.arm_scores import Case, ScoredPart, read_parts
from picbench.papers.data import ExperimentData, read_all
from picbench.papers.settings import Bounds, Claim, NotMeasured, RunQuantity, ScoreQuantity, Verdict
from picbench.statistics.intervals import (
    FEW,
    Interval,
    MeanBootstrap,
    StudentMean,
    difference_interval,
    ratio_interval,
    sum_clusters,
)
from picbench.tables import table as markdown

#: The model that an arm without a model is one of, and what pages call its weights.
BASE, TESTBED = "testbed", "testbed weights"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Experiments by device and name, scores by case, and where the latter are."""

    data: Mapping[tuple[str, str], ExperimentData]
    parts: Mapping[Case, ScoredPart]
    scores: str = ""

    @classmethod
    def read(cls, data: Path, scores: Path | None) -> Self:
        """Read what there is; a folder that is missing has nothing in it."""
        found = {(one.device, one.experiment): one for one in read_all(data)}
        if scores is None or not any(scores.glob("*.json")):
            return cls(found, {})
        parts = {part.case: part for part in read_parts(scores)}
        return cls(found, parts, scores.as_posix())

    def experiment(self, name: str) -> Sequence[ExperimentData]:
        """An experiment on all devices on which it was run."""
        return [data for (_, experiment), data in self.data.items() if experiment == name]

    def datasets(self, model: str = BASE) -> list[str]:
        """The data sets of which a model was scored on whole rows."""
        return list(dict.fromkeys(c.dataset for c in self.parts if c == Case(model, c.dataset)))

    def part(self, arm: str, dataset: str) -> ScoredPart | None:
        """The rows of an arm (``MODEL/ARM`` of another model); None where it has none."""
        model, _, spec = arm.rpartition("/")
        part = self.parts.get(Case(model or BASE, dataset))
        return part if part is not None and spec in part.arms else None

    def rows(self, arm: str, dataset: str) -> list[float] | None:
        """The arm's scores, row by row."""
        part = self.part(arm, dataset)
        return part.arms[arm.rpartition("/")[2]].score if part else None


def model_of(arm: str) -> str:
    """The model of an arm."""
    return arm.rpartition("/")[0] or BASE


#: With what probability all intervals of a claim cover the truth.
CONFIDENCE = 0.95

#: Far ends of resamples are needed where a claim has many places.
RESAMPLES = 10_000

#: With fewer rows resampling makes intervals too narrow to decide anything.
FEWEST_ROWS = 20


@dataclass(frozen=True, slots=True)
class JudgedCell:
    """The estimate at one place, its interval, and what that says; `samples` are rows or seeds."""

    on: str
    what: str
    value: float
    interval: Interval | None
    verdict: Verdict
    samples: int

    @property
    def same(self) -> bool:
        """Whether an interval of no width says that no sample differs."""
        return self.interval is not None and self.interval.low == self.interval.high


def level_of(cells: int) -> float:
    """The level of each of this many intervals (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / max(1, cells)


def unseen(first: Sequence[float], second: Sequence[float], level: float) -> float:
    """The share of rows that may differ although none of these does; 0 where some do.

    See `picbench.statistics.significance`; `level` is the probability that no more do.
    """
    if any(a != b for a, b in zip(first, second, strict=True)):
        return 0.0
    return float(1 - (1 - level) ** (1 / len(first)))


def seed_interval(
    values: Sequence[float], level: float, *, logs: bool
) -> tuple[float, Interval | None]:
    """Mean and interval over seeds; of logarithms, and given back as ratios, if `logs`."""
    found = sum_clusters(np.asarray(values, dtype=np.float64), None)
    mean = StudentMean.of(found) if len(values) <= FEW else MeanBootstrap(found)
    interval = mean.interval(level)
    if not logs:
        return found.mean, interval
    if interval is not None:
        interval = Interval(exp(interval.low), exp(interval.high), level)
    return exp(found.mean), interval


def log_ratio(first: float, second: float) -> float | None:
    """None where one of the two is not positive."""
    return log(first / second) if first > 0 and second > 0 else None


#: The verdict on a claim is the first of these that one of its cells has.
_ORDER: tuple[Verdict, ...] = ("fails", "undecided", "holds")

VERDICTS = "verdicts.json"

#: A pool is full when so much of it is held, in percent: one more request takes a few.
FULL_POOL = 95.0


@dataclass(frozen=True, slots=True)
class ClaimVerdict:
    """A claim, what we found and what that says.

    `ours` and `interval` are those of the place that decides; `cells` has all places.
    """

    claim: str
    source: str
    published: str
    ours: str | None
    interval: tuple[float, float] | None
    verdict: Verdict
    why: str
    run: str | None
    cells: tuple[JudgedCell, ...] = ()

    def document(self) -> dict[str, Any]:
        """Without the cells."""
        found = asdict(self)
        del found["cells"]
        return found


def judge_all(claims: Sequence[Claim], evidence: Evidence) -> list[ClaimVerdict]:
    """A verdict for each claim and each device on which it was measured, at least one a claim."""
    return [verdict for claim in claims for verdict in _judge(claim, evidence)]


def write_verdicts(verdicts: Sequence[ClaimVerdict], folder: Path) -> None:
    """Write ``verdicts.json``: a list of claims."""
    rows = [verdict.document() for verdict in verdicts]
    write_json(folder / VERDICTS, rows)


def _judge(claim: Claim, evidence: Evidence) -> Iterator[ClaimVerdict]:
    match claim.judge:
        case NotMeasured(why=why):
            yield _unmeasured(claim, "", why)
        case ScoreQuantity() as wanted:
            yield _judge_scores(claim, wanted, evidence)
        case RunQuantity() as wanted:
            found = evidence.experiment(wanted.experiment)
            for data in found:
                cells = _run_cells(wanted, data)
                noted = claim.on(data.device, _gaps(wanted, data, cells))
                yield _verdict(noted, wanted, cells, _run_of(data), _NOTHING)
            if not found:
                yield _unmeasured(claim, "", f"the experiment {wanted.experiment} has not been run")


#: Where two arms are compared: data set, first arm, second arm.
_Pair = tuple[str, str, str]


def _judge_scores(claim: Claim, wanted: ScoreQuantity, evidence: Evidence) -> ClaimVerdict:
    datasets = wanted.datasets or evidence.datasets(model_of(wanted.arms[0]))
    every = [(dataset, *arms) for dataset in datasets for arms in pairwise(wanted.arms)]
    pairs = [pair for pair in every if _comparable(*_paired(evidence, pair), wanted)]
    level = level_of(len(pairs))
    cells = [_score_cell(wanted, evidence, pair, level) for pair in pairs]
    facts = [part.facts for d, arm, _ in pairs if (part := evidence.part(arm, d))]
    run = ""
    if facts:
        where = sorted({f"{f['gpu']}, {f['dtype']}, commit {f['commit'][:7]}" for f in facts})
        weights = [model for model in dict.fromkeys(map(model_of, wanted.arms)) if model != BASE]
        run = f"{evidence.scores}: {' and '.join(where)}; {', '.join(weights) or TESTBED}, "
        run += f"{ends(cell.samples for cell in cells)} rows a set"
        if min(cell.samples for cell in cells) < FEWEST_ROWS:
            run += f" (fewer than {FEWEST_ROWS} decide nothing)"
    measured = any(evidence.part(wanted.arms[0], d) for d in datasets)
    missing = "no score is above zero" if measured else "no scores of these arms"
    return _verdict(claim, wanted, cells, run, missing)


def ends(counts: Iterable[int]) -> str:
    """The smallest and the largest: ``20``, or ``20 to 200``."""
    found = sorted(counts)
    return " to ".join(str(count) for count in dict.fromkeys((found[0], found[-1])))


def _paired(evidence: Evidence, pair: _Pair) -> tuple[Sequence[float], Sequence[float]]:
    """The rows that both arms have."""
    dataset, first, second = pair
    one, other = evidence.rows(first, dataset) or [], evidence.rows(second, dataset) or []
    rows = min(len(one), len(other))
    return one[:rows], other[:rows]


def _comparable(one: Sequence[float], other: Sequence[float], wanted: ScoreQuantity) -> bool:
    """Whether there are two rows of both arms, and something to divide by where it is divided."""
    return len(one) >= 2 and (not wanted.ratio or any(other))


def _score_cell(wanted: ScoreQuantity, evidence: Evidence, pair: _Pair, level: float) -> JudgedCell:
    dataset, *names = pair
    one, other = _paired(evidence, pair)
    if model_of(names[0]) == model_of(names[1]):
        names = [name.rpartition("/")[2] for name in names]
    if wanted.ratio:
        value, interval = fmean(one) / fmean(other), ratio_interval(one, other, level, RESAMPLES)
    else:
        value = fmean(one) - fmean(other)
        interval = difference_interval(one, other, level, RESAMPLES)
    verdict, room = wanted.judge(interval), wanted.room(value)
    if verdict == "holds" and room and unseen(one, other, level) > room:
        verdict = "undecided"
    if len(one) < FEWEST_ROWS:
        verdict = "undecided"
    what = (" over " if wanted.ratio else " less ").join(names)
    return JudgedCell(dataset, what, value, interval, verdict, len(one))


def _run_cells(wanted: RunQuantity, data: ExperimentData) -> list[JudgedCell]:
    arm, over = _first(wanted.arm, data.arms), _first(wanted.over, data.arms)
    against = _first(wanted.against, data.labels)
    if not arm or (wanted.over and not over) or (wanted.against and not against):
        return []
    labels = _labels(wanted, data, against)
    level = level_of(len(labels))
    what = f"{arm} over {over}" if over else arm
    cells = []
    for label in labels:
        values = list(_seed_values(wanted, data, (label, against), arm, over))
        if values:
            logs = bool(over or wanted.against) and not wanted.exponent
            value, interval = seed_interval(values, level, logs=logs)
            verdict = wanted.judge(interval)
            if over and wanted.metric.startswith("peak") and _both_full(data, label, arm, over):
                verdict = "undecided"
            cells.append(JudgedCell(label, what, value, interval, verdict, len(values)))
    return cells


def _labels(wanted: RunQuantity, data: ExperimentData, against: str) -> list[str]:
    """The places that a claim is about, of those in the data."""
    return [one for one in wanted.at or data.labels if one != against and one in data.labels]


def _gaps(wanted: RunQuantity, data: ExperimentData, cells: Sequence[JudgedCell]) -> str:
    """Where the data have no value of these arms: places about which nothing was judged."""
    labels = _labels(wanted, data, _first(wanted.against, data.labels))
    without = [label for label in labels if label not in {cell.on for cell in cells}]
    return f"Not measured at {', '.join(without)}." if cells and without else ""


def _both_full(data: ExperimentData, label: str, *arms: str) -> bool:
    """Whether the pool cuts off the peaks of all arms, so that these tell nothing of demand."""
    shares = [data.spread(label, arm, "peak_pct").mean for arm in arms]
    return all(share is not None and share >= FULL_POOL for share in shares)


def _first(names: str | Sequence[str], known: Sequence[str]) -> str:
    """The first name that is known; empty if none is."""
    wanted = [names] if isinstance(names, str) else names
    return next((name for name in wanted if name in known), "")


def _seed_values(
    wanted: RunQuantity, data: ExperimentData, labels: tuple[str, str], arm: str, over: str
) -> Iterator[float]:
    """What is averaged over seeds: values, or logarithms of ratios."""
    label, against = labels
    here = _values(wanted, data, label, arm, over)
    if not against:
        yield from here.values()
        return
    there = _values(wanted, data, against, arm, over)
    for seed in here.keys() & there.keys():
        # Values of ratios are logarithms by now.
        change = here[seed] - there[seed] if over else log_ratio(here[seed], there[seed])
        if change is not None:
            yield change / _log_size(data, label, against) if wanted.exponent else change


def _values(
    wanted: RunQuantity, data: ExperimentData, label: str, arm: str, over: str
) -> Mapping[int, float]:
    first = data.values(label, arm, wanted.metric)
    if not over:
        return first
    second = data.values(label, over, wanted.metric)
    ratios = {seed: log_ratio(first[seed], second[seed]) for seed in first.keys() & second.keys()}
    return {seed: ratio for seed, ratio in ratios.items() if ratio is not None}


def _log_size(data: ExperimentData, label: str, against: str) -> float:
    """The logarithm of how many times longer prompts are."""
    sizes = {point.label: point.facts["mean_tokens"] for point in data.points}
    here, there = sizes[label], sizes[against]
    return log(here / there) if here and there else float("nan")


def _run_of(data: ExperimentData) -> str:
    about = data.conditions
    where = f"{about['hardware']}, commit {about['commit']}; {about['model']}"
    return f"data/{data.name}.json: {where}, n={len(data.seeds)}"


_NOTHING = "arms or points are missing in the data"


def _verdict(
    claim: Claim, bounds: Bounds, cells: Sequence[JudgedCell], run: str, missing: str
) -> ClaimVerdict:
    if not cells:
        return _unmeasured(claim, run, missing)
    verdict = next(verdict for verdict in _ORDER if any(c.verdict == verdict for c in cells))
    # Where no row differs there is nothing to see: any other place tells more.
    decisive = min(
        (cell for cell in cells if cell.verdict == verdict),
        key=lambda cell: (cell.same, bounds.room(cell.value)),
    )
    found = decisive.interval
    return ClaimVerdict(
        claim=claim.claim,
        source=claim.source,
        published=claim.published,
        ours=f"{number(decisive.value)} ({decisive.on}: {decisive.what})",
        interval=(significant(found.low), significant(found.high)) if found else None,
        verdict=verdict,
        why=f"{_places(cells)} {claim.note}".rstrip(),
        run=run,
        cells=tuple(cells),
    )


def _unmeasured(claim: Claim, run: str, missing: str) -> ClaimVerdict:
    why = f"Not measured: {missing}. {claim.note}".rstrip()
    return ClaimVerdict(
        claim.claim, claim.source, claim.published, None, None, "undecided", why, run or None
    )


def _places(cells: Sequence[JudgedCell]) -> str:
    """Where the claim holds, fails and is undecided; a place with several pairs has the worst."""
    worst: dict[str, Verdict] = {}
    for cell in cells:
        worst[cell.on] = min(worst.get(cell.on, "holds"), cell.verdict, key=_ORDER.index)
    by_verdict = {v: [on for on, found in worst.items() if found == v] for v in reversed(_ORDER)}
    texts = [f"{v} at {', '.join(places)}" for v, places in by_verdict.items() if places]
    note = ""
    if without := [cell for cell in cells if cell.interval is None]:
        few = any(cell.samples > 1 for cell in without)
        note = " (too few rows score)" if few else " (a single run has no interval)"
    text = "; ".join(texts) + note + "."
    return text[0].upper() + text[1:]


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def significant(value: float) -> float:
    """Four significant digits, for files."""
    return float(f"{value:.4g}")


BEGIN, END = "<!-- claims: begin -->", "<!-- claims: end -->"

#: Negative findings first.
_NEGATIVE_FIRST = ("fails", "holds", "undecided")

_COLUMNS = ("paper", "verdict", "claim", "published", "ours, 95 % interval", "where", "weights, n")


def write_claims(document: Path, papers: Sequence[tuple[str, Path]]) -> None:
    """Replace what is between the marks of a document by the table of the papers' verdicts.

    `papers` are (what to call it, folder with its verdicts). The undecided are counted; what they
    are is on the papers' pages. Raises ConfigError for a document without marks, DataError for
    verdicts that cannot be read.
    """
    text = document.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError(
            f"`claims` {document}: has not one pair of marks", hint=f"add {BEGIN} and {END}"
        )
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    found = [(title, _read(folder)) for title, folder in papers]
    counts = [(title, Counter(one["verdict"] for one in verdicts)) for title, verdicts in found]
    lines = [
        markdown.table(
            ("paper", *_NEGATIVE_FIRST),
            [(title, *(str(count[v]) for v in _NEGATIVE_FIRST)) for title, count in counts],
            right=1,
        ),
        "",
        markdown.table(
            _COLUMNS,
            [
                _row(title, one)
                for title, verdicts in found
                for wanted in ("fails", "holds")
                for one in verdicts
                if one["verdict"] == wanted
            ],
        ),
    ]
    table = "\n".join(lines)
    write_whole(document, f"{head}{BEGIN}\n{table}\n{END}{tail}".encode())


def _row(title: str, found: Mapping[str, Any]) -> list[str]:
    low, high = found["interval"]
    where, _, weights = found["run"].partition(": ")[2].partition("; ")
    ours = f"{found['ours']} [{low:g}, {high:g}]"
    return [title, found["verdict"], found["claim"], found["published"], ours, where, weights]


def _read(folder: Path) -> list[dict[str, Any]]:
    path = folder / VERDICTS
    try:
        found: list[dict[str, Any]] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return found

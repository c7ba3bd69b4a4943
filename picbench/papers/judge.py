"""Verdicts on claims, from compact data of experiments and scores row by row."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from picbench.papers.data import ExperimentData, ends
from picbench.papers.settings import (
    BASE,
    TESTBED,
    Bounds,
    Claim,
    NotMeasured,
    RunQuantity,
    ScoreQuantity,
    Verdict,
)
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

#: With what probability all intervals of a claim cover the truth.
CONFIDENCE = 0.95

#: Far ends of resamples are needed where a claim has many places.
RESAMPLES = 10_000

#: With fewer rows resampling makes intervals too narrow to decide anything.
FEWEST_ROWS = 20

#: A pool is full when so much of it is held, in percent: one more request takes a few.
FULL_POOL = 95.0

#: The verdict on a claim is the first of these that one of its cells has.
_ORDER: tuple[Verdict, ...] = ("fails", "undecided", "holds")

VERDICTS = "verdicts.json"

#: What the table of claims is between.
BEGIN, END = "<!-- claims: begin -->", "<!-- claims: end -->"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Experiments by device and name, scores by case, and where the latter are."""

    data: Mapping[tuple[str, str], ExperimentData]
    parts: Mapping[Case, ScoredPart]
    scores: str = ""

    @classmethod
    def read(cls, data: Path, scores: Path | None) -> Self:
        """Read what there is; a folder that is missing has nothing in it."""
        every = map(ExperimentData.read, sorted(data.glob("*.json")))
        found = {(one.device, one.experiment): one for one in every}
        if scores is None or not any(scores.glob("*.json")):
            return cls(found, {})
        return cls(found, {part.case: part for part in read_parts(scores)}, scores.as_posix())

    def experiment(self, name: str) -> Sequence[ExperimentData]:
        """An experiment on all devices on which it was run."""
        return [data for (_, experiment), data in self.data.items() if experiment == name]

    def datasets(self, model: str = BASE) -> list[str]:
        """The data sets of which a model was scored on whole rows."""
        return list(dict.fromkeys(c.dataset for c in self.parts if c == Case(model, c.dataset)))

    def part(self, arm: str, dataset: str) -> ScoredPart | None:
        """The rows of an arm (``MODEL/ARM`` of another model); None where it has none."""
        part = self.parts.get(Case(model_of(arm), dataset))
        return part if part is not None and arm.rpartition("/")[2] in part.arms else None

    def rows(self, arm: str, dataset: str) -> list[float]:
        """The arm's scores, row by row; none where it has none."""
        part = self.part(arm, dataset)
        return part.arms[arm.rpartition("/")[2]].score if part else []


def model_of(arm: str) -> str:
    """The model of an arm."""
    return arm.rpartition("/")[0] or BASE


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
    found = sum_clusters(np.asarray(values, dtype=np.float64))
    mean = StudentMean.of(found) if len(values) <= FEW else MeanBootstrap(found)
    interval = mean.interval(level)
    if not logs:
        return found.mean, interval
    if interval is not None:
        interval = Interval(exp(interval.low), exp(interval.high), level)
    return exp(found.mean), interval


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
            yield _verdict(claim, [], "", why)
        case ScoreQuantity() as wanted:
            yield _judge_scores(claim, wanted, evidence)
        case RunQuantity() as wanted:
            found = evidence.experiment(wanted.experiment)
            for data in found:
                labels, cells = _run_cells(wanted, data)
                about = data.conditions
                run = f"data/{data.name}.json: {about['hardware']}, commit {about['commit']}; "
                run += f"{about['model']}, n={len(data.seeds)}"
                notes = [note for on, note in claim.device_notes.items() if on == data.device]
                judged = {cell.on for cell in cells}
                without = [label for label in labels if cells and label not in judged]
                gaps = f"Not measured at {', '.join(without)}." if without else ""
                note = " ".join(filter(None, (gaps, claim.note, *notes)))
                noted = claim.model_copy(update={"note": note})
                yield _verdict(noted, cells, run, "arms or points are missing in the data")
            if not found:
                yield _verdict(
                    claim, [], "", f"the experiment {wanted.experiment} has not been run"
                )


def _judge_scores(claim: Claim, wanted: ScoreQuantity, evidence: Evidence) -> ClaimVerdict:
    datasets = wanted.datasets or evidence.datasets(model_of(wanted.arms[0]))
    pairs = {}
    for dataset in datasets:
        for first, second in pairwise(wanted.arms):
            one, other = evidence.rows(first, dataset), evidence.rows(second, dataset)
            rows = min(len(one), len(other))
            # There have to be two rows, and something to divide by where it is divided.
            if rows >= 2 and (not wanted.ratio or any(other[:rows])):
                pairs[dataset, first, second] = (one[:rows], other[:rows])
    level = level_of(len(pairs))
    cells = [_score_cell(wanted, *place, *rows, level) for place, rows in pairs.items()]
    facts = [part.facts for on, arm, _ in pairs if (part := evidence.part(arm, on))]
    run = ""
    if facts:
        where = sorted({f"{f['gpu']}, {f['dtype']}, commit {f['commit'][:7]}" for f in facts})
        weights = [model for model in dict.fromkeys(map(model_of, wanted.arms)) if model != BASE]
        run = f"{evidence.scores}: {' and '.join(where)}; {', '.join(weights) or TESTBED}, "
        run += f"{ends(cell.samples for cell in cells)} rows a set"
        if min(cell.samples for cell in cells) < FEWEST_ROWS:
            run += f" (fewer than {FEWEST_ROWS} decide nothing)"
    measured = any(evidence.part(wanted.arms[0], dataset) for dataset in datasets)
    missing = "no score is above zero" if measured else "no scores of these arms"
    return _verdict(claim, cells, run, missing)


def _score_cell(
    wanted: ScoreQuantity,
    dataset: str,
    first: str,
    second: str,
    one: Sequence[float],
    other: Sequence[float],
    level: float,
) -> JudgedCell:
    if wanted.ratio:
        value, interval = fmean(one) / fmean(other), ratio_interval(one, other, level, RESAMPLES)
    else:
        value = fmean(one) - fmean(other)
        interval = difference_interval(one, other, level, RESAMPLES)
    verdict, room = wanted.judge(interval), wanted.room(value)
    hidden = verdict == "holds" and room and unseen(one, other, level) > room
    if hidden or len(one) < FEWEST_ROWS:
        verdict = "undecided"
    if model_of(first) == model_of(second):
        first, second = first.rpartition("/")[2], second.rpartition("/")[2]
    what = f"{first} {'over' if wanted.ratio else 'less'} {second}"
    return JudgedCell(dataset, what, value, interval, verdict, len(one))


def _run_cells(wanted: RunQuantity, data: ExperimentData) -> tuple[list[str], list[JudgedCell]]:
    """The places that a claim is about, and a cell for each with a value of its arms."""
    arm, over = _first(wanted.arm, data.arms), _first(wanted.over, data.arms)
    against = _first(wanted.against, data.labels)
    if not arm or (wanted.over and not over) or (wanted.against and not against):
        return [], []
    labels = [on for on in wanted.at or data.labels if on != against and on in data.labels]
    level, cells = level_of(len(labels)), []
    logs = bool(over or wanted.against) and not wanted.exponent
    for label in labels:
        values = list(_seed_values(wanted, data, (label, against), arm, over))
        if values:
            value, interval = seed_interval(values, level, logs=logs)
            verdict = wanted.judge(interval)
            if over and wanted.metric.startswith("peak"):
                # Where the pool cuts off both peaks, they tell nothing of demand.
                shares = [data.spread(label, each, "peak_pct") for each in (arm, over)]
                if all(share and (share.number or 0) >= FULL_POOL for share in shares):
                    verdict = "undecided"
            what = f"{arm} over {over}" if over else arm
            cells.append(JudgedCell(label, what, value, interval, verdict, len(values)))
    return labels, cells


def _first(names: str | Sequence[str], known: Sequence[str]) -> str:
    """The first name that is known; empty if none is."""
    wanted = [names] if isinstance(names, str) else names
    return next((name for name in wanted if name in known), "")


def _seed_values(
    wanted: RunQuantity, data: ExperimentData, labels: tuple[str, str], arm: str, over: str
) -> Iterator[float]:
    """What is averaged over seeds: values, or logarithms of ratios."""
    label, against = labels
    here, there = (data.values(on, arm, wanted.metric) for on in labels)
    if over:
        here, there = (
            _log_ratios(found, data.values(on, over, wanted.metric))
            for on, found in ((label, here), (against, there))
        )
    if not against:
        yield from here.values()
        return
    if over:
        changes = {seed: here[seed] - there[seed] for seed in here.keys() & there.keys()}
    else:
        changes = _log_ratios(here, there)
    sizes = {point.label: point.facts.get("mean_tokens") or 0 for point in data.points}
    for change in changes.values():
        # An exponent: by how many times longer prompts are.
        yield change / log(sizes[label] / sizes[against]) if wanted.exponent else change


def _log_ratios(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """By seed; without those where one of the two is not positive."""
    seeds = [seed for seed in first.keys() & second.keys() if first[seed] > 0 and second[seed] > 0]
    return {seed: log(first[seed] / second[seed]) for seed in seeds}


def _verdict(claim: Claim, cells: Sequence[JudgedCell], run: str, missing: str) -> ClaimVerdict:
    printed = (claim.claim, claim.source, claim.published)
    if not cells:
        why = f"Not measured: {missing}. {claim.note}".rstrip()
        return ClaimVerdict(*printed, None, None, "undecided", why, run or None)
    assert isinstance(claim.judge, Bounds)
    room = claim.judge.room
    verdict = next(verdict for verdict in _ORDER if any(c.verdict == verdict for c in cells))
    deciding = [cell for cell in cells if cell.verdict == verdict]
    # Where no row differs there is nothing to see: any other place tells more.
    shown = min(deciding, key=lambda cell: (cell.same, room(cell.value)))
    interval = None
    if found := shown.interval:
        interval = (float(f"{found.low:.4g}"), float(f"{found.high:.4g}"))
    ours = f"{number(shown.value)} ({shown.on}: {shown.what})"
    why = f"{_places(cells)} {claim.note}".rstrip()
    return ClaimVerdict(*printed, ours, interval, verdict, why, run, tuple(cells))


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
    counts, rows = [], []
    # Negative findings first.
    order = ("fails", "holds", "undecided")
    for title, folder in papers:
        path = folder / VERDICTS
        try:
            found: list[dict[str, Any]] = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        count = Counter(one["verdict"] for one in found)
        counts.append((title, *(str(count[verdict]) for verdict in order)))
        decided = [one for one in found if one["verdict"] != "undecided"]
        for one in sorted(decided, key=lambda one: order.index(one["verdict"])):
            where, _, weights = one["run"].partition(": ")[2].partition("; ")
            ours = "{ours} [{interval[0]:g}, {interval[1]:g}]".format(**one)
            printed = (one["verdict"], one["claim"], one["published"])
            rows.append((title, *printed, ours, where, weights))
    head = ("paper", "verdict", "claim", "published", "ours, 95 % interval", "where", "weights, n")
    counted = markdown.table(("paper", *order), counts, right=1)
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    found_text = f"{BEGIN}\n{counted}\n\n{markdown.table(head, rows)}\n{END}"
    write_whole(document, f"{before}{found_text}{after}".encode())

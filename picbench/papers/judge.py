"""Verdicts on claims, from compact data of experiments and scores row by row."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import exp, log
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter

from picbench.errors import ConfigError, DataError
from picbench.files import write_json, write_whole
from picbench.papers import arm_scores, settings
from picbench.papers.arm_scores import Case, Parts, model_and_arm, paired, read_parts, rows_of
from picbench.papers.data import ExperimentData, ends, report_table
from picbench.papers.settings import BASE, Claim, Verdict
from picbench.statistics import intervals
from picbench.tables.table import Value

#: With what probability all intervals of a claim cover the truth.
CONFIDENCE = 0.95

#: A pool is full when so much of it is held, in percent: one more request takes a few.
FULL_POOL = 95.0

#: The verdict on a claim is the first of these that one of its cells has.
_ORDER: tuple[Verdict, ...] = ("fails", "undecided", "holds")

#: The file of verdicts, and what documents say of a claim that holds by less than was printed.
VERDICTS, DIRECTION = "verdicts.json", "holds in direction only"

#: What the table of claims is between.
BEGIN, END = "<!-- claims: begin -->", "<!-- claims: end -->"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Experiments by device and name, scores by case, and where the latter are."""

    data: Mapping[tuple[str, str], ExperimentData]
    parts: Parts
    scores: str = ""

    @classmethod
    def read(cls, data: Path, scores: Path) -> Self:
        """Read what there is; a folder that is missing has nothing in it."""
        every = map(ExperimentData.read, sorted(data.glob("*.json")))
        found = {(one.device, one.experiment): one for one in every}
        parts = read_parts(scores) if any(scores.glob("*.json")) else {}
        return cls(found, parts, scores.as_posix())

    def experiment(self, name: str) -> Sequence[ExperimentData]:
        """An experiment on all devices on which it was run."""
        return [data for (_, experiment), data in self.data.items() if experiment == name]

    def datasets(self, model: str = BASE) -> list[str]:
        """The data sets of which a model was scored on whole rows."""
        whole = (c.dataset for c in self.parts if c.model == model and not c.drop and not c.first)
        return list(dict.fromkeys(whole))


@dataclass(frozen=True, slots=True)
class JudgedCell:
    """The estimate at one place, its interval, and what that says; `samples` are rows or seeds."""

    on: str
    what: str
    value: float
    interval: intervals.Interval | None
    verdict: Verdict
    samples: int


class ClaimVerdict(BaseModel):
    """A claim, what we found and what that says.

    `ours` and `interval` are those of the place that decides; `cells` has all places, and is not
    part of documents.
    """

    claim: str
    source: str
    published: str
    ours: str | None = None
    interval: tuple[float, float] | None = None
    verdict: Verdict = "undecided"
    why: str
    run: str | None = None
    cells: Sequence[JudgedCell] = Field((), exclude=True)


def write_verdicts(verdicts: Sequence[ClaimVerdict], folder: Path) -> None:
    """Write ``verdicts.json``, a list of claims, and a table of every claim at every place."""
    write_json(folder / VERDICTS, [verdict.model_dump(mode="json") for verdict in verdicts])
    rows = []
    for verdict in verdicts:
        run = (verdict.run or "-").partition(":")[0]
        for cell in verdict.cells:
            ends = (cell.interval.low, cell.interval.high) if cell.interval else (None, None)
            found = (cell.value, *ends, cell.verdict, cell.samples)
            rows.append((verdict.claim, cell.on, cell.what, *found, run))
    head = ("claim", "place", "quantity", "ours", "low", "high", "verdict", "n", "run")
    report_table("places", "Every claim at every place", head, rows).write(folder)


def judge_all(claims: Iterable[Claim], evidence: Evidence) -> list[ClaimVerdict]:
    """A verdict for each claim and each device on which it was measured, at least one a claim."""
    verdicts = []
    for claim in claims:
        match claim.judge:
            case settings.NotMeasured(why=why):
                verdicts.append(_not_measured(claim, why))
            case settings.ScoreQuantity() as wanted:
                verdicts.append(_judge_scores(claim, wanted, evidence))
            case settings.RunQuantity() as wanted:
                why = f"the experiment {wanted.experiment} has not been run"
                found = evidence.experiment(wanted.experiment)
                judged = [_judge_run(claim, wanted, data) for data in found]
                verdicts += judged or [_not_measured(claim, why)]
    return verdicts


def _not_measured(claim: Claim, why: str, run: str | None = None) -> ClaimVerdict:
    printed = claim.model_dump(include={"claim", "source", "published"})
    return ClaimVerdict(**printed, why=f"Not measured: {why}. {claim.note}".rstrip(), run=run)


def level_of(cells: int) -> float:
    """The level of each of this many intervals (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / max(1, cells)


def _judge_scores(claim: Claim, wanted: settings.ScoreQuantity, evidence: Evidence) -> ClaimVerdict:
    models = dict.fromkeys(model_and_arm(name)[0] for name in wanted.arms)
    datasets = wanted.datasets or evidence.datasets(next(iter(models)))
    pairs = {}
    for dataset, pair in product(datasets, pairwise(wanted.arms)):
        one, other = paired(evidence.parts, pair, dataset)
        # There have to be two rows, and something to divide by where it is divided.
        if len(one) >= 2 and (not wanted.ratio or any(other)):
            pairs[dataset, pair] = one, other
    level, cells, places = level_of(len(pairs)), [], set()
    for (dataset, pair), (one, other) in pairs.items():
        compare = arm_scores.ratio_of if wanted.ratio else arm_scores.difference_of
        part = evidence.parts[Case(model_and_arm(pair[0])[0], dataset)]
        found = compare(one, other, level, nats=part.likelihood)
        if found is None:  # The chunks may be worth nothing.
            continue
        value, interval = found.value, intervals.Interval(found.low, found.high, level)
        (model, first), (another, second) = map(model_and_arm, pair)
        names = (first, second) if model == another else pair
        what = f" {'over' if wanted.ratio else 'less'} ".join(names)
        cells.append(JudgedCell(dataset, what, value, interval, wanted.judge(interval), len(one)))
        places.add("{gpu}, {dtype}".format_map(part.provenance))
    if not cells:
        measured = any(rows_of(evidence.parts, wanted.arms[0], dataset) for dataset in datasets)
        why = "no score is known to be above zero" if measured else "no scores of these arms"
        return _not_measured(claim, why)
    weights = ", ".join(model for model in models if model != BASE) or settings.TESTBED
    rows = [cell.samples for cell in cells]
    run = f"{evidence.scores}: {' and '.join(sorted(places))}; {weights}, {ends(rows)} rows a set"
    return _verdict(claim, wanted, cells, run, claim.note)


def _judge_run(claim: Claim, wanted: settings.RunQuantity, data: ExperimentData) -> ClaimVerdict:
    """A verdict on the places that a claim is about, of which some may not be measured."""

    def first(names: str | Sequence[str], known: Sequence[str]) -> str:
        every = [names] if isinstance(names, str) else names
        return next((name for name in every if name in known), "")

    arm, over = first(wanted.arm, data.arms), first(wanted.over, data.arms)
    against = first(wanted.against, data.labels)
    labels = [on for on in wanted.at or data.labels if on != against and on in data.labels]
    if not arm or (wanted.over and not over) or (wanted.against and not against):
        labels = []
    level = level_of(len(labels))
    found = (_run_cell(wanted, data, (on, against), (arm, over), level) for on in labels)
    cells = [cell for cell in found if cell is not None]
    about = data.conditions
    run = f"data/{data.name}.json: {about['hardware']}, commit {about['commit']}; "
    run += f"{about['model']}, n={len(data.seeds)}"
    notes = [claim.note, *(note for on, note in claim.device_notes.items() if on == data.device)]
    if not cells:
        noted = claim.model_copy(update={"note": " ".join(filter(None, notes))})
        return _not_measured(noted, "arms or points are missing in the data", run)
    judged = {cell.on for cell in cells}
    if without := [label for label in labels if label not in judged]:
        notes.insert(0, f"Not measured at {', '.join(without)}.")
    return _verdict(claim, wanted, cells, run, *notes)


def _run_cell(
    wanted: settings.RunQuantity,
    data: ExperimentData,
    labels: tuple[str, str],
    arms: tuple[str, str],
    level: float,
) -> JudgedCell | None:
    """A place and what it is compared with, an arm and what it is compared with; these or none.

    None where no seed has values of all of them.
    """
    (label, against), (arm, over) = labels, arms

    def quantity(on: str) -> Mapping[int, float]:
        found = data.values(on, arm, wanted.metric)
        return _log_ratios(found, data.values(on, over, wanted.metric)) if over else found

    values = quantity(label)
    if against:
        here, there = values, quantity(against)
        values = {seed: here[seed] - there[seed] for seed in here.keys() & there.keys()}
        if not over:
            values = _log_ratios(here, there)
    if not values:
        return None
    divisor = 1.0
    if wanted.exponent:  # By how many times longer prompts are.
        sizes = {point.label: point.facts.get("mean_tokens") or 0 for point in data.points}
        divisor = log(sizes[label] / sizes[against])
    found = intervals.sum_clusters(np.array([value / divisor for value in values.values()]))
    few = len(values) <= intervals.FEW
    over_seeds = intervals.StudentMean.of(found) if few else intervals.MeanBootstrap(found)
    value, interval = found.mean, over_seeds.interval(level)
    if (over or against) and not wanted.exponent:
        value = exp(value)
        if interval is not None:
            interval = interval.exp()
    verdict = wanted.judge(interval)
    if over and wanted.metric.startswith("peak"):
        # Where the pool cuts off both peaks, they tell nothing of demand.
        shares = [data.spread(label, each, "peak_pct") for each in arms]
        if all(share and (share.number or 0) >= FULL_POOL for share in shares):
            verdict = "undecided"
    what = f"{arm} over {over}" if over else arm
    return JudgedCell(label, what, value, interval, verdict, len(values))


def _log_ratios(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """By seed; without those where one of the two is not positive."""
    seeds = [seed for seed in first.keys() & second.keys() if first[seed] > 0 and second[seed] > 0]
    return {seed: log(first[seed] / second[seed]) for seed in seeds}


def _verdict(
    claim: Claim, bounds: settings.Bounds, cells: Sequence[JudgedCell], run: str, *notes: str
) -> ClaimVerdict:
    """What decides, and where the claim holds, fails and is undecided.

    A place with several pairs has the verdict of the worst of them.
    """

    def least(cell: JudgedCell) -> tuple[bool, float]:
        # A difference of 0 or a ratio of 1 shows nothing: any other place tells more.
        return cell.value in (0.0, 1.0), min(cell.value - bounds.least, bounds.most - cell.value)

    verdict = min((cell.verdict for cell in cells), key=_ORDER.index)
    shown = min((cell for cell in cells if cell.verdict == verdict), key=least)
    worst: dict[str, Verdict] = {}
    for cell in cells:
        worst[cell.on] = min(worst.get(cell.on, "holds"), cell.verdict, key=_ORDER.index)
    by_verdict = {v: [on for on, found in worst.items() if found == v] for v in reversed(_ORDER)}
    places = "; ".join(f"{v} at {', '.join(on)}" for v, on in by_verdict.items() if on)
    if any(cell.interval is None for cell in cells):
        places += " (a single run has no interval)"
    found = shown.interval
    return ClaimVerdict(
        **claim.model_dump(include={"claim", "source", "published"}),
        ours=f"{number(shown.value)} ({shown.on}: {shown.what})",
        interval=(float(f"{found.low:.4g}"), float(f"{found.high:.4g}")) if found else None,
        verdict=verdict,
        why=" ".join(filter(None, (f"{places[0].upper()}{places[1:]}.", *notes))),
        run=run,
        cells=cells,
    )


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _shown(title: str, one: ClaimVerdict) -> tuple[str, str]:
    """Whose claim it is, and what to say of it where its least number, as in 2 to 7x, is beyond."""
    printed = re.search(r"((?:[\d.]+(?:, | and | to ))*[\d.]+)x", one.published)
    least = min(map(float, re.findall(r"[\d.]+", printed[1]))) if printed else 0.0
    short = one.interval is not None and one.interval[1] < least
    verdict = DIRECTION if one.verdict == "holds" and short else one.verdict
    return f"ours, on {title}" if one.published.startswith("not ") else title, verdict


def write_claims(document: Path, papers: Sequence[tuple[str, Path]]) -> None:
    """Replace what is between the marks of a document by the table of the papers' verdicts.

    `papers` are (what to call it, folder with its verdicts); claims that one does not print are
    ours. Raises ConfigError for a document without marks, DataError for unreadable verdicts.
    """
    text = document.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError(
            f"`claims` {document}: has not one pair of marks", hint=f"add {BEGIN} and {END}"
        )
    counts, rows = dict[str, Counter[str]](), []
    order = ("fails", "holds", DIRECTION, "undecided")  # Negative findings first.
    for title, folder in papers:
        path = folder / VERDICTS
        try:
            found = TypeAdapter(list[ClaimVerdict]).validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        shown = [(*_shown(title, one), one) for one in found]
        for whose, verdict, one in sorted(shown, key=lambda claim: order.index(claim[1])):
            counts.setdefault(whose, Counter())[verdict] += 1
            where, _, weights = (one.run or "").partition("; ")
            ours = one.ours or "not measured"
            ours += " [{:g}, {:g}]".format(*one.interval) if one.interval else ""
            rows.append((whose, verdict, one.claim, one.published, ours, where, weights))
    head = ("claimed by", "verdict", "claim", "published", "ours, 95 % interval", "where")
    sums: list[list[Value]] = [[who, *(n[each] for each in order)] for who, n in counts.items()]
    counted = report_table("", "", ("claimed by", *order), sums).markdown(right=1)
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    claims = report_table("", "", (*head, "weights, n"), rows).markdown()
    write_whole(document, f"{before}{BEGIN}\n{counted}\n\n{claims}\n{END}{after}".encode())

"""The page about trained models: verdicts, scores of every arm, published gaps beside ours."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from picbench.measure.algorithms.row_intervals import RowInterval, difference_of
from picbench.measure.algorithms.scored_part import Case, ScoredPart, file_name, read_parts
from picbench.output import markdown
from picbench.output.figures.paper_canvas import Panel
from picbench.output.figures.paper_panels import Spot, draw_dots
from picbench.papers.accuracy.accuracy_settings import NAME, AccuracySettings, PublishedGap
from picbench.papers.judging.claim import Claim, ScoreQuantity
from picbench.papers.judging.evidence import BASE, Evidence
from picbench.papers.judging.judged_cell import CONFIDENCE, RESAMPLES
from picbench.papers.judging.judgement import ClaimVerdict, judge_all, write_verdicts
from picbench.papers.paper_page import PAGE, claims_section, places_table
from picbench.papers.report_table import Cell, MeanCell, ReportTable
from picbench.papers.reproduction import SCORES
from picbench.statistics.row_means import ratio_interval
from picbench.whole_files import write_whole

_FULL = "full"


@dataclass(frozen=True, slots=True)
class ArmGap:
    """An arm against full recompute on the same rows; `kept` is None where that scores nothing."""

    score: float
    difference: RowInterval
    kept: RowInterval | None
    linked: float


@dataclass(frozen=True, slots=True)
class ModelScores:
    """A model's parts by data set, where they are, and what its arms come to on each."""

    model: str
    parts: Mapping[str, ScoredPart]
    folder: str
    gaps: Mapping[tuple[str, str], ArmGap] = field(default_factory=dict)

    @property
    def conditions(self) -> str:
        """Where and on which rows it was measured, in a sentence."""
        facts = [part.facts for part in self.parts.values()]
        places = (f"{f['gpu']}, vLLM {f['vllm']}, {f['dtype']}" for f in facts)
        where = ", ".join(dict.fromkeys(places))
        commits = ", ".join(dict.fromkeys(str(f["commit"])[:7] for f in facts))
        return f"{where}; commit {commits}."

    @property
    def rows(self) -> str:
        """How many rows of which sets, and where they are from."""
        return ", ".join(
            f"{dataset} {part.rows} ({part.facts.get('rows', 'bundled')})"
            for dataset, part in self.parts.items()
        )

    def gap(self, dataset: str, arm: str) -> ArmGap | None:
        """An arm on a data set; None where it has not two rows."""
        return self.gaps.get((dataset, arm))


def _gaps(parts: Mapping[str, ScoredPart], arms: Sequence[str]) -> dict[tuple[str, str], ArmGap]:
    return {
        (dataset, arm): _gap(part, arm)
        for dataset, part in parts.items()
        for arm in arms
        if arm in part.arms and part.rows > 1
    }


def _gap(part: ScoredPart, arm: str) -> ArmGap:
    rows, full = part.arms[arm], part.arms[_FULL].score
    return ArmGap(
        fmean(rows.score),
        difference_of(rows.score, full),
        _kept(rows.score, full),
        sum(rows.linked) / sum(part.chunk),
    )


def _kept(scores: Sequence[float], full: Sequence[float]) -> RowInterval | None:
    found = ratio_interval(scores, full, CONFIDENCE, RESAMPLES) if any(full) else None
    return RowInterval(fmean(scores) / fmean(full), found.low, found.high) if found else None


def write_accuracy(
    settings: AccuracySettings, folder: Path, scores: Path | None = None
) -> list[ClaimVerdict]:
    """Write page, verdicts, tables and figures from the scores below `folder`; the verdicts.

    `scores` is a folder with the testbed's, which are shown beside those of other models.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = [
        replace(one, gaps=_gaps(one.parts, settings.arms))
        for one in read_models(settings, folder, scores)
    ]
    verdicts = [verdict for one in found for verdict in judge_model(settings, one)]
    write_verdicts(verdicts, folder)
    places_table(verdicts).write(folder)
    _scores_table(settings, found).write(folder)
    lines = [*_head(found), *claims_section(verdicts)]
    for one in found:
        lines += _model_section(settings, one, folder)
    gaps = gap_table(settings, found)
    gaps.write(folder)
    lines += ["## Published gaps", "", *_ABOUT_GAPS, gaps.markdown(), *_AGAIN]
    write_whole(folder / PAGE, "\n".join(lines).encode())
    return verdicts


def read_models(settings: AccuracySettings, folder: Path, scores: Path | None) -> list[ModelScores]:
    """The models that were measured, the testbed last; whole rows of the settings' data sets."""
    found: dict[str, ModelScores] = {}
    own = folder / SCORES
    for place, only in ((own, None), (scores, BASE)):
        if place is None or not any(place.glob("*.json")):
            continue
        parts = {part.case: part for part in read_parts(place)}
        for model in dict.fromkeys(case.model for case in parts):
            if model in found or only not in (None, model):
                continue
            of = {d: parts[case] for d in settings.datasets if (case := Case(model, d)) in parts}
            if of:
                where = SCORES if place == own else place.as_posix()
                found[model] = ModelScores(model, of, where)
    return sorted(found.values(), key=lambda one: (one.model == BASE, one.model))


def judge_model(settings: AccuracySettings, one: ModelScores) -> list[ClaimVerdict]:
    """A verdict for each claim about a model."""
    parts = {part.case: part for part in one.parts.values()}
    claims = [of_model(claim, one.model) for claim in settings.claims]
    return judge_all(claims, Evidence({}, parts, one.folder))


def of_model(claim: Claim, model: str) -> Claim:
    """The claim about a model's scores."""
    assert isinstance(claim.judge, ScoreQuantity)
    judge = claim.judge.model_copy(update={"arms": [f"{model}/{arm}" for arm in claim.judge.arms]})
    return claim.model_copy(update={"claim": f"{model}: {claim.claim}", "judge": judge})


def _head(found: Sequence[ModelScores]) -> Iterator[str]:
    yield "# Accuracy of trained models"
    yield ""
    trained = [one.model for one in found if one.model.partition(":")[0] != BASE]
    if trained:
        yield f"Measured: {', '.join(trained)}."
    elif not found:
        yield f"Nothing has been measured yet: `picbench reproduce {NAME} --models ID,ID`."
    else:
        yield (
            "**No trained model from elsewhere has been measured here.** What follows is the "
            "testbed's, on synthetic rows; it shows what the command makes, and nothing about "
            "other models. Whoever has weights runs:"
        )
        yield ""
        yield f"    picbench reproduce {NAME} --models ID,ID --device cuda --dry-run"
        yield f"    picbench reproduce {NAME} --models ID,ID --device cuda"
    yield ""


def _model_section(settings: AccuracySettings, one: ModelScores, folder: Path) -> Iterator[str]:
    yield f"## {one.model}"
    yield ""
    yield f"{one.conditions} Rows: {one.rows}."
    yield ""
    name = f"kept-{file_name(one.model)}"
    if _draw(settings, one, folder / name):
        yield f"![what arms keep of full recompute's score, {one.model}]({name}.png)"
        yield ""
    yield "Mean score, and its difference to full recompute with a 95 % interval (paired by row):"
    yield ""
    head = ("arm", *one.parts)
    rows = [
        (f"`{arm}`", *(_cell(one.gap(dataset, arm), arm) for dataset in one.parts))
        for arm in settings.arms
        if any(arm in part.arms for part in one.parts.values())
    ]
    yield markdown.table(head, rows)
    yield ""


def _cell(found: ArmGap | None, arm: str) -> str:
    if found is None:
        return "-"
    return f"{found.score:.3f}" if arm == _FULL else f"{found.score:.3f}; {found.difference.signed}"


def _draw(settings: AccuracySettings, one: ModelScores, base: Path) -> bool:
    """What arms keep, with published values of the same data set hollow; whether there is any."""
    ours = {
        f"{dataset}{'' if 'rows' in part.facts else '-like'}": {
            arm: Spot(100 * kept.value, 0, 100 * kept.low, 100 * kept.high)
            for arm in settings.drawn
            if (found := one.gap(dataset, arm)) and (kept := found.kept)
        }
        for dataset, part in one.parts.items()
    }
    ours = {name: spots for name, spots in ours.items() if spots}
    if not ours:
        return False
    printed: dict[str, dict[str, Spot]] = {}
    for gap in settings.gaps:
        for name in (gap.dataset, f"{gap.dataset}-like"):
            printed.setdefault(name, {}).update(_kept_spots(gap))
    counts = sorted({part.rows for part in one.parts.values()})
    rows = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
    weights = "testbed weights, synthetic rows" if one.model == BASE else one.model
    sources = ", ".join(dict.fromkeys(gap.source for gap in settings.gaps if gap.dataset))
    note = (
        f"Scores: {weights}, n={rows}; {one.conditions} Bars: 95 %. Hollow: other models and "
        f"harnesses ({sources}), bars: what they print."
    )
    draw_dots(Panel("kept, % of full recompute's score", "", note), ours, printed, base)
    return True


def _kept_spots(gap: PublishedGap) -> dict[str, Spot]:
    found = {arm: gap.kept(arm) for arm in gap.arms}
    return {arm: Spot((low + high) / 2, 0, low, high) for arm, (low, high) in found.items()}


def _scores_table(settings: AccuracySettings, found: Sequence[ModelScores]) -> ReportTable:
    """Everything in one table, for programs."""
    rows = [
        [one.model, dataset, arm, part.rows, *_numbers(gap)]
        for one in found
        for dataset, part in one.parts.items()
        for arm in settings.arms
        if (gap := one.gap(dataset, arm)) is not None
    ]
    less, kept = ("less full", "low", "high"), ("kept", "kept low", "kept high")
    head = ("model", "data set", "arm", "rows", "score", *less, *kept, "linked")
    return ReportTable("arms", "Every arm on every data set", head, rows)


def _numbers(gap: ArmGap) -> Iterator[Cell]:
    less, kept = gap.difference, gap.kept
    yield from (gap.score, less.value, less.low, less.high)
    yield from (kept.value, kept.low, kept.high) if kept else (None, None, None)
    yield gap.linked


_ABOUT_GAPS = (
    "Harnesses disagree about scores: full recompute by one model has 0.36 to 0.54 on 2WikiMQA. "
    "Only differences on the same rows compare, and these were measured on other prompts. In "
    "points of 100.",
    "",
)

_AGAIN = (
    "## Again",
    "",
    f"    picbench reproduce {NAME} --models ID,ID --device cuda --output DIR",
    f"    picbench figures {NAME} --data results/papers --scores results/testbed/algorithms",
    "",
    "The first measures, goes on where it was stopped, and with `--dry-run` says how long it will "
    "take; the second makes this page from `scores/` below it, and from the testbed's scores.",
    "",
)


def gap_table(settings: AccuracySettings, found: Sequence[ModelScores]) -> ReportTable:
    """A line for each published gap and each of our models on the same data set."""
    rows: list[list[Cell]] = []
    for gap in settings.gaps:
        for arm in gap.arms:
            theirs: list[Cell] = [gap.source, gap.model, gap.rows, arm, _range(gap.gap(arm))]
            # Others were tuned, as those models here are not.
            ours = list(_our_gaps(gap.dataset, arm, found)) if arm in settings.arms else []
            rows += [theirs + cells for cells in ours or [[None, None, None]]]
    head = ("source", "model", "rows", "arm", "gap", "our model", "our gap", "95 %")
    return ReportTable("published-gaps", "Arms less full recompute", head, rows)


def _our_gaps(dataset: str, arm: str, found: Sequence[ModelScores]) -> Iterator[list[Cell]]:
    for one in found:
        if dataset and (gap := one.gap(dataset, arm)) is not None:
            less = gap.difference
            yield [one.model, MeanCell(100 * less.value, None, 1), _interval(less)]


def _range(ends: tuple[float, float]) -> str:
    low, high = (f"{end:+.1f}" for end in ends)
    return low if low == high else f"{low} to {high}"


def _interval(found: RowInterval) -> str:
    return f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"

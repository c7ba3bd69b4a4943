"""The page of every algorithm: scores, the frontier, and whether published orders hold here."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from picbench.figures.frontier import FrontierPoint, draw_frontier
from picbench.papers.arm_scores import (
    KEPT,
    MEPIC,
    OWN,
    ArmScore,
    Case,
    RowInterval,
    ScoredPart,
    difference_of,
    labels,
    ran,
    read_parts,
    score_arms,
)
from picbench.run.measurements import Outcome, ScoredPage
from picbench.statistics.intervals import RESAMPLES
from picbench.tables.page import page, save
from picbench.tables.table import NOTHING, table
from picbench.workloads.synthetic.generate import DATASETS

OrderVerdict = Literal["fails", "undecided", "holds"]

#: Worst first.
VERDICTS: tuple[OrderVerdict, ...] = ("fails", "undecided", "holds")

#: A model and an arm.
Where = tuple[str, str]

#: Scores of a workload, by data set in their usual order, and by arm.
Scores = dict[str, dict[str, ArmScore]]

#: What tables call arms, by spec.
Names = Mapping[str, str]

#: The model whose frontier is drawn, and its tuned variants.
BASE = "testbed"
TUNED = (f"{BASE}:block", f"{BASE}:link")
TUNED_ARMS = ("block-attention", "kvlink:n=5")


@dataclass(frozen=True, slots=True)
class PublishedOrder:
    """A claim: each of `arms` scores at least as much as the one after it."""

    claim: str
    source: str
    arms: tuple[Where, ...]

    @property
    def steps(self) -> list[tuple[Where, Where]]:
        """The pairs that are compared."""
        return list(pairwise(self.arms))


@dataclass(frozen=True, slots=True)
class OrderStep:
    """Two arms on a data set: the first one's score less the second one's, paired by row."""

    better: Where
    worse: Where
    dataset: str
    difference: RowInterval

    @property
    def verdict(self) -> OrderVerdict:
        """Whether the interval is on one side of zero, or of no width there."""
        if self.difference.low >= 0:
            return "holds"
        return "fails" if self.difference.high < 0 else "undecided"


def _order(claim: str, source: str, *arms: str) -> PublishedOrder:
    """Arms best first; ``model/arm`` is an arm of another model than the testbed."""
    found = [(arm.rpartition("/")[0] or BASE, arm.rpartition("/")[2]) for arm in arms]
    return PublishedOrder(claim, source, tuple(found))


#: Every claim is the papers', about their models and data sets.
ORDERS: Sequence[PublishedOrder] = (
    _order("full recompute is prefix caching", "vLLM", "full", "prefix", "full"),
    _order("full >= cacheblend >= naive", "2405.16444", "full", "cacheblend:r=0.15", "naive"),
    _order(
        "cacheblend: more tokens, higher score",
        "2405.16444",
        *(f"cacheblend:r={r}" for r in (0.5, 0.3, 0.15, 0.05)),
        "naive",
    ),
    _order(
        "picked by deviation >= the first tokens of chunks, as many of them",
        "2405.16444",
        "cacheblend:r=0.15",
        "cacheblend:r=0.15:select=first",
    ),
    _order(
        "epic: more tokens, higher score",
        "2410.15332",
        "full",
        *(f"epic:k={k}" for k in (64, 32, 16, 8, 4, 2, 1)),
        "naive",
    ),
    _order("LegoLink-0 >= naive", "2410.15332", "epic:k=0", "naive"),
    _order("LegoLink-16 >= cacheblend", "2410.15332", "epic:k=16", "cacheblend:r=0.15"),
    _order("mepic >= epic", "2512.16822", "mepic", "epic:k=16"),
    _order("mepic >= cacheblend", "2512.16822", "mepic", "cacheblend:r=0.15"),
    _order("picked by the question >= by position", "2602.02579", "mepic:select=question", "mepic"),
    _order("tuned >= untuned", "2409.15355", "testbed:block/block-attention", "block-attention"),
    _order(
        "block-attention, tuned: as full recompute",
        "2409.15355",
        "testbed:block/block-attention",
        "testbed:block/full",
    ),
    _order("tuned >= untuned", "2502.16002", "testbed:link/kvlink:n=5", "kvlink:n=5"),
    _order(
        "kvlink, tuned >= naive on that model",
        "2502.16002",
        "testbed:link/kvlink:n=5",
        "testbed:link/naive",
    ),
    _order("minipic without dependent tokens is naive", "2606.13126", "naive", "minipic", "naive"),
    _order("prompt-cache: as naive", "2311.04934", "naive", "prompt-cache", "naive"),
)


def judge(order: PublishedOrder, parts: Mapping[Case, ScoredPart]) -> list[OrderStep]:
    """The steps of an order on all data sets on which both of its models were measured."""

    def scores(dataset: str, where: Where) -> Sequence[float]:
        part = parts.get(Case(where[0], dataset))
        return part.arms[where[1]].score if part and where[1] in part.arms else ()

    datasets = dict.fromkeys(
        case.dataset for case in parts if case == Case(case.model, case.dataset)
    )
    return [
        OrderStep(better, worse, dataset, difference_of(one[:rows], other[:rows]))
        for better, worse in order.steps
        for dataset in datasets
        if (one := scores(dataset, better)) and (other := scores(dataset, worse))
        if (rows := min(len(one), len(other)))
    ]


@dataclass(frozen=True, slots=True)
class FrontierArm:
    """An arm of ours on all data sets: the least it keeps, and where it links more than MEPIC."""

    arm: str
    worst: ArmScore
    costlier: tuple[str, ...]
    below: tuple[str, ...]
    surely_above: int
    datasets: int

    @property
    def reached(self) -> bool:
        """Whether it keeps enough on every data set and links no more than MEPIC on any."""
        return not self.costlier and not self.below


def frontier(scores: Mapping[str, Mapping[str, ArmScore]]) -> list[FrontierArm]:
    """Our arms, best first, by the scores of a model: data set, then arm."""
    found = []
    for arm in (arm for arm in next(iter(scores.values())) if arm in OWN):
        on = {dataset: arms[arm] for dataset, arms in scores.items()}
        costlier = (d for d, score in on.items() if score.linked > scores[d][MEPIC].linked)
        found.append(
            FrontierArm(
                arm,
                min(on.values(), key=lambda score: score.kept.value),
                tuple(costlier),
                tuple(d for d, score in on.items() if score.kept.value < KEPT),
                sum(score.kept.low >= KEPT for score in on.values()),
                len(on),
            )
        )
    return sorted(found, key=lambda arm: (not arm.reached, -arm.worst.kept.value))


def write(folder: Path, output: Path) -> str:
    """Write ``algorithms.md``, ``.json`` and the figure from the parts in `folder`.

    Returns the page.
    """
    usual = list(DATASETS)
    found = sorted(
        read_parts(folder),
        key=lambda part: usual.index(part.case.dataset) if part.case.dataset in usual else 99,
    )
    parts = {part.case: part for part in found}
    workloads = group(parts)
    judged = [(order, judge(order, parts)) for order in ORDERS]
    shown = render(parts, workloads, judged)
    document = {
        "schema": 1,
        "workloads": {name: _summary(scores) for name, scores in workloads.items()},
        "orders": [
            {
                "claim": order.claim,
                "source": order.source,
                "pairs": [asdict(step) | {"verdict": step.verdict} for step in steps],
            }
            for order, steps in judged
        ],
    }
    save(output / "algorithms", document, shown)
    if BASE in workloads:
        drawn = [part for case, part in parts.items() if case == Case(case.model, case.dataset)]
        _draw(workloads, _caption(drawn), output)
    return shown


def group(parts: Mapping[Case, ScoredPart]) -> dict[str, Scores]:
    """Scores by workload (`Case.workload`), which for all rows of a model is its name."""
    found: dict[str, Scores] = {}
    for case in sorted(parts, key=lambda case: (case.first, case.drop, case.model)):
        found.setdefault(case.workload, {})[case.dataset] = score_arms(parts[case])
    return found


def _summary(scores: Scores) -> dict[str, dict[str, dict[str, Any]]]:
    """The scores as the file has them: intervals are value, low and high."""

    def fields(score: ArmScore) -> dict[str, Any]:
        found = asdict(score) | {
            name: list(asdict(getattr(score, name)).values()) for name in ("difference", "kept")
        }
        return {name: value for name, value in found.items() if name not in ("case", "arm")}

    return {
        dataset: {arm: fields(score) for arm, score in arms.items()}
        for dataset, arms in scores.items()
    }


def _draw(workloads: Mapping[str, Scores], caption: str, output: Path) -> None:
    """The figure: all arms of the base model, and of its tuned variants what they are tuned for."""
    tuned = [
        arms[arm]
        for model in TUNED
        for arms in workloads.get(model, {}).values()
        for arm in TUNED_ARMS
        if arm in arms
    ]
    points = {
        dataset: [_point(score, score.arm) for score in arms.values()]
        + [_point(s, f"{s.case.model}/{s.arm}") for s in tuned if s.case.dataset == dataset]
        for dataset, arms in workloads[BASE].items()
    }
    base = [score for arms in workloads[BASE].values() for score in arms.values()]
    bars = f"Bars: 95 % intervals over {_counts(base)} rows"
    bars += f", of tuned models {_counts(tuned)}." if tuned else "."
    draw_frontier(points, (MEPIC, KEPT), f"{caption} {bars}", output / "algorithms")


def _point(score: ArmScore, name: str) -> FrontierPoint:
    return FrontierPoint(name, score.share, score.kept.value, score.kept.low, score.kept.high)


def _counts(scores: Sequence[ArmScore]) -> str:
    rows = sorted({score.rows for score in scores})
    return " to ".join(dict.fromkeys((str(rows[0]), str(rows[-1]))))


_TERMS = (
    "Linked are the tokens that a request computes besides its text when all chunks, and no "
    "computed block, are in the cache: recomputed in chunks, or added to the prompt (link tokens, "
    "BOS, visible pads). Differences and ratios are to full recompute by the same model on the "
    f"same rows, with 95 % bootstrap intervals over rows ({RESAMPLES:,} resamples, paired). An "
    "interval of no width says that no row differs, which is compatible with up to 1.5 % of other "
    "rows differing (three in 200)."
)

_FRONTIER = (
    f"Of our own arms, which keep {KEPT:.2f} of full recompute's score on every data set and "
    "link no more than mepic with one block a chunk?"
)

_ORDERS = (
    "Each order is judged by the pairs of neighbours in it. A pair holds if the interval of "
    "the difference is not below zero, fails if all of it is, and is undecided otherwise; an "
    "order of several pairs is as good as its worst one. In a cell: the verdict, the least "
    "difference of a pair, and of several pairs how many hold, are undecided and fail. Of "
    "pairs of equally good arms one in forty fails by chance. The claims are the papers', "
    "about other models and data sets."
)


def render(
    parts: Mapping[Case, ScoredPart],
    workloads: Mapping[str, Scores],
    judged: Sequence[tuple[PublishedOrder, Sequence[OrderStep]]],
) -> str:
    """The page, in Markdown."""
    names = labels(arm for part in parts.values() for arm in part.arms)
    texts = [_caption(parts.values()), _TERMS]
    if BASE in workloads:
        texts += ["![accuracy against linked tokens](algorithms.svg)", "## The frontier", _FRONTIER]
        texts.append(_frontier_table(frontier(workloads[BASE]), names))
    for name, scores in workloads.items():
        texts += _workload_section(name, scores, names, parts)
    texts += _orders_section([(order, steps) for order, steps in judged if steps], names)
    return page("Every algorithm: accuracy against linked tokens", *texts)


def _frontier_table(found: Sequence[FrontierArm], names: Names) -> str:
    above = f"interval above {KEPT:.2f}"
    head = ("arm", "reached", "least kept", above, "below", "links more than mepic")
    rows = [
        (
            f"`{names[arm.arm]}`",
            "yes" if arm.reached else "no",
            f"{arm.worst.kept} ({arm.worst.case.dataset})",
            f"{arm.surely_above} of {arm.datasets}",
            ", ".join(arm.below) or "none",
            ", ".join(arm.costlier) or "none",
        )
        for arm in found
    ]
    return table(head, rows)


def _workload_section(
    name: str, scores: Scores, names: Names, parts: Mapping[Case, ScoredPart]
) -> Iterator[str]:
    measured = [parts[next(iter(arms.values())).case] for arms in scores.values()]
    counts = ", ".join(
        f"{p.case.dataset} {p.rows}{f' of {p.wanted}' if p.rows != p.wanted else ''}"
        for p in measured
    )
    arms = dict.fromkeys(arm for found in scores.values() for arm in found)

    def drawn(text: Callable[[ArmScore], str]) -> str:
        rows = (
            [
                f"`{names[arm]}`",
                *(text(found[arm]) if arm in found else NOTHING for found in scores.values()),
            ]
            for arm in arms
        )
        return table(["arm", *scores], rows)

    yield f"## {name}"
    yield f"{_where_measured(measured)} Rows: {counts}."
    yield "Mean score, and linked tokens a request:"
    yield drawn(lambda score: f"{score.score:.3f} ({score.linked:,.0f})")
    yield "Difference to full recompute:"
    yield drawn(lambda score: score.difference.signed)
    yield "Share of full recompute's score that is kept:"
    yield drawn(lambda score: str(score.kept))


def _orders_section(
    judged: Sequence[tuple[PublishedOrder, Sequence[OrderStep]]], names: Names
) -> Iterator[str]:
    datasets = list(dict.fromkeys(step.dataset for _, steps in judged for step in steps))
    rows = [
        [order.claim, order.source, *(_order_cell(steps, dataset) for dataset in datasets)]
        for order, steps in judged
    ]
    yield "## Published orders"
    yield _ORDERS
    yield table(["claim", "source", *datasets], rows)
    failed = [
        f"- {step.dataset}: `{_where(step.better, names)}` - `{_where(step.worse, names)}`: "
        f"{step.difference.signed}"
        for _, steps in judged
        for step in steps
        if step.verdict == "fails"
    ]
    if failed:
        yield "Pairs that fail:"
        yield "\n".join(failed)


def _order_cell(steps: Sequence[OrderStep], dataset: str) -> str:
    found = [step for step in steps if step.dataset == dataset]
    if not found:
        return NOTHING
    counts = Counter(step.verdict for step in found)
    verdict = next(verdict for verdict in VERDICTS if counts[verdict])
    least = min(found, key=lambda step: step.difference.value).difference.signed
    numbers = f" ({'/'.join(str(counts[v]) for v in reversed(VERDICTS))})" if len(found) > 1 else ""
    return f"{verdict} {least}{numbers}"


def _where(where: Where, names: Names) -> str:
    model, arm = where
    return names[arm] if model == BASE else f"{model} {names[arm]}"


def _caption(parts: Iterable[ScoredPart]) -> str:
    return (
        f"{_where_measured(parts)} Synthetic rows, greedy replies. All arms of a model in "
        "one engine, their requests in batches of random order. Scores: word F1; rouge-l of samsum "
        "and multi_news."
    )


def _where_measured(parts: Iterable[ScoredPart]) -> str:
    """A sentence for each model and place: what ran where."""
    found: dict[str, dict[str, None]] = {}
    for part in parts:
        found.setdefault(ran(part.facts), {})[part.case.model] = None
    return " ".join(f"{', '.join(models)}: {place}" for place, models in found.items())


def scored_page(settings: ScoredPage) -> Outcome:
    """See `ScoredPage`."""
    return Outcome(write(settings.parts, settings.output))

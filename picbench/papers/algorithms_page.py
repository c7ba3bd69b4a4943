"""The page of every algorithm: scores, the frontier, and whether published orders hold here."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from picbench.engines.algorithms import Registry
from picbench.errors import DataError
from picbench.figures.frontier import FrontierPoint, draw_frontier
from picbench.papers.arm_scores import (
    FULL,
    MEPIC,
    OWN,
    ArmScore,
    Case,
    RowInterval,
    ScoredPart,
    difference_of,
    ran,
    read_parts,
)
from picbench.papers.data import ends
from picbench.run.measurements import Outcome, ScoredPage
from picbench.statistics.intervals import RESAMPLES
from picbench.tables.page import page, save
from picbench.tables.table import NOTHING, table
from picbench.workloads.synthetic.generate import DATASETS

#: Share of full recompute's score that an arm of the frontier keeps on every data set.
KEPT = 0.97

#: A model and an arm.
Where = tuple[str, str]

#: Scores of a workload, by data set in their usual order, and by arm.
Scores = dict[str, dict[str, ArmScore]]

#: What tables call arms, by spec.
Names = Mapping[str, str]

#: The model whose frontier is drawn, and what its tuned variants are tuned for.
BASE = "testbed"
TUNED = ((f"{BASE}:block", "block-attention"), (f"{BASE}:link", "kvlink:n=5"))


@dataclass(frozen=True, slots=True)
class PublishedOrder:
    """A claim: each of `arms` scores at least as much as the one after it."""

    claim: str
    source: str
    arms: tuple[Where, ...]


@dataclass(frozen=True, slots=True)
class OrderStep:
    """Two arms on a data set: the first one's score less the second one's, paired by row.

    The verdict is whether the interval is on one side of zero, or of no width there.
    """

    better: Where
    worse: Where
    dataset: str
    difference: RowInterval
    verdict: str


#: An order, and its steps on all data sets.
Judged = tuple[PublishedOrder, Sequence[OrderStep]]


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

    steps = []
    for (better, worse), dataset in product(
        pairwise(order.arms), dict.fromkeys(case.dataset for case in parts)
    ):
        one, other = scores(dataset, better), scores(dataset, worse)
        if rows := min(len(one), len(other)):
            less = difference_of(one[:rows], other[:rows])
            verdict = "holds" if less.low >= 0 else "fails" if less.high < 0 else "undecided"
            steps.append(OrderStep(better, worse, dataset, less, verdict))
    return steps


def score_arms(part: ScoredPart) -> dict[str, ArmScore]:
    """All arms of a part, by spec.

    Raises DataError for a single row, and where full recompute scores nothing, or might have in
    other rows.
    """
    if part.rows >= 2 and ArmScore.of(part, FULL).kept:
        return {arm: ArmScore.of(part, arm) for arm in part.arms}
    raise DataError(
        f"{part.case.name}: {part.rows} rows of which full recompute answers none or few: nothing "
        "to compare with",
        hint="measure more `rows`",
    )


def _kept(score: ArmScore) -> RowInterval:
    assert score.kept is not None  # `score_arms` has refused such parts.
    return score.kept


def scored_page(settings: ScoredPage) -> Outcome:
    """Write ``algorithms.md``, ``.json`` and the figure from the parts in a folder."""
    usual = list(DATASETS)
    found = sorted(
        read_parts(settings.parts),
        key=lambda part: usual.index(part.case.dataset) if part.case.dataset in usual else 99,
    )
    parts = {part.case: part for part in found}
    workloads: dict[str, Scores] = {}
    for case in sorted(parts, key=lambda case: (case.first, case.drop, case.model)):
        drop = ", lead passages left out" if case.drop else ""
        rest = f", rows from {case.first} on" if case.first else ""
        scores = workloads.setdefault(f"{case.model}{drop}{rest}", {})
        scores[case.dataset] = score_arms(parts[case])
    judged = [(order, judge(order, parts)) for order in ORDERS]
    registry = Registry()
    names = {arm: registry.parse(arm).label for part in found for arm in part.arms}
    texts = [_caption(found), _TERMS]
    if BASE in workloads:
        texts += ["![accuracy against linked tokens](algorithms.svg)", "## The frontier", _FRONTIER]
        texts.append(_frontier_table(workloads[BASE], names))
        drawn = [part for part in found if part.case == Case(part.case.model, part.case.dataset)]
        _draw(workloads, _caption(drawn), settings.output)
    for name, scores in workloads.items():
        measured = [parts[next(iter(arms.values())).case] for arms in scores.values()]
        texts += _workload_section(name, scores, names, measured)
    texts += _orders_section([(order, steps) for order, steps in judged if steps], names)
    shown = page("Every algorithm: accuracy against linked tokens", *texts)
    save(settings.output / "algorithms", _document(workloads, judged), shown)
    return Outcome(shown)


def _document(workloads: Mapping[str, Scores], judged: Sequence[Judged]) -> dict[str, Any]:
    """The numbers of the page; intervals of scores are value, low and high."""

    def fields(score: ArmScore) -> dict[str, Any]:
        found = asdict(score)
        del found["case"], found["arm"]
        intervals = {name: list(found[name].values()) for name in ("difference", "kept")}
        return found | intervals

    return {
        "schema": 1,
        "workloads": {
            name: {
                dataset: {arm: fields(score) for arm, score in arms.items()}
                for dataset, arms in scores.items()
            }
            for name, scores in workloads.items()
        },
        "orders": [
            {"claim": order.claim, "source": order.source, "pairs": [asdict(s) for s in steps]}
            for order, steps in judged
        ],
    }


def _draw(workloads: Mapping[str, Scores], caption: str, output: Path) -> None:
    """The figure: all arms of the base model, and of its tuned variants what they are tuned for."""
    base = [score for arms in workloads[BASE].values() for score in arms.values()]
    tuned = [
        arms[arm]
        for model, _ in TUNED
        for arms in workloads.get(model, {}).values()
        for _, arm in TUNED
        if arm in arms
    ]
    points: dict[str, list[FrontierPoint]] = {dataset: [] for dataset in workloads[BASE]}
    for score in (*base, *tuned):
        name = score.arm if score.case.model == BASE else f"{score.case.model}/{score.arm}"
        kept = _kept(score)
        if score.case.dataset in points:
            point = FrontierPoint(name, score.share, kept.value, kept.low, kept.high)
            points[score.case.dataset].append(point)
    bars = f"Bars: 95 % intervals over {ends(score.rows for score in base)} rows"
    bars += f", of tuned models {ends(score.rows for score in tuned)}." if tuned else "."
    draw_frontier(points, (MEPIC, KEPT), f"{caption} {bars}", output / "algorithms")


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


def _frontier_table(scores: Scores, names: Names) -> str:
    """Our arms, best first: the least that each keeps, and where it links more than MEPIC."""
    found = []
    for arm in (arm for arm in next(iter(scores.values())) if arm in OWN):
        on = {dataset: arms[arm] for dataset, arms in scores.items()}
        worst = min(on.values(), key=lambda score: _kept(score).value)
        below = [dataset for dataset, score in on.items() if _kept(score).value < KEPT]
        costlier = [d for d, score in on.items() if score.linked > scores[d][MEPIC].linked]
        reached = not below and not costlier
        row = (
            f"`{names[arm]}`",
            "yes" if reached else "no",
            f"{worst.kept} ({worst.case.dataset})",
            f"{sum(_kept(score).low >= KEPT for score in on.values())} of {len(on)}",
            ", ".join(below) or "none",
            ", ".join(costlier) or "none",
        )
        found.append((not reached, -_kept(worst).value, row))
    above = f"interval above {KEPT:.2f}"
    head = ("arm", "reached", "least kept", above, "below", "links more than mepic")
    return table(head, [row for *_, row in sorted(found, key=lambda each: each[:2])])


def _workload_section(
    name: str, scores: Scores, names: Names, measured: Sequence[ScoredPart]
) -> Iterator[str]:
    counts = ", ".join(
        f"{p.case.dataset} {p.rows}{f' of {p.wanted}' if p.rows != p.wanted else ''}"
        for p in measured
    )
    shown: Mapping[str, Callable[[ArmScore], str]] = {
        "Mean score, and linked tokens a request:": lambda s: f"{s.score:.3f} ({s.linked:,.0f})",
        "Difference to full recompute:": lambda s: s.difference.signed,
        "Share of full recompute's score that is kept:": lambda s: str(s.kept),
    }
    yield f"## {name}"
    yield f"{_where_measured(measured)} Rows: {counts}."
    for title, text in shown.items():
        yield title
        rows = [
            [
                f"`{names[arm]}`",
                *(text(found[arm]) if arm in found else NOTHING for found in scores.values()),
            ]
            for arm in dict.fromkeys(arm for found in scores.values() for arm in found)
        ]
        yield table(["arm", *scores], rows)


def _orders_section(judged: Sequence[Judged], names: Names) -> Iterator[str]:
    def cell(found: Sequence[OrderStep]) -> str:
        counts = Counter(step.verdict for step in found)
        verdict = next((v for v in ("fails", "undecided", "holds") if counts[v]), NOTHING)
        if not found:
            return verdict
        least = min(found, key=lambda step: step.difference.value).difference.signed
        numbers = "/".join(str(counts[v]) for v in ("holds", "undecided", "fails"))
        return f"{verdict} {least}{f' ({numbers})' if len(found) > 1 else ''}"

    def where(model: str, arm: str) -> str:
        return names[arm] if model == BASE else f"{model} {names[arm]}"

    steps = [step for _, own in judged for step in own]
    datasets = list(dict.fromkeys(step.dataset for step in steps))
    rows = [
        [order.claim, order.source, *(cell([s for s in own if s.dataset == d]) for d in datasets)]
        for order, own in judged
    ]
    yield "## Published orders"
    yield _ORDERS
    yield table(["claim", "source", *datasets], rows)
    failed = [
        f"- {step.dataset}: `{where(*step.better)}` - `{where(*step.worse)}`: "
        f"{step.difference.signed}"
        for step in steps
        if step.verdict == "fails"
    ]
    if failed:
        yield "Pairs that fail:"
        yield "\n".join(failed)


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

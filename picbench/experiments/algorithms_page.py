"""Orders of accuracy that papers claim, and whether they hold here."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from picbench.compare.intervals import RESAMPLES
from picbench.experiments.arm_scores import (
    KEPT,
    MEPIC,
    ArmScore,
    Case,
    FrontierArm,
    RowInterval,
    ScoredPart,
    difference_of,
    frontier,
    labels,
    read_parts,
    score_arms,
)
from picbench.experiments.page import save
from picbench.figures.frontier import FrontierPoint, draw_frontier
from picbench.tables import table as markdown
from picbench.workloads.synthetic.generate import DATASETS

OrderVerdict = Literal["fails", "undecided", "holds"]

#: Worst first.
VERDICTS: tuple[OrderVerdict, ...] = ("fails", "undecided", "holds")

#: A model and an arm.
Where = tuple[str, str]

_BASE = "testbed"


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
    found = [(arm.rpartition("/")[0] or _BASE, arm.rpartition("/")[2]) for arm in arms]
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
    _order(
        "picked by the question >= by position",
        "2602.02579",
        "mepic:select=question",
        "mepic",
    ),
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
    datasets = dict.fromkeys(
        case.dataset for case in parts if case == Case(case.model, case.dataset)
    )
    return [
        OrderStep(better, worse, dataset, _difference(one, other))
        for better, worse in order.steps
        for dataset in datasets
        if (one := _scores(parts, dataset, better)) and (other := _scores(parts, dataset, worse))
    ]


def _scores(parts: Mapping[Case, ScoredPart], dataset: str, where: Where) -> Sequence[float] | None:
    model, arm = where
    part = parts.get(Case(model, dataset))
    return part.arms[arm].score if part and arm in part.arms else None


def _difference(one: Sequence[float], other: Sequence[float]) -> RowInterval:
    rows = min(len(one), len(other))
    return difference_of(one[:rows], other[:rows])


#: Scores of a workload, by data set in their usual order, and by arm.
Scores = dict[str, dict[str, ArmScore]]

#: What tables call arms, by spec.
Names = Mapping[str, str]

JudgedOrder = tuple[PublishedOrder, Sequence[OrderStep]]

#: The model whose frontier is drawn, and its tuned variants.
BASE = "testbed"
TUNED = (f"{BASE}:block", f"{BASE}:link")
TUNED_ARMS = ("block-attention", "kvlink:n=5")


def write(folder: Path, output: Path) -> str:
    """Write ``algorithms.md``, ``.json`` and the figure from the parts in `folder`.

    Returns the page.
    """
    found = sorted(read_parts(folder), key=lambda part: _number(part.case.dataset))
    parts = {part.case: part for part in found}
    workloads = group(parts)
    page = render(parts, workloads)
    document = {
        "schema": 1,
        "workloads": {name: _summary(scores) for name, scores in workloads.items()},
        "orders": [_judged(order, judge(order, parts)) for order in ORDERS],
    }
    save(output / "algorithms", document, page)
    if BASE in workloads:
        drawn = [p for case, p in parts.items() if case == Case(case.model, case.dataset)]
        _draw(workloads, _caption(drawn), output)
    return page


def _draw(workloads: Mapping[str, Scores], caption: str, output: Path) -> None:
    """The figure: all arms of the base model, and of its tuned variants what they are tuned for."""
    tuned = [score for model in TUNED for score in _own_arms(workloads.get(model, {}))]
    points = {
        dataset: [_point(score) for score in arms.values()]
        + [_tuned_point(score) for score in tuned if score.case.dataset == dataset]
        for dataset, arms in workloads[BASE].items()
    }
    base = [score for arms in workloads[BASE].values() for score in arms.values()]
    bars = f"Bars: 95 % intervals over {_counts(base)} rows"
    bars += f", of tuned models {_counts(tuned)}." if tuned else "."
    draw_frontier(points, (MEPIC, KEPT), f"{caption} {bars}", output / "algorithms")


def _counts(scores: Sequence[ArmScore]) -> str:
    rows = sorted({score.rows for score in scores})
    return " to ".join(dict.fromkeys((str(rows[0]), str(rows[-1]))))


def group(parts: Mapping[Case, ScoredPart]) -> dict[str, Scores]:
    """Scores by workload (`Case.workload`), which for all rows of a model is its name."""
    found: dict[str, Scores] = {}
    for case in sorted(parts, key=lambda case: (case.first, case.drop, case.model)):
        found.setdefault(case.workload, {})[case.dataset] = score_arms(parts[case])
    return found


def render(parts: Mapping[Case, ScoredPart], workloads: Mapping[str, Scores]) -> str:
    """The page, in Markdown."""
    names = labels(arm for part in parts.values() for arm in part.arms)
    lines = [
        "# Every algorithm: accuracy against linked tokens",
        "",
        _caption(parts.values()),
        "",
        *_TERMS,
    ]
    if BASE in workloads:
        lines += ["![accuracy against linked tokens](algorithms.svg)", ""]
        lines += _frontier_section(frontier(workloads[BASE]), names)
    for name, scores in workloads.items():
        lines += _workload_section(name, scores, names, parts)
    lines += _orders_section([(order, judge(order, parts)) for order in ORDERS], names)
    return "\n".join(lines)


_TERMS = (
    "Linked are the tokens that a request computes besides its text when all chunks, and no "
    "computed block, are in the cache: recomputed in chunks, or added to the prompt (link tokens, "
    "BOS, visible pads). Differences and ratios are to full recompute by the same model on the "
    f"same rows, with 95 % bootstrap intervals over rows ({RESAMPLES:,} resamples, paired). An "
    "interval of no width says that no row differs, which is compatible with up to 1.5 % of other "
    "rows differing (three in 200).",
    "",
)


def _frontier_section(found: Sequence[FrontierArm], names: Names) -> Iterator[str]:
    yield "## The frontier"
    yield ""
    yield (
        f"Of our own arms, which keep {KEPT:.2f} of full recompute's score on every data set and "
        "link no more than mepic with one block a chunk?"
    )
    yield ""
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
    head = (
        "arm",
        "reached",
        "least kept",
        f"interval above {KEPT:.2f}",
        "below",
        "links more than mepic",
    )
    yield markdown.table(head, rows)
    yield ""


def _workload_section(
    name: str, scores: Scores, names: Names, parts: Mapping[Case, ScoredPart]
) -> Iterator[str]:
    measured = [parts[next(iter(arms.values())).case] for arms in scores.values()]
    counts = ", ".join(f"{part.case.dataset} {_rows(part)}" for part in measured)
    yield f"## {name}"
    yield ""
    yield f"{_where_measured(measured)} Rows: {counts}."
    yield ""
    yield "Mean score, and linked tokens a request:"
    yield ""
    yield _table(scores, names, lambda s: f"{s.score:.3f} ({s.linked:,.0f})")
    yield ""
    yield "Difference to full recompute:"
    yield ""
    yield _table(scores, names, lambda s: s.difference.signed)
    yield ""
    yield "Share of full recompute's score that is kept:"
    yield ""
    yield _table(scores, names, lambda s: str(s.kept))
    yield ""


def _rows(part: ScoredPart) -> str:
    """How many rows there are, and how many there were to be if these are not all."""
    return f"{part.rows}" if part.rows == part.wanted else f"{part.rows} of {part.wanted}"


def _table(scores: Scores, names: Names, cell: Callable[[ArmScore], str]) -> str:
    arms = dict.fromkeys(arm for found in scores.values() for arm in found)
    rows = [
        [
            f"`{names[arm]}`",
            *(cell(found[arm]) if arm in found else "-" for found in scores.values()),
        ]
        for arm in arms
    ]
    return markdown.table(["arm", *scores], rows)


def _orders_section(judged: Sequence[JudgedOrder], names: Names) -> Iterator[str]:
    yield "## Published orders"
    yield ""
    yield (
        "Each order is judged by the pairs of neighbours in it. A pair holds if the interval of "
        "the difference is not below zero, fails if all of it is, and is undecided otherwise; an "
        "order of several pairs is as good as its worst one. In a cell: the verdict, the least "
        "difference of a pair, and of several pairs how many hold, are undecided and fail. Of "
        "pairs of equally good arms one in forty fails by chance. The claims are the papers', "
        "about other models and data sets."
    )
    yield ""
    datasets = list(dict.fromkeys(step.dataset for _, steps in judged for step in steps))
    rows = [
        [order.claim, order.source, *(_order_cell(steps, dataset) for dataset in datasets)]
        for order, steps in judged
        if steps
    ]
    yield markdown.table(["claim", "source", *datasets], rows)
    yield ""
    failed = [step for _, steps in judged for step in steps if step.verdict == "fails"]
    if failed:
        yield "Pairs that fail:"
        yield ""
        for step in failed:
            pair = " - ".join(f"`{_where(*where, names)}`" for where in (step.better, step.worse))
            yield f"- {step.dataset}: {pair}: {step.difference.signed}"
        yield ""


def _order_cell(steps: Sequence[OrderStep], dataset: str) -> str:
    found = [step for step in steps if step.dataset == dataset]
    if not found:
        return "-"
    counts = Counter(step.verdict for step in found)
    verdict = next(verdict for verdict in VERDICTS if counts[verdict])
    least = min(found, key=lambda step: step.difference.value).difference.signed
    numbers = f" ({'/'.join(str(counts[v]) for v in reversed(VERDICTS))})" if len(found) > 1 else ""
    return f"{verdict} {least}{numbers}"


def _where(model: str, arm: str, names: Names) -> str:
    return names[arm] if model == BASE else f"{model} {names[arm]}"


def _point(score: ArmScore) -> FrontierPoint:
    return FrontierPoint(score.arm, score.share, score.kept.value, score.kept.low, score.kept.high)


def _tuned_point(score: ArmScore) -> FrontierPoint:
    return replace(_point(score), arm=f"{score.case.model}/{score.arm}")


def _own_arms(scores: Scores) -> Iterator[ArmScore]:
    """The arms that a tuned model was tuned for."""
    for arms in scores.values():
        yield from (arms[arm] for arm in TUNED_ARMS if arm in arms)


def _summary(scores: Scores) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        dataset: {
            arm: {
                "rows": score.rows,
                "score": score.score,
                "difference": list(asdict(score.difference).values()),
                "kept": list(asdict(score.kept).values()),
                "linked": score.linked,
                "share": score.share,
                "computed": score.computed,
            }
            for arm, score in arms.items()
        }
        for dataset, arms in scores.items()
    }


def _judged(order: PublishedOrder, steps: Sequence[OrderStep]) -> dict[str, Any]:
    pairs = [asdict(step) | {"verdict": step.verdict} for step in steps]
    return {"claim": order.claim, "source": order.source, "pairs": pairs}


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
        facts = part.facts
        place = (
            f"{facts['dtype']}{', eager' if facts['eager'] else ''}; {facts['gpu']}, driver "
            f"{facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}, commit "
            f"{facts['commit']}."
        )
        found.setdefault(place, {})[part.case.model] = None
    return " ".join(f"{', '.join(models)}: {place}" for place, models in found.items())


def _number(dataset: str) -> int:
    return list(DATASETS).index(dataset) if dataset in DATASETS else len(DATASETS)

"""Orders of accuracy that papers claim, and whether they hold here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from picbench.measure.algorithms.row_intervals import RowInterval, difference_of
from picbench.measure.algorithms.scored_part import Case, ScoredPart

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

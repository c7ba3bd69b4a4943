"""What algorithms score row by row: which are compared, files of scores, and their page."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import yaml
from pydantic import TypeAdapter

from picbench.engines.algorithms import Algorithm, Registry, stand_ins
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.pages import GAP, SlotKind
from picbench.errors import ConfigError, DataError, closest
from picbench.figures.frontier import FrontierPoint, draw_frontier
from picbench.files import write_json
from picbench.papers.data import ends, read_kept
from picbench.papers.settings import BASE, FILES
from picbench.run.job import Anchors, segments_of
from picbench.run.measurements import Outcome, ScoredPage
from picbench.statistics import intervals
from picbench.statistics.intervals import Values
from picbench.store.summary import NO_CONTEXT
from picbench.tables.page import page, save
from picbench.tables.table import NOTHING, table
from picbench.workloads.sample import Sample
from picbench.workloads.synthetic.generate import DATASETS

#: All other arms are compared with it.
FULL = "full"

#: With one block a chunk: what an arm of ours may link at most to count as cheap.
MEPIC = "mepic"

#: Which arms are served where, and orders of them; the file says more.
_FOUND = yaml.safe_load((FILES / "arms.yaml").read_text(encoding="utf-8"))

#: picbench's own arms; tuned models, and what each of them is tuned for.
OWN, TUNED = tuple(_FOUND["own"]), dict[str, str](_FOUND["tuned"])

#: Arms by model.
ARMS_OF: Mapping[str, tuple[str, ...]] = {
    BASE: (*_FOUND["published"], *OWN),
    **{model: (*_FOUND["beside_tuned"], arm) for model, arm in TUNED.items()},
}

#: Arms where the retriever left the lead passage out, and the data sets that have one.
DROP_ARMS, DROP_DATASETS = tuple(_FOUND["without_lead"]), tuple(_FOUND["with_leads"])

#: Orders that papers claim, each with its source; arms are named as for `model_and_arm`.
ORDERS: Sequence[tuple[str, Sequence[str]]] = _FOUND["orders"]


def arms_of(model: str, *, drop: bool = False, only: Sequence[str] = ()) -> tuple[str, ...]:
    """The canonical specs of a model's arms, or of those in `only`, among them always `full`.

    Raises ConfigError for a model that has none, and for an algorithm that does not exist.
    """
    if only:
        registry, bare = Registry(), {NO_CONTEXT: NO_CONTEXT}
        found = (bare.get(spec) or registry.parse(spec).spec for spec in only)
        return tuple(dict.fromkeys((FULL, *found)))
    if model not in ARMS_OF:
        raise ConfigError(f"`model` {model}: not a testbed", hint=closest(model, ARMS_OF))
    return DROP_ARMS if drop else ARMS_OF[model]


def planned_links(sample: Sample, algorithm: Algorithm, anchors: Anchors | None = None) -> int:
    """Tokens that a request computes besides its text, if no computed block is found in the cache.

    They are recomputed in chunks, or added to the prompt: link tokens, BOS, visible pads.
    """
    # Which tokens are added makes no difference to their number.
    known = stand_ins(algorithm.anchor_text) if anchors is None else anchors
    layout = algorithm.layout(bos_token=0, anchors=known)
    plan = lay_out(algorithm.arrange(segments_of(sample), layout), algorithm.plan_chunk, layout)
    return sum(
        kind is SlotKind.LINKED or (kind is SlotKind.PAD and position != GAP)
        for page in plan.computed
        for kind, position in zip(page.kinds, page.positions, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A model and a data set; with `drop`, prompts lack the passages before those that answer.

    Of the data set's rows, the `first` ones are left out.
    """

    model: str
    dataset: str
    drop: bool = False
    first: int = 0

    @property
    def name(self) -> str:
        """The name of the case's file, without its suffix."""
        drop, first = "-drop" * self.drop, f"-from-{self.first}" if self.first else ""
        return f"{file_name(self.model)}-{self.dataset}{drop}{first}"


def file_name(model: str) -> str:
    """A model's name in names of files."""
    return model.replace(":", "-").replace("/", "--")


@dataclass(slots=True)
class ArmRows:
    """What an arm did on each row, in the data set's order.

    `score` is from 0 to 1, or a gain in nats (`ScoredPart`). `linked` is what the plan links
    (`planned_links`), `computed` what the engine computed of the prompt: tokens that the cache had
    from requests before are missing.
    """

    score: list[float] = field(default_factory=list)
    linked: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)


@dataclass(slots=True)
class ScoredPart:
    """All arms on the first rows of a case. `prompt` and `chunk` are tokens of each row.

    `wanted` is how many rows there will be, `provenance` says where it was measured. Scores are of
    replies or, with `likelihood`, what the chunks are worth: by how many nats a token the right
    answer is likelier under an arm than without them.
    """

    case: Case
    wanted: int
    provenance: Mapping[str, Any]
    arms: dict[str, ArmRows]
    prompt: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    likelihood: bool = False
    schema: Literal[1] = 1

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `write` wrote. Raises DataError for another one."""
        return read_kept(cls, path)

    def write(self, folder: Path) -> None:
        """Write ``NAME.json``."""
        write_json(folder / f"{self.case.name}.json", asdict(self), indent=None)

    @property
    def rows(self) -> int:
        """How many rows are done."""
        return len(self.prompt)

    def check_continues(self, other: "ScoredPart") -> None:
        """Raise ConfigError unless this part can be continued with the settings of `other`.

        Those may be of another GPU.
        """
        mine, others = (
            (
                (part.wanted, part.likelihood, list(part.arms)),
                {**part.provenance, "gpu": None, "driver": None},
            )
            for part in (self, other)
        )
        if mine != others:
            raise ConfigError(
                f"`output`: {self.case.name}.json was measured with other settings",
                hint="remove it, or name another folder",
            )


#: Parts by case.
Parts = Mapping[Case, ScoredPart]


def read_parts(folder: Path) -> Parts:
    """All parts in a folder, in the order of their names. Raises DataError if there are none."""
    found = [ScoredPart.read(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise DataError(f"{folder}: no scores of algorithms", hint="measure them first")
    return {part.case: part for part in found}


def model_and_arm(name: str) -> tuple[str, str]:
    """``MODEL/ARM``, or the name of an arm of the testbed, in two."""
    model, _, arm = name.rpartition("/")
    return model or BASE, arm


def rows_of(parts: Parts, name: str, dataset: str) -> Sequence[float]:
    """The scores of an arm (see `model_and_arm`), row by row; none where it has none."""
    model, arm = model_and_arm(name)
    part = parts.get(Case(model, dataset))
    return part.arms[arm].score if part and arm in part.arms else ()


def paired(parts: Parts, names: Sequence[str], dataset: str) -> list[Sequence[float]]:
    """The scores of each of these arms on the rows that all of them have."""
    found = [rows_of(parts, name, dataset) for name in names]
    rows = min(map(len, found))
    return [scores[:rows] for scores in found]


class RowInterval(NamedTuple):
    """An estimate and its interval, of 95 % if nothing else is said."""

    value: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        value, low, high = (format(number, form) for number in self)
        return f"{value} [{low}, {high}]"


def difference_of(
    first: Values, second: Values, level: float = 0.95, *, nats: bool = False
) -> RowInterval:
    """Mean of `first` less that of `second`, scores or `nats`, with its interval.

    Needs two rows.
    """
    rows = intervals.sum_clusters(np.subtract(first, second))
    mean = intervals.StudentMean.of(rows) if nats else intervals.BoundedMean(rows, -1.0, 1.0)
    found = mean.interval(level)
    if found is None:
        raise ValueError("one row has no interval")
    return RowInterval(rows.mean, found.low, found.high)


def ratio_of(
    first: Values, second: Values, level: float = 0.95, *, nats: bool = False
) -> RowInterval | None:
    """Mean of `first` over that of `second`, with its interval; None where it has none."""
    ratio = intervals.mean_ratio if nats else intervals.score_ratio
    found = ratio(first, second, level=level)
    return RowInterval(fmean(first) / fmean(second), found.low, found.high) if found else None


@dataclass(frozen=True, slots=True)
class ArmScore:
    """An arm on a case: means over `rows`.

    `difference` is the score less that of full recompute on the same rows and the same model,
    `kept` the ratio of the two, None where `ratio_of` has none. `linked` and `computed` are tokens
    a request, `share` is `linked` over the tokens of chunks.
    """

    rows: int
    score: float
    difference: RowInterval
    kept: RowInterval | None
    linked: float
    share: float
    computed: float


def score_arms(part: ScoredPart) -> dict[str, ArmScore]:
    """All arms of a part of two rows or more, by spec."""
    full, found, nats = part.arms[FULL].score, {}, part.likelihood
    for arm, rows in part.arms.items():
        linked = fmean(rows.linked)
        found[arm] = ArmScore(
            rows=part.rows,
            score=fmean(rows.score),
            difference=difference_of(rows.score, full, nats=nats),
            kept=ratio_of(rows.score, full, nats=nats),
            linked=linked,
            share=linked / fmean(part.chunk),
            computed=fmean(rows.computed),
        )
    return found


#: Scores by data set and arm.
Scores = Mapping[str, Mapping[str, ArmScore]]


def score_section(
    parts: Iterable[ScoredPart],
    scores: Scores,
    columns: Mapping[str, Callable[[str, ArmScore], str]],
) -> Iterator[str]:
    """What ran where on which rows, and tables of a row an arm and a column a data set.

    `columns` are what stands above each table, and the text of an arm's score in it.
    """
    counts = []
    for part in parts:
        of = f" of {part.wanted}" if part.rows != part.wanted else ""
        source = f" ({part.provenance['rows']})" if "rows" in part.provenance else ""
        counts.append(f"{part.case.dataset} {part.rows}{of}{source}")
    yield f"{where_measured(parts)} Rows: {', '.join(counts)}."
    every = dict.fromkeys(arm for arms in scores.values() for arm in arms)
    for title, text in columns.items():
        yield title
        rows = []
        for arm in every:
            found = (text(arm, arms[arm]) if arm in arms else NOTHING for arms in scores.values())
            rows.append((f"`{arm}`", *found))
        yield table(("arm", *scores), rows)


def where_measured(parts: Iterable[ScoredPart]) -> str:
    """A sentence for each place: which models ran there."""
    found: dict[str, dict[str, None]] = {}
    for part in parts:
        found.setdefault(ran(part.provenance), {})[part.case.model] = None
    return " ".join(f"{', '.join(models)}: {place}" for place, models in found.items())


def ran(facts: Mapping[str, Any]) -> str:
    """In which type scores were measured, and on what: the end of a sentence."""
    eager = ", eager" if facts["eager"] else ""
    where = "{gpu}, driver {driver}, vLLM {vllm}, torch {torch}, commit {commit}.".format_map(facts)
    return f"{facts['dtype']}{eager}; {where}"


_TERMS = (
    "Linked are the tokens that a request computes besides its text when all chunks, and no "
    "computed block, are in the cache: recomputed in chunks, or added to the prompt (link tokens, "
    "BOS, visible pads). Differences and ratios are to full recompute by the same model on the "
    "same rows, paired, with 95 % intervals over rows that use the limits of scores: where no row "
    "differs, some others may."
)

_ORDERS = (
    "Papers say, of other models and data, that each arm of an order scores at least what the next "
    "one does. A pair of neighbours holds if the interval of the difference is not below zero, "
    "fails if all of it is, and is undecided otherwise; an order is as good as its worst pair. In "
    "a cell: the verdict, the least difference of a pair, and of several pairs how many hold, are "
    "undecided and fail. Of pairs of equally good arms one in forty fails by chance."
)

#: Share of full recompute's score that an arm of the frontier keeps on every data set.
KEPT = 0.97


@dataclass(frozen=True, slots=True)
class OrderStep:
    """Neighbours in an order, (model, arm) each, on a data set, and the first less the second."""

    better: tuple[str, str]
    worse: tuple[str, str]
    dataset: str
    difference: RowInterval
    verdict: str


def judge_order(arms: Sequence[str], parts: Parts) -> list[OrderStep]:
    """The steps of an order on all data sets on which both of its models were measured."""
    steps = []
    datasets = dict.fromkeys(case.dataset for case in parts)
    for pair, dataset in product(pairwise(arms), datasets):
        one, other = paired(parts, pair, dataset)
        if one:
            better, worse = map(model_and_arm, pair)
            nats = parts[Case(better[0], dataset)].likelihood
            less = difference_of(one, other, nats=nats)
            verdict = "holds" if less.low >= 0 else "fails" if less.high < 0 else "undecided"
            steps.append(OrderStep(better, worse, dataset, less, verdict))
    return steps


def scored_page(settings: ScoredPage) -> Outcome:
    """Write ``algorithms.md``, ``.json`` and the figure from the parts in a folder.

    Raises DataError for a single row, and where full recompute scores nothing.
    """

    def place(case: Case) -> tuple[int, bool, str, int]:
        known = DATASETS.index(case.dataset) if case.dataset in DATASETS else len(DATASETS)
        return case.first, case.drop, case.model, known

    found = read_parts(settings.parts)
    parts = {case: found[case] for case in sorted(found, key=place)}
    measured: dict[str, list[ScoredPart]] = {}
    workloads: dict[str, dict[str, Mapping[str, ArmScore]]] = {}
    for case, part in parts.items():
        drop = ", lead passages left out" if case.drop else ""
        rest = f", rows from {case.first} on" if case.first else ""
        name = f"{case.model}{drop}{rest}"
        measured.setdefault(name, []).append(part)
        arms = score_arms(part) if part.rows > 1 else {}
        if not arms or not arms[FULL].kept:
            raise DataError(
                f"{case.name}: full recompute answers none of {part.rows} rows, so that "
                "there is nothing to compare with",
                hint="measure more `rows`",
            )
        workloads.setdefault(name, {})[case.dataset] = arms
    orders = [(source, order, judge_order(order, parts)) for source, order in ORDERS]
    caption = (
        f"{where_measured(parts.values())} Synthetic rows, greedy replies. All arms of a model in "
        "one engine, their requests in batches of random order. Scores: word F1; rouge-l of samsum "
        "and multi_news."
    )
    texts = [caption, _TERMS]
    if BASE in workloads:
        _draw(workloads, caption, settings.output / "algorithms")
        frontier = (
            f"Of our own arms, which keep {KEPT:.2f} of full recompute's score on every data set "
            "and link no more than mepic with one block a chunk?"
        )
        texts += ["![accuracy against linked tokens](algorithms.svg)", "## The frontier", frontier]
        texts.append(_frontier_table(workloads[BASE]))
    columns: Mapping[str, Callable[[str, ArmScore], str]] = {
        "Mean score, and linked tokens a request:": lambda _, s: f"{s.score:.3f} ({s.linked:,.0f})",
        "Difference to full recompute:": lambda a, s: _beside(a, f"{s.difference:+.3f}"),
        "Share of full recompute's score that is kept:": lambda a, s: _beside(a, f"{s.kept:.3f}"),
    }
    for name, scores in workloads.items():
        texts += [f"## {name}", *score_section(measured[name], scores, columns)]
    texts += _orders_section([judged for judged in orders if judged[2]])
    document = {
        "schema": 1,
        "workloads": TypeAdapter(Mapping[str, Scores]).dump_python(workloads, mode="json"),
        "orders": [_order_document(*judged) for judged in orders],
    }
    shown = page("Every algorithm: accuracy against linked tokens", *texts)
    save(settings.output / "algorithms", document, shown)
    return Outcome(shown)


def _beside(arm: str, text: str) -> str:
    return NOTHING if arm == FULL else text


def _order_document(source: str, arms: Sequence[str], steps: Sequence[OrderStep]) -> dict[str, Any]:
    pairs = [asdict(step) | {"difference": step.difference._asdict()} for step in steps]
    return {"claim": " >= ".join(arms), "source": source, "pairs": pairs}


def _draw(workloads: Mapping[str, Scores], caption: str, base: Path) -> None:
    """All arms of the base model, and of its tuned variants what they are tuned for."""
    points: dict[str, list[FrontierPoint]] = {dataset: [] for dataset in workloads[BASE]}
    rows: dict[bool, list[int]] = {False: [], True: []}
    for model, only in {BASE: None, **TUNED}.items():
        for dataset, arms in workloads.get(model, {}).items():
            for arm, score in arms.items():
                if score.kept and dataset in points and only in (None, arm):
                    name = f"{model}/{arm}" if only else arm
                    points[dataset].append(FrontierPoint(name, score.share, *score.kept))
                    rows[bool(only)].append(score.rows)
    tuned = f", of tuned models {ends(rows[True])}" if rows[True] else ""
    bars = f"Bars: 95 % intervals over {ends(rows[False])} rows{tuned}."
    draw_frontier(points, (MEPIC, KEPT), f"{caption} {bars}", base)


def _frontier_table(scores: Scores) -> str:
    """Our arms, best first: the least that each keeps, and where it links more than MEPIC."""
    found = []
    for arm in (arm for arm in next(iter(scores.values())) if arm in OWN):
        kept = {d: arms[arm].kept or RowInterval(0.0, 0.0, 0.0) for d, arms in scores.items()}
        worst = min(kept, key=lambda dataset: kept[dataset].value)
        below = [dataset for dataset, one in kept.items() if one.value < KEPT]
        costlier = [d for d, arms in scores.items() if arms[arm].linked > arms[MEPIC].linked]
        missed = bool(below or costlier)
        row = (
            f"`{arm}`",
            "no" if missed else "yes",
            f"{kept[worst]:.3f} ({worst})",
            f"{sum(one.low >= KEPT for one in kept.values())} of {len(kept)}",
            ", ".join(below) or "none",
            ", ".join(costlier) or "none",
        )
        found.append((missed, -kept[worst].value, row))
    above = f"interval above {KEPT:.2f}"
    head = ("arm", "reached", "least kept", above, "below", "links more than mepic")
    return table(head, [row for *_, row in sorted(found, key=lambda each: each[:2])])


def _orders_section(
    orders: Sequence[tuple[str, Sequence[str], Sequence[OrderStep]]],
) -> Iterator[str]:
    every = [step for *_, steps in orders for step in steps]
    datasets = list(dict.fromkeys(step.dataset for step in every))
    rows = []
    for source, arms, steps in orders:
        row = [" >= ".join(arms), source]
        for dataset in datasets:
            found = [step for step in steps if step.dataset == dataset]
            counts = Counter(step.verdict for step in found)
            verdict = next((v for v in ("fails", "undecided", "holds") if counts[v]), NOTHING)
            least = min((step.difference for step in found), default=None)
            cell = f"{verdict} {least:+.3f}" if least else verdict
            if len(found) > 1:
                cell += " ({holds}/{undecided}/{fails})".format_map(counts)
            row.append(cell)
        rows.append(row)
    yield from ("## Published orders", _ORDERS, table(("claim", "source", *datasets), rows))

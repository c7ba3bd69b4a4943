"""The rows of data sets served by all algorithms in one engine, and score row by row.

Rows are served some at a time, each by every arm, in one batch in random order. After each of these
windows the part of the case is written, so that the next call resumes a measurement that was
stopped. Two checks serve the same rows: each request alone in an empty engine, and all rows of an
arm, whose mean scores the testbed's card knows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, product
from operator import methodcaller
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from picbench.engines.algorithms import Registry
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import FAILED, Result
from picbench.errors import ConfigError, InvalidRun, PicBenchError
from picbench.papers.arm_scores import DROP_DATASETS, Case, ScoredPart, arms_of, planned_links, ran
from picbench.run.job import blocks
from picbench.run.measurements import Accuracy, Outcome, ServeAlone, ServeScores
from picbench.run.runner import (
    UNFINISHED,
    Cell,
    Described,
    Engines,
    ExperimentPlan,
    Launcher,
    TimeBudget,
    run,
)
from picbench.run.schedule import to_request
from picbench.run.workload import Workload, load_workload
from picbench.settings import parse_config
from picbench.store import provenance
from picbench.tables.page import page, save
from picbench.tables.table import table
from picbench.workloads.testbed import DATASETS, model_path

#: Rows that are served together. With more, chunk KV is evicted before its last request.
WINDOW = 10


class ServeSettings(ServeScores):
    """What is served, and where rows are, unless they are bundled.

    `name` is what files call the model, where that is not `model`, `data` where the rows of a data
    set are. Prompts with more than `longest` tokens, their reply included, lose their middle; the
    engine has positions for twice as many, if the model has them.
    """

    name: str = ""
    data: Mapping[str, str] = {}
    longest: int | None = None

    @property
    def cases(self) -> list[Case]:
        """The cases that are measured: rows from the start of a data set but for the first."""
        wanted = [d for d in self.dataset or DATASETS if not self.drop or d in DROP_DATASETS]
        return [Case(self.name or self.model, d, self.drop, self.first) for d in wanted]

    @property
    def arms(self) -> tuple[str, ...]:
        """The canonical specs of all arms."""
        return arms_of(self.model, drop=self.drop, only=self.algo)

    def load(self, case: Case) -> Workload:
        """The rows of a case. Raises what `load_case` does."""
        reading: dict[str, Any] = {"model": self.model, "context": self.longest}
        reading |= {"data": self.data[case.dataset]} if case.dataset in self.data else {}
        return load_case(case, self.arms, self.rows, reading)


def engine_config(
    settings: ServeScores | ServeAlone, workload: Workload, longest: int | None = None
) -> EngineConfig:
    """An engine for all arms: pads and documents may take as many positions as the model has."""
    positions = workload.model.context
    if longest is not None:
        positions = min(positions or 2 * longest, 2 * longest)
    chosen = {"device", "dtype", "eager", "kv_blocks", "max_requests"}
    return EngineConfig(
        model=str(workload.model.path),
        context=positions,
        tiers="",
        **settings.model_dump(include=chosen),
    )


def _facts(settings: ServeScores | ServeAlone | Accuracy) -> dict[str, Any]:
    found = provenance.facts(*provenance.ENGINE, device=settings.device, commit=settings.commit)
    chosen = {"dtype", "eager", "seed", "longest"}
    return found | settings.model_dump(include=chosen, exclude_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseCell(Cell):
    """A case, a window of which is served in a round and added to its `part`."""

    part: ScoredPart
    load: Workload
    seed: int

    def warm_up(self, engines: Engines) -> None:
        """Leave nothing of other cases in the cache."""
        for engine in engines.values():
            engine.call(methodcaller("reset"))

    def serve(self, engines: Engines, number: int) -> Mapping[str, Mapping[str, Any]]:
        """Serve the next rows. Raises InvalidRun for a request that fails."""
        [engine] = engines.values()
        part, samples = self.part, self.load.samples
        window = range(part.rows, min(part.rows + WINDOW, part.wanted))
        jobs = list(product(window, part.arms))
        Random(f"{self.seed} {self.name} {window.start}").shuffle(jobs)
        requests = [to_request(samples[row], arm) for row, arm in jobs]
        results = engine.call(methodcaller("generate", requests))
        self._add(window, dict(zip(jobs, results, strict=True)))
        return {}

    def _add(self, window: range, results: Mapping[tuple[int, str], Result]) -> None:
        registry, part = Registry(), self.part
        for row, (arm, rows) in product(window, part.arms.items()):
            sample, result = self.load.samples[row], results[row, arm]
            links = planned_links(sample, registry.parse(arm))
            what = f"{arm} on row {row} of {self.name}"
            check_served(result, what)
            if result.counts.linked > links:
                raise InvalidRun(f"{what} linked {result.counts.linked} tokens, its plan {links}")
            score = self.load.grader.score(result.text, sample.answers) or 0.0
            rows.score.append(round(score, 4))
            rows.linked.append(links)
            rows.computed.append(result.counts.prompt - (result.counts.reused or 0))
        for sample in (self.load.samples[row] for row in window):
            part.prompt.append(sample.prompt_tokens)
            part.chunk.append(sum(len(chunk.tokens) for chunk in sample.chunks))


@dataclass(slots=True)
class PartsRecord:
    """The parts of cases, each a file in `folder`; any engine may resume them."""

    folder: Path
    parts: Mapping[str, ScoredPart]
    seconds: dict[str, list[float]]
    start: float | None = None

    def begin(self, engines: Engines, described: Described, seconds: float) -> None:
        """See `CellRecord`."""

    def note(self, cell: Cell, number: int, figures: Mapping[str, Any], seconds: float) -> None:
        """Write the part of the case."""
        self.seconds[cell.name].append(seconds)
        self.parts[cell.name].write(self.folder)

    def fail(self, cell: Cell, error: PicBenchError) -> None:
        """The first error ends the call."""
        raise error


def serve(settings: ServeScores) -> Outcome:
    """Measure bundled rows; see `measure`."""
    return measure(ServeSettings(**dict(settings)))


def measure(settings: ServeSettings, launcher: Launcher | None = None) -> Outcome:
    """Measure what is missing in the parts in the output folder; exit code 4 if rows are left.

    Raises ConfigError for parts of other settings, InvalidRun for a request that fails.
    """
    loads = {case: settings.load(case) for case in settings.cases}
    if not loads:
        return Outcome("")
    facts = _facts(settings)
    cells, windows = [], {}
    for rank, (case, load) in enumerate(loads.items()):
        part = _begun(case, load, settings, facts)
        windows[case.name] = [0.0] * -(-part.rows // WINDOW)
        wanted = -(-part.wanted // WINDOW)
        cells.append(
            CaseCell(case.name, rank=rank, most=wanted, part=part, load=load, seed=settings.seed)
        )
    first = next(iter(loads.values()))
    rounds = max(cell.most or 0 for cell in cells)
    plan = ExperimentPlan(
        name="algorithms",
        facts={},
        engines={"picbench": engine_config(settings, first, settings.longest)},
        cells=cells,
        rounds=rounds,
        few=rounds,
    )
    record = PartsRecord(settings.output, {cell.name: cell.part for cell in cells}, windows)
    run(plan, record, print, TimeBudget(settings.seconds), launcher)
    return Outcome("", 0 if plan.done(record) else UNFINISHED)


def load_case(
    case: Case, arms: Sequence[str], rows: int, reading: Mapping[str, Any] | None = None
) -> Workload:
    """The first `rows` rows of a case; chunks have their documents.

    `reading` are settings of a run that say how rows are read. Raises ConfigError if all of them
    are left out.
    """
    settings: dict[str, Any] = {"drop": "lead"} if case.drop else {}
    settings |= {"algo": tuple(arms), "dataset": case.dataset, "model": case.model, "limit": rows}
    found = load_workload(parse_config(settings | dict(reading or {})))
    if len(found.samples) <= case.first:
        raise ConfigError(f"`first` {case.first}: {case.dataset} has no row after that")
    return replace(found, samples=found.samples[case.first :])


def _begun(
    case: Case, load: Workload, settings: ServeSettings, facts: Mapping[str, Any]
) -> ScoredPart:
    """The part as it was left, or a new one; its facts say which rows these are."""
    if not load.synthetic:
        origin = load.origin
        where = f"{origin.repository}@{origin.revision[:12]}" if origin else "files"
        cut = sum(sample.truncated for sample in load.samples)
        facts = {**facts, "rows": where, "chat": load.chat, "cut": cut}
    new = ScoredPart.begin(case, len(load.samples), facts, settings.arms)
    path = settings.output / f"{case.name}.json"
    if not path.exists():
        return new
    found = ScoredPart.read(path)
    found.check_continues(new)
    return found


def check_served(result: Result, what: str) -> None:
    """Raise InvalidRun for a request that failed."""
    if result.finish_reason in (FAILED, "rejected"):
        raise InvalidRun(f"{what} failed: {result.error}")


@dataclass(frozen=True, slots=True)
class Differing:
    """A request with other tokens in the batch than alone, the first of them at `token`.

    `gap` is the log-probability of the best token there less the second best one's, alone: with
    none, rounding decides between them.
    """

    dataset: str
    row: int
    arm: str
    token: int
    gap: float


def measure_alone(settings: ServeAlone) -> Outcome:
    """Serve requests of all arms and data sets at once, then each in an empty engine.

    Arms and data sets take turns; the order is random. Writes ``alone-DTYPE.json`` and ``.md``.
    Raises InvalidRun if any differs in float32.
    """
    count, model, datasets = settings.requests, settings.model, settings.dataset or DATASETS
    arms, rows = arms_of(model, only=settings.algo), -(-count // len(datasets))
    loads = {dataset: load_case(Case(model, dataset), arms, rows) for dataset in datasets}
    named = [
        (
            dataset,
            row,
            arm,
            to_request(loads[dataset].samples[row % len(loads[dataset].samples)], arm),
        )
        for (row, dataset), arm in zip(product(range(rows), loads), cycle(arms), strict=False)
    ][:count]
    Random(settings.seed).shuffle(named)
    with Engine(engine_config(settings, next(iter(loads.values())))) as engine:
        engine.warm_up()
        together = engine.generate([request for *_, request in named], logprobs=2)
        alone = []
        for *_, request in named:
            engine.reset()
            alone += engine.generate([request], logprobs=2)
    found = []
    for (dataset, row, arm, _), one, other in zip(named, alone, together, strict=True):
        for result in (one, other):
            check_served(result, f"{arm} on row {row} of {dataset}")
        if one.tokens != other.tokens:
            found.append(Differing(dataset, row, arm, *first_difference(one, other)))
    facts = _facts(settings) | {"arms": len(arms), "datasets": len(loads)}
    facts |= {"tokens": sum(len(result.tokens) for result in together)}
    document = {"schema": 1, "provenance": facts, "requests": count}
    document |= {"differing": [asdict(differing) for differing in found]}
    save(settings.output / f"alone-{settings.dtype}", document, render(found, count, facts))
    if found and settings.dtype == "float32":
        raise InvalidRun(f"{len(found)} of {count} requests differ from those alone")
    return Outcome()


def first_difference(alone: Result, together: Result) -> tuple[int, float]:
    """Where two replies part, and the gap between the best two tokens there (see `Differing`)."""
    pairs = zip(alone.tokens, together.tokens, strict=False)
    shorter = min(len(alone.tokens), len(together.tokens))
    at = next((n for n, (one, other) in enumerate(pairs) if one != other), shorter)
    longer = max(alone, together, key=lambda result: len(result.tokens))
    steps = alone.logprobs if at < len(alone.tokens) else longer.logprobs
    best, second = sorted((steps or ())[at].values(), reverse=True)[:2]
    return at, best - second


def render(found: Sequence[Differing], requests: int, facts: Mapping[str, Any]) -> str:
    """The page of requests alone, in Markdown."""
    rows = [(d.dataset, str(d.row), f"`{d.arm}`", str(d.token), f"{d.gap:.1e}") for d in found]
    head = ("data set", "row", "arm", "first other token", "gap of the best two")
    return page(
        "A batch of all algorithms against each request alone",
        f"Testbed model, {ran(facts)} {requests} requests of {facts['arms']} arms and "
        f"{facts['datasets']} data sets in one batch, in random order; then each in an engine that "
        "holds nothing. Greedy replies to their end.",
        f"{len(found)} of {requests} requests have other tokens ({facts['tokens']:,} in all).",
        table(head, rows, right=3) if rows else "",
    )


#: An algorithm of the engine and the name that the card has for it.
ARMS = {"full": "full", "naive": "naive", "epic:k=16": "epic-16", "mepic": "mepic"}

#: How far apart mean scores may be: the standard error of 200 rows that are right or wrong is up
#: to 0.035, and both sides answer the same ones.
TOLERANCE = 0.03

#: Rows of a data set that the card speaks of.
ROWS = 200


@dataclass(frozen=True, slots=True)
class Score:
    """Mean scores of an arm on the rows of a data set: the engine's and the card's."""

    dataset: str
    arm: str
    rows: int
    engine: float
    card: float

    @property
    def difference(self) -> float:
        """The engine's mean score less the card's."""
        return self.engine - self.card


def measure_accuracy(settings: Accuracy) -> Outcome:
    """Run all rows through all arms; InvalidRun where scores are further apart than noise.

    Writes ``accuracy-DTYPE.json`` and ``.md``.
    """
    loads = [load_case(Case("testbed", name), tuple(ARMS), settings.rows) for name in DATASETS]
    samples = [sample for load in loads for sample in load.samples]
    longest = max(sample.prompt_tokens + sample.max_tokens for sample in samples)
    config = EngineConfig(
        model=str(model_path()),
        device=settings.device,
        dtype=settings.dtype,
        eager=settings.eager,
        context=longest,
        kv_blocks=blocks(longest) * 200,
        max_requests=64,
    )
    card = json.loads((Path(model_path()) / "scores.json").read_bytes())["base"]["arms"]
    scores = []
    with Engine(config) as engine:
        engine.warm_up()
        facts = _facts(settings) | {"dtype": engine.describe()["dtype"]}
        for load, (arm, name) in product(loads, ARMS.items()):
            results = engine.generate([to_request(sample, arm) for sample in load.samples])
            mean = fmean(
                load.grader.score(result.text, sample.answers) or 0.0
                for sample, result in zip(load.samples, results, strict=True)
            )
            scores.append(Score(load.dataset, arm, len(results), mean, card[name][load.dataset]))
            print(f"{load.dataset:12} {arm:10} {mean:.3f} / {scores[-1].card:.3f}", flush=True)
    rows = [asdict(score) | {"difference": score.difference} for score in scores]
    document = {"schema": 1, "provenance": facts, "rows": "synthetic", "results": rows}
    made = render_accuracy(scores, facts)
    save(settings.output / f"accuracy-{facts['dtype']}", document, made)
    if apart := [s for s in scores if s.rows == ROWS and abs(s.difference) > TOLERANCE]:
        names = ", ".join(f"{s.arm} on {s.dataset}: {s.difference:+.3f}" for s in apart)
        raise InvalidRun(f"the engine's scores and the card's differ: {names}")
    return Outcome()


def render_accuracy(scores: Sequence[Score], facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    found = {(score.arm, score.dataset): score for score in scores}
    datasets = list(dict.fromkeys(score.dataset for score in scores))
    cells = {key: f"{score.engine:.3f} / {score.card:.3f}" for key, score in found.items()}
    arms = dict.fromkeys(score.arm for score in scores)
    rows = [[arm, *(cells[arm, dataset] for dataset in datasets)] for arm in arms]
    return page(
        "The engine's accuracy against the model card's",
        f"Testbed model, {scores[0].rows} synthetic rows of each set, greedy, {ran(facts)} Mean "
        "scores (word F1; rouge-l of samsum and multi_news): picbench's engine / torch in bfloat16 "
        "without any engine. One fixed set of rows, decoded once: no spread to report.",
        table(["arm", *datasets], rows),
        f"Largest difference: {max(abs(score.difference) for score in scores):.3f}.",
    )

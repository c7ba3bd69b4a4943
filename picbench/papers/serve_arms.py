"""Rows of data sets under arms: served and scored, looked at, and counted layer by layer.

All arms of some rows are served in one batch, in random order. After each of these windows the part
of the case is written, so that the next call resumes a measurement that was stopped. Two checks
serve the same rows: each request alone in an empty engine, and all rows of an arm, whose mean
scores the testbed's card knows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, product
from operator import methodcaller
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from picbench.engines.algorithms import Registry, parse, temperatures
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Request, Result
from picbench.errors import ConfigError, InvalidRun
from picbench.papers import arm_scores
from picbench.papers.arm_scores import FULL, ArmRows, Case, ScoredPart
from picbench.papers.settings import BASE, LatencyPoint
from picbench.run import runner
from picbench.run.job import Anchors, anchors_of, blocks
from picbench.run.measurements import Accuracy, Outcome, ServeAlone, ServeScores
from picbench.run.schedule import to_request
from picbench.run.workload import Workload, load_workload
from picbench.settings import parse_config
from picbench.store import provenance
from picbench.store.records import answer_nats, failure_of
from picbench.store.summary import NO_CONTEXT
from picbench.tables.page import page, save
from picbench.tables.table import table
from picbench.workloads.sample import Sample
from picbench.workloads.scoring import LIKELIHOOD
from picbench.workloads.testbed import DATASETS, model_path

#: Rows that are served together. With more, chunk KV is evicted before its last request.
WINDOW = 10


class ServeSettings(ServeScores):
    """What is served, and where rows are, unless they are bundled.

    `name` is what files call the model, where that is not `model`, `data` where the rows of a data
    set are. Prompts with more than `longest` tokens, their reply included, lose their middle; the
    engine has positions for twice as many, if the model has them. With `likelihood` right answers
    are forced; the arm ``nocontext`` has to be there.
    """

    name: str = ""
    data: Mapping[str, str] = {}
    longest: int | None = None
    likelihood: bool = False

    @property
    def cases(self) -> list[Case]:
        """The cases that are measured: rows from the start of a data set but for the first."""
        left = arm_scores.DROP_DATASETS
        wanted = [name for name in self.dataset or DATASETS if not self.drop or name in left]
        return [Case(self.name or self.model, name, self.drop, self.first) for name in wanted]


def load_case(case: Case, arms: Sequence[str], rows: int, **reading: Any) -> Workload:
    """The first `rows` rows of a case; chunks have their documents.

    `reading` are settings of a run that say how rows are read. Raises ConfigError if all of them
    are left out.
    """
    settings: dict[str, Any] = {"drop": "lead"} if case.drop else {}
    settings |= {"algo": tuple(arms), "dataset": case.dataset, "model": case.model, "limit": rows}
    found = load_workload(parse_config(settings | reading))
    if len(found.samples) <= case.first:
        raise ConfigError(f"`first` {case.first}: {case.dataset} has no row after that")
    return replace(found, samples=found.samples[case.first :])


def engine_config(
    settings: ServeScores | ServeAlone,
    workload: Workload,
    longest: int | None = None,
    anchors: Anchors | None = None,
) -> EngineConfig:
    """An engine for all arms: pads and documents may take as many positions as the model has."""
    positions = workload.model.context
    if longest is not None:
        positions = min(positions or 2 * longest, 2 * longest)
    chosen = settings.model_dump(include={"device", "dtype", "eager", "kv_blocks", "max_requests"})
    model = str(workload.model.path)
    chosen |= {"forced_replies": bool(workload.golds), "anchors": anchors or {}}
    return EngineConfig(model=model, context=positions, tiers="", **chosen)


def _facts(settings: ServeScores | ServeAlone | Accuracy) -> dict[str, Any]:
    found = provenance.facts(*provenance.ENGINE, device=settings.device, commit=settings.commit)
    chosen = {"dtype", "eager", "seed", "longest"}
    return found | settings.model_dump(include=chosen, exclude_none=True)


@dataclass(frozen=True, kw_only=True)
class ScoredRows(runner.Cell):
    """Rows of a case; a round serves the next window of them under all arms."""

    part: ScoredPart
    load: Workload
    settings: ServeScores
    anchors: Anchors = field(default_factory=dict)

    def warm_up(self, engines: runner.Engines) -> None:
        """Nothing of other cases is cached."""
        for engine in engines.values():
            engine.call(methodcaller("reset"))

    def serve(self, engines: runner.Engines, number: int) -> Mapping[str, Mapping[str, Any]]:
        """Serve a window in random order, and write the part.

        Raises InvalidRun for a request that failed or links more than its plan.
        """
        part, samples, [engine] = self.part, self.load.samples, engines.values()
        window = range(part.rows, min(part.rows + WINDOW, part.wanted))
        jobs = list(product(window, part.arms))
        Random(f"{self.settings.seed} {part.case.name} {part.rows}").shuffle(jobs)
        requests = [self._request(*_sent(samples[row], arm)) for row, arm in jobs]
        served = engine.call(methodcaller("generate", requests))
        results, registry = dict(zip(jobs, served, strict=True)), Registry()
        for row, arm in product(window, part.arms):
            check_served(results[row, arm], f"{arm} on row {row} of {part.case.name}")
        for row in window:
            sample = samples[row]
            for arm, rows in part.arms.items():
                result, what = results[row, arm], f"{arm} on row {row} of {part.case.name}"
                given, spec = _sent(sample, arm)
                links = arm_scores.planned_links(given, registry.parse(spec), self.anchors)
                if result.counts.linked > links:
                    found = f"linked {result.counts.linked} tokens, its plan {links}"
                    raise InvalidRun(f"{what} {found}")
                if part.likelihood:
                    score = answer_nats(results[row, NO_CONTEXT]) - answer_nats(result)
                else:
                    score = self.load.grader.score(result.text, sample.answers) or 0.0
                rows.score.append(round(score, 4))
                rows.linked.append(links)
                rows.computed.append(result.counts.computed or 0)
            part.prompt.append(sample.prompt_tokens)
            part.chunk.append(sum(len(chunk.tokens) for chunk in sample.chunks))
        part.write(self.settings.output)
        return {}

    def _request(self, sample: Sample, spec: str) -> Request:
        request, gold = to_request(sample, spec), self.load.golds.get(sample.id)
        return request if gold is None else replace(request, reply=gold, logprobs=0)


def _sent(sample: Sample, arm: str) -> tuple[Sample, str]:
    """What an arm is sent, and the algorithm that serves it."""
    return (sample.without_chunks(), FULL) if arm == NO_CONTEXT else (sample, arm)


def check_served(result: Result, what: str) -> None:
    """Raise InvalidRun for a request that failed."""
    if error := failure_of(result):
        raise InvalidRun(f"{what} failed: {error}")


def serve(settings: ServeScores) -> Outcome:
    """Measure bundled rows; see `measure`."""
    return measure(ServeSettings(**dict(settings)))


def measure(settings: ServeSettings, launcher: runner.Launcher | None = None) -> Outcome:
    """Measure what is missing in the parts in the output folder; exit code 4 if rows are left."""
    plan, record = plan_scores(settings), runner.RoundsRecord()
    if plan.done(record):
        return Outcome("")
    runner.run(plan, record, runner.say, runner.TimeBudget(settings.seconds), launcher)
    return Outcome("", 0 if plan.done(record) else runner.UNFINISHED)


def plan_scores(settings: ServeSettings) -> runner.ExperimentPlan:
    """Rows that are missing in the parts in the output folder, case by case.

    Raises ConfigError for parts of other settings.
    """
    arms = arm_scores.arms_of(settings.model, drop=settings.drop, only=settings.algo)
    every, engines = _cells(settings, arms), dict[str, EngineConfig]()
    if cells := [cell for cell in every if cell.most]:
        samples = [sample for cell in every for sample in cell.load.samples]
        algorithms = [parse(arm) for arm in arms if arm != NO_CONTEXT]
        load = cells[0].load
        anchors = anchors_of(algorithms, str(load.model.path), samples)
        config = engine_config(settings, load, settings.longest, anchors)
        engines["picbench"] = replace(config, temperatures=temperatures(algorithms))
        cells = [replace(cell, anchors=anchors) for cell in cells]
    most = max((cell.most or 0 for cell in cells), default=0)
    return runner.ExperimentPlan(
        name="scores", facts={}, engines=engines, cells=cells, rounds=most, few=most
    )


def _cells(settings: ServeSettings, arms: Sequence[str]) -> list[ScoredRows]:
    """All cases with their rows, and how many windows of these are missing."""
    cells, known = [], _facts(settings)
    for rank, case in enumerate(settings.cases):
        data = {"data": settings.data[case.dataset]} if case.dataset in settings.data else {}
        reading = {"model": settings.model, "context": settings.longest}
        if settings.likelihood:
            reading["scoring"] = LIKELIHOOD
        load = load_case(case, arms, settings.rows, **reading, **data)
        facts = dict(known)
        if not load.synthetic:  # Which rows these are.
            origin = load.origin
            facts["rows"] = f"{origin.repository}@{origin.revision[:12]}" if origin else "files"
            facts["chat"] = load.chat
            facts["cut"] = sum(sample.truncated for sample in load.samples)
        rows = {arm: ArmRows() for arm in arms}
        part = ScoredPart(case, len(load.samples), facts, rows, likelihood=settings.likelihood)
        path = settings.output / f"{case.name}.json"
        if path.exists():
            new, part = part, ScoredPart.read(path)
            part.check_continues(new)
        about = ScoredRows(name=case.name, part=part, load=load, settings=settings)
        windows = -(-(part.wanted - part.rows) // WINDOW)
        cells.append(replace(about, rank=rank, most=windows))
    return cells


def measure_alone(settings: ServeAlone) -> Outcome:
    """Serve requests of all arms and data sets at once, then each in an empty engine.

    Arms and data sets take turns; the order is random. Writes ``alone-DTYPE.json`` and ``.md``: the
    requests with other tokens in the batch than alone, see `first_difference`. Raises InvalidRun if
    any differs in float32.
    """
    count, model, datasets = settings.requests, settings.model, settings.dataset or DATASETS
    arms, rows = arm_scores.arms_of(model, only=settings.algo), -(-count // len(datasets))
    loads = {dataset: load_case(Case(model, dataset), arms, rows) for dataset in datasets}
    turns = zip(product(range(rows), loads), cycle(arms), strict=False)
    jobs = [(dataset, row, arm) for (row, dataset), arm in turns][:count]
    Random(settings.seed).shuffle(jobs)
    requests = []
    for dataset, row, arm in jobs:
        samples = loads[dataset].samples
        requests.append(to_request(samples[row % len(samples)], arm))
    with Engine(engine_config(settings, next(iter(loads.values())))) as engine:
        engine.warm_up()
        together = engine.generate(requests, logprobs=2)
        alone = []
        for request in requests:
            engine.reset()
            alone += engine.generate([request], logprobs=2)
    differing, lines = [], []
    for (dataset, row, arm), one, other in zip(jobs, alone, together, strict=True):
        for result in (one, other):
            check_served(result, f"{arm} on row {row} of {dataset}")
        if one.tokens != other.tokens:
            token, gap = first_difference(one, other)
            where = {"dataset": dataset, "row": row, "arm": arm}
            differing.append(where | {"token": token, "gap": gap})
            lines.append((dataset, str(row), f"`{arm}`", str(token), f"{gap:.1e}"))
    tokens = sum(len(result.tokens) for result in together)
    facts = _facts(settings) | {"arms": len(arms), "datasets": len(loads), "tokens": tokens}
    document = {"schema": 1, "provenance": facts, "requests": count, "differing": differing}
    head = ("data set", "row", "arm", "first other token", "gap of the best two")
    made = page(
        "A batch of all algorithms against each request alone",
        f"Testbed model, {arm_scores.ran(facts)} {count} requests of {len(arms)} arms and "
        f"{len(loads)} data sets in one batch, in random order; then each in an engine that holds "
        "nothing. Greedy replies to their end.",
        f"{len(differing)} of {count} requests have other tokens ({tokens:,} in all).",
        table(head, lines, right=3) if lines else "",
    )
    save(settings.output / f"alone-{settings.dtype}", document, made)
    if differing and settings.dtype == "float32":
        raise InvalidRun(f"{len(differing)} of {count} requests differ from those alone")
    return Outcome()


def first_difference(alone: Result, together: Result) -> tuple[int, float]:
    """Where two replies part, and the log-probability of the best token there less the second's.

    That gap is the one of the reply alone: with none, rounding decides between them.
    """
    pairs = zip(alone.tokens, together.tokens, strict=False)
    shorter = min(len(alone.tokens), len(together.tokens))
    at = next((n for n, (one, other) in enumerate(pairs) if one != other), shorter)
    longer = max(alone, together, key=lambda result: len(result.tokens))
    steps = alone.logprobs if at < len(alone.tokens) else longer.logprobs
    best, second = sorted((steps or ())[at].values(), reverse=True)[:2]
    return at, best - second


#: An algorithm of the engine and the name that the card has for it.
ARMS = {"full": "full", "naive": "naive", "epic:k=16": "epic-16", "mepic": "mepic"}

#: How far apart mean scores may be: the standard error of 200 rows that are right or wrong is up
#: to 0.035, and both sides answer the same ones. The card speaks of so many rows.
TOLERANCE, ROWS = 0.03, 200


def measure_accuracy(settings: Accuracy) -> Outcome:
    """Run all rows through all arms; InvalidRun where scores are further apart than noise.

    Writes ``accuracy-DTYPE.json`` and ``.md``.
    """
    loads = [load_case(Case(BASE, name), tuple(ARMS), settings.rows) for name in DATASETS]
    samples = [sample for load in loads for sample in load.samples]
    longest = max(sample.prompt_tokens + sample.max_tokens for sample in samples)
    config = EngineConfig(
        model=str(model_path()),
        context=longest,
        kv_blocks=blocks(longest) * 200,
        max_requests=64,
        **settings.model_dump(include={"device", "dtype", "eager"}),
    )
    card = json.loads((Path(model_path()) / "scores.json").read_bytes())["base"]["arms"]
    scores: list[dict[str, Any]] = []
    cells = {arm: [arm] for arm in ARMS}
    with Engine(config) as engine:
        engine.warm_up()
        facts = _facts(settings) | {"dtype": engine.describe()["dtype"]}
        for load, (arm, name) in product(loads, ARMS.items()):
            results = engine.generate([to_request(sample, arm) for sample in load.samples])
            answered = zip(results, load.samples, strict=True)
            mean = fmean(load.grader.score(r.text, s.answers) or 0.0 for r, s in answered)
            known = card[name][load.dataset]
            score: dict[str, Any] = {"dataset": load.dataset, "arm": arm, "rows": len(results)}
            scores.append(score | {"engine": mean, "card": known, "difference": mean - known})
            cells[arm].append(f"{mean:.3f} / {known:.3f}")
            runner.say(f"{load.dataset:12} {arm:10} {cells[arm][-1]}")
    document = {"schema": 1, "provenance": facts, "rows": "synthetic", "results": scores}
    made = page(
        "The engine's accuracy against the model card's",
        f"Testbed model, {scores[0]['rows']} synthetic rows of each set, greedy, "
        f"{arm_scores.ran(facts)} Mean scores (word F1; rouge-l of samsum and multi_news): "
        "picbench's engine / torch in bfloat16 without any engine. One fixed set of rows, decoded "
        "once: no spread to report.",
        table(["arm", *(load.dataset for load in loads)], cells.values()),
        f"Largest difference: {max(abs(score['difference']) for score in scores):.3f}.",
    )
    save(settings.output / f"accuracy-{facts['dtype']}", document, made)
    apart = [s for s in scores if s["rows"] == ROWS and abs(s["difference"]) > TOLERANCE]
    if apart:
        names = ", ".join(f"{s['arm']} on {s['dataset']}: {s['difference']:+.3f}" for s in apart)
        raise InvalidRun(f"the engine's scores and the card's differ: {names}")
    return Outcome()


#: Tokens of the question of a single prompt, arms of stock vLLM, and how the name of an arm ends
#: whose chunks are not in the cache.
QUESTION, STOCK, COLD = 32, ("full", "prefix"), " cold"


def serve_prompt(engine: Engine, name: str, *, arm: str, size: LatencyPoint) -> dict[str, float]:
    """Figures of one request of a size under an arm: milliseconds, and tokens."""
    name = f"{name} {arm}"
    given = runner.random_chunks(size.chunks, size.tokens, name)

    def ask(name: str) -> Any:
        # A head of its own, so that one chunk is not a prefix that was there before.
        head = runner.random_text(BLOCK_SIZE, f"{name} head")
        question = runner.random_text(QUESTION, f"{name} question")
        algorithm = "prefix" if arm in STOCK else arm.removesuffix(COLD)
        request = Request([head, *given, question], algorithm)
        [result] = engine.generate([request], max_tokens=1, ignore_eos=True)
        return result

    if not arm.endswith(COLD) and arm != "full":
        ask(f"{name} before")
        # Orders that begin alike would share what follows from it.
        given = [*given[1:], given[0]]
    found = ask(name)
    ttft, counts = found.timings.ttft, found.counts
    return {"ttft_ms": ttft * 1e3, "linked": counts.linked, "compiled": counts.compile_work}

"""The rows of data sets served by all algorithms in one engine, and scored row by row.

Rows are served some at a time, each by every arm, in one batch in random order. After each of these
windows the part of the case is written, so that the next call resumes a measurement that was
stopped. Two checks serve the same rows: each request alone in an empty engine, and all rows of an
arm, whose mean scores the testbed's card knows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, product
from operator import methodcaller
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from picbench.engines.algorithms import Registry
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import FAILED, Request, Result
from picbench.errors import ConfigError, InvalidRun
from picbench.papers.arm_scores import (
    DROP_DATASETS,
    ArmRows,
    Case,
    ScoredPart,
    arms_of,
    planned_links,
    ran,
)
from picbench.run.job import blocks
from picbench.run.measurements import Accuracy, Outcome, ServeAlone, ServeScores
from picbench.run.runner import UNFINISHED, Launcher, TimeBudget, say, started_engines
from picbench.run.schedule import to_request
from picbench.run.workload import Workload, load_workload
from picbench.settings import parse_config
from picbench.store import provenance
from picbench.tables.page import page, save
from picbench.tables.table import table
from picbench.workloads.sample import Sample
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
        data = {"data": self.data[case.dataset]} if case.dataset in self.data else {}
        return load_case(case, self.arms, self.rows, model=self.model, context=self.longest, **data)


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


def serve(settings: ServeScores) -> Outcome:
    """Measure bundled rows; see `measure`."""
    return measure(ServeSettings(**dict(settings)))


def measure(settings: ServeSettings, launcher: Launcher | None = None) -> Outcome:
    """Measure what is missing in the parts in the output folder; exit code 4 if rows are left.

    Raises ConfigError for parts of other settings, InvalidRun for a request that fails.
    """
    loads = {case: settings.load(case) for case in settings.cases}
    facts = _facts(settings) if loads else {}
    parts = [(_begun(case, load, settings, facts), load) for case, load in loads.items()]
    left = [(part, load) for part, load in parts if part.rows < part.wanted]
    if not left:
        return Outcome("")
    budget, took = TimeBudget(settings.seconds), 1.0
    config = engine_config(settings, left[0][1], settings.longest)
    with started_engines({"picbench": config}, launcher) as (engines, _):
        [engine] = engines.values()
        for part, load in left:
            engine.call(methodcaller("reset"))  # Nothing of other cases is cached.
            while part.rows < part.wanted:
                if not budget.fits(took):
                    return Outcome("", UNFINISHED)
                before = budget.spent
                jobs, requests = _window(part, load.samples, settings.seed)
                results = engine.call(methodcaller("generate", requests))
                _add(part, load, dict(zip(jobs, results, strict=True)))
                part.write(settings.output)
                took = budget.spent - before
                say(f"{part.case.name}: {part.rows} of {part.wanted} rows, {budget.spent:,.0f} s")
    return Outcome("")


def _begun(
    case: Case, load: Workload, settings: ServeSettings, facts: Mapping[str, Any]
) -> ScoredPart:
    """The part as it was left, or a new one; its facts say which rows these are."""
    if not load.synthetic:
        origin = load.origin
        where = f"{origin.repository}@{origin.revision[:12]}" if origin else "files"
        cut = sum(sample.truncated for sample in load.samples)
        facts = {**facts, "rows": where, "chat": load.chat, "cut": cut}
    new = ScoredPart(case, len(load.samples), facts, {arm: ArmRows() for arm in settings.arms})
    path = settings.output / f"{case.name}.json"
    if not path.exists():
        return new
    found = ScoredPart.read(path)
    found.check_continues(new)
    return found


def _window(
    part: ScoredPart, samples: Sequence[Sample], seed: int
) -> tuple[list[tuple[int, str]], list[Request]]:
    """The next rows of a part under every arm, in random order, and their requests."""
    jobs = list(product(range(part.rows, min(part.rows + WINDOW, part.wanted)), part.arms))
    Random(f"{seed} {part.case.name} {part.rows}").shuffle(jobs)
    return jobs, [to_request(samples[row], arm) for row, arm in jobs]


def _add(part: ScoredPart, load: Workload, results: Mapping[tuple[int, str], Result]) -> None:
    """Add a window to its part. Raises InvalidRun for a request that failed or links too much."""
    registry, name = Registry(), part.case.name
    for row in sorted({row for row, _ in results}):
        sample = load.samples[row]
        for arm, rows in part.arms.items():
            result, links = results[row, arm], planned_links(sample, registry.parse(arm))
            what = f"{arm} on row {row} of {name}"
            check_served(result, what)
            if result.counts.linked > links:
                raise InvalidRun(f"{what} linked {result.counts.linked} tokens, its plan {links}")
            score = load.grader.score(result.text, sample.answers) or 0.0
            rows.score.append(round(score, 4))
            rows.linked.append(links)
            rows.computed.append(result.counts.prompt - (result.counts.reused or 0))
        part.prompt.append(sample.prompt_tokens)
        part.chunk.append(sum(len(chunk.tokens) for chunk in sample.chunks))


def check_served(result: Result, what: str) -> None:
    """Raise InvalidRun for a request that failed."""
    if result.finish_reason in (FAILED, "rejected"):
        raise InvalidRun(f"{what} failed: {result.error}")


def measure_alone(settings: ServeAlone) -> Outcome:
    """Serve requests of all arms and data sets at once, then each in an empty engine.

    Arms and data sets take turns; the order is random. Writes ``alone-DTYPE.json`` and ``.md``: the
    requests with other tokens in the batch than alone, see `first_difference`. Raises InvalidRun if
    any differs in float32.
    """
    count, model, datasets = settings.requests, settings.model, settings.dataset or DATASETS
    arms, rows = arms_of(model, only=settings.algo), -(-count // len(datasets))
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
    differing: list[dict[str, Any]] = []
    for (dataset, row, arm), one, other in zip(jobs, alone, together, strict=True):
        for result in (one, other):
            check_served(result, f"{arm} on row {row} of {dataset}")
        if one.tokens != other.tokens:
            token, gap = first_difference(one, other)
            where = {"dataset": dataset, "row": row, "arm": arm}
            differing.append(where | {"token": token, "gap": gap})
    facts = _facts(settings) | {"arms": len(arms), "datasets": len(loads)}
    facts |= {"tokens": sum(len(result.tokens) for result in together)}
    document = {"schema": 1, "provenance": facts, "requests": count, "differing": differing}
    head = ("data set", "row", "arm", "first other token", "gap of the best two")
    lines = [
        (d["dataset"], str(d["row"]), f"`{d['arm']}`", str(d["token"]), f"{d['gap']:.1e}")
        for d in differing
    ]
    made = page(
        "A batch of all algorithms against each request alone",
        f"Testbed model, {ran(facts)} {count} requests of {len(arms)} arms and {len(loads)} data "
        "sets in one batch, in random order; then each in an engine that holds nothing. Greedy "
        "replies to their end.",
        f"{len(differing)} of {count} requests have other tokens ({facts['tokens']:,} in all).",
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
#: to 0.035, and both sides answer the same ones.
TOLERANCE = 0.03

#: Rows of a data set that the card speaks of.
ROWS = 200


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
    scores: list[dict[str, Any]] = []
    cells = {arm: [arm] for arm in ARMS}
    with Engine(config) as engine:
        engine.warm_up()
        facts = _facts(settings) | {"dtype": engine.describe()["dtype"]}
        for load, (arm, name) in product(loads, ARMS.items()):
            results = engine.generate([to_request(sample, arm) for sample in load.samples])
            mean = fmean(
                load.grader.score(result.text, sample.answers) or 0.0
                for sample, result in zip(load.samples, results, strict=True)
            )
            known = card[name][load.dataset]
            score: dict[str, Any] = {"dataset": load.dataset, "arm": arm, "rows": len(results)}
            scores.append(score | {"engine": mean, "card": known, "difference": mean - known})
            cells[arm].append(f"{mean:.3f} / {known:.3f}")
            say(f"{load.dataset:12} {arm:10} {cells[arm][-1]}")
    document = {"schema": 1, "provenance": facts, "rows": "synthetic", "results": scores}
    made = page(
        "The engine's accuracy against the model card's",
        f"Testbed model, {scores[0]['rows']} synthetic rows of each set, greedy, {ran(facts)} Mean "
        "scores (word F1; rouge-l of samsum and multi_news): picbench's engine / torch in bfloat16 "
        "without any engine. One fixed set of rows, decoded once: no spread to report.",
        table(["arm", *(load.dataset for load in loads)], cells.values()),
        f"Largest difference: {max(abs(score['difference']) for score in scores):.3f}.",
    )
    save(settings.output / f"accuracy-{facts['dtype']}", document, made)
    apart = [s for s in scores if s["rows"] == ROWS and abs(s["difference"]) > TOLERANCE]
    if apart:
        names = ", ".join(f"{s['arm']} on {s['dataset']}: {s['difference']:+.3f}" for s in apart)
        raise InvalidRun(f"the engine's scores and the card's differ: {names}")
    return Outcome()

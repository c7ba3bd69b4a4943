"""Serve the rows of data sets by all algorithms in one engine, and keep score row by row.

Rows are served some at a time, each by every arm, in one batch in random order. After each of these
windows the part of the case is written, so that a measurement which was stopped goes on there.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice, product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from picbench.engines.algorithms import Registry
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import FAILED, Request, Result
from picbench.errors import ConfigError, InvalidRun
from picbench.experiments.arm_scores import DROP_DATASETS, Case, ScoredPart, arms_of, planned_links
from picbench.experiments.page import save
from picbench.run.job import blocks
from picbench.run.schedule import to_request
from picbench.run.workload import Workload, load_workload
from picbench.settings import parse_config
from picbench.store import provenance
from picbench.tables import table as markdown
from picbench.workloads.testbed import DATASETS, model_path

#: Rows that are served together. With more, chunk KV is evicted before its last request.
WINDOW = 10


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What is served, and how.

    `rows` counts from the start of a data set, of which the `first` rows are left out.
    `kv_blocks` is the pool of the engine, `max_requests` how many run at a time. After `seconds`
    no window is begun. `algo` replaces the arms of the model, but for `full`. With `drop`, lead
    passages are left out of prompts.

    `name` is what files call the model, where that is not `model`. `data` says where the rows of a
    data set are, unless they are bundled. Prompts with more than `longest` tokens, their reply
    included, lose their middle; the engine has positions for twice as many, if the model has them.
    """

    model: str
    datasets: tuple[str, ...]
    rows: int = 200
    first: int = 0
    drop: bool = False
    algo: tuple[str, ...] = ()
    device: str = "cuda"
    dtype: str = "bfloat16"
    eager: bool = False
    kv_blocks: int = 16_384
    max_requests: int = 64
    seed: int = 0
    seconds: float = 0.0
    name: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    longest: int | None = None

    @property
    def cases(self) -> list[Case]:
        """The cases that are measured."""
        wanted = [d for d in self.datasets if not self.drop or d in DROP_DATASETS]
        name = self.name or self.model
        return [Case(name, dataset, self.drop, self.first) for dataset in wanted]

    def reading(self, dataset: str) -> dict[str, Any]:
        """Settings of a run that say how the rows of a data set are read."""
        found: dict[str, Any] = {"model": self.model, "context": self.longest}
        return found | ({"data": self.data[dataset]} if dataset in self.data else {})

    @property
    def arms(self) -> tuple[str, ...]:
        """The canonical specs of all arms."""
        return arms_of(self.model, drop=self.drop, only=self.algo)


def measure(settings: ServeSettings, commit: str | None, output: Path) -> bool:
    """Measure what is missing in the parts in `output`; whether all of them are complete.

    Raises ConfigError for parts of other settings, InvalidRun for a request that fails.
    """
    facts = provenance.facts(*provenance.ENGINE, device=settings.device, commit=commit)
    facts |= {"dtype": settings.dtype, "eager": settings.eager, "seed": settings.seed}
    facts |= {} if settings.longest is None else {"longest": settings.longest}
    workloads = [
        load_case(case, settings.arms, settings.rows, settings.reading(case.dataset))
        for case in settings.cases
    ]
    pairs = zip(settings.cases, workloads, strict=True)
    begun = [(_begun(case, load, settings, facts, output), load) for case, load in pairs]
    missing = [(part, load) for part, load in begun if part.rows < part.wanted]
    if not missing:
        return True
    end = time.monotonic() + settings.seconds if settings.seconds else None
    with Engine(engine_config(settings, workloads[0])) as engine:
        engine.warm_up()
        for part, load in missing:
            while part.rows < part.wanted and (end is None or time.monotonic() < end):
                _serve_window(engine, part, load, settings.seed)
                part.write(output)
                print(f"{part.case.name}: {part.rows} of {part.wanted} rows", flush=True)
            engine.reset()
    return all(part.rows == part.wanted for part, _ in missing)


def load_case(
    case: Case, arms: Sequence[str], rows: int, reading: Mapping[str, Any] | None = None
) -> Workload:
    """The first `rows` rows of a case; chunks have their documents. `reading`: see `ServeSettings`.

    Raises ConfigError if all of them are left out.
    """
    settings: dict[str, Any] = {"drop": "lead"} if case.drop else {}
    settings |= {"algo": tuple(arms), "dataset": case.dataset, "model": case.model, "limit": rows}
    found = load_workload(parse_config(settings | dict(reading or {})))
    if len(found.samples) <= case.first:
        raise ConfigError(f"`first` {case.first}: {case.dataset} has no row after that")
    return replace(found, samples=found.samples[case.first :])


def engine_config(settings: ServeSettings, workload: Workload) -> EngineConfig:
    """An engine for all arms: pads and documents may take as many positions as the model has."""
    positions = workload.model.context
    if settings.longest is not None:
        positions = min(positions or 2 * settings.longest, 2 * settings.longest)
    return EngineConfig(
        model=str(workload.model.path),
        device=settings.device,
        dtype=settings.dtype,
        eager=settings.eager,
        context=positions,
        kv_blocks=settings.kv_blocks,
        max_requests=settings.max_requests,
        tiers="",
    )


def _begun(
    case: Case, load: Workload, settings: ServeSettings, facts: Mapping[str, Any], output: Path
) -> ScoredPart:
    """The part as it was left, or a new one."""
    new = ScoredPart.begin(case, len(load.samples), {**facts, **_rows_of(load)}, settings.arms)
    path = output / f"{case.name}.json"
    if not path.exists():
        return new
    found = ScoredPart.read(path)
    found.check_continues(new)
    return found


def _rows_of(load: Workload) -> dict[str, Any]:
    """Facts about rows that are not bundled."""
    if load.synthetic:
        return {}
    origin = load.origin
    where = f"{origin.repository}@{origin.revision[:12]}" if origin else "files"
    return {"rows": where, "chat": load.chat, "cut": sum(s.truncated for s in load.samples)}


def _serve_window(engine: Engine, part: ScoredPart, load: Workload, seed: int) -> None:
    """Add the next rows to a part."""
    window = range(part.rows, min(part.rows + WINDOW, part.wanted))
    jobs = list(product(window, part.arms))
    Random(f"{seed} {part.case.name} {window.start}").shuffle(jobs)
    results = engine.generate([to_request(load.samples[row], arm) for row, arm in jobs])
    _keep(part, load, window, dict(zip(jobs, results, strict=True)))


def _keep(
    part: ScoredPart,
    load: Workload,
    window: range,
    results: Mapping[tuple[int, str], Result],
) -> None:
    registry = Registry()
    for row in window:
        sample = load.samples[row]
        for arm, rows in part.arms.items():
            result = results[row, arm]
            links = planned_links(sample, registry.parse(arm))
            what = f"{arm} on row {row} of {part.case.name}"
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


def measure_alone(
    settings: ServeSettings, requests: int, commit: str | None, output: Path
) -> list[Differing]:
    """Serve requests of all arms and data sets at once, then each in an empty engine.

    Writes ``alone-DTYPE.json`` and ``.md``. Raises InvalidRun if any differs in float32.
    """
    named, workload = _draw(settings, requests)
    with Engine(engine_config(settings, workload)) as engine:
        engine.warm_up()
        together = engine.generate([request for *_, request in named], logprobs=2)
        alone = [_alone(engine, request) for *_, request in named]
    for (dataset, row, arm, _), *results in zip(named, alone, together, strict=True):
        for result in results:
            check_served(result, f"{arm} on row {row} of {dataset}")
    found = [
        Differing(dataset, row, arm, *first_difference(one, other))
        for (dataset, row, arm, _), one, other in zip(named, alone, together, strict=True)
        if one.tokens != other.tokens
    ]
    facts = provenance.facts(*provenance.ENGINE, device=settings.device, commit=commit)
    facts |= {"dtype": settings.dtype, "eager": settings.eager, "seed": settings.seed}
    facts |= {
        "arms": len(settings.arms),
        "datasets": len(settings.cases),
        "tokens": sum(len(r.tokens) for r in together),
    }
    write(found, requests, facts, output)
    if found and settings.dtype == "float32":
        raise InvalidRun(f"{len(found)} of {requests} requests differ from those alone")
    return found


def first_difference(alone: Result, together: Result) -> tuple[int, float]:
    """Where two replies part, and the gap between the best two tokens there (see `Differing`)."""
    pairs = zip(alone.tokens, together.tokens, strict=False)
    shorter = min(len(alone.tokens), len(together.tokens))
    at = next((n for n, (one, other) in enumerate(pairs) if one != other), shorter)
    longer = max(alone, together, key=lambda result: len(result.tokens))
    steps = alone.logprobs if at < len(alone.tokens) else longer.logprobs
    best, second = sorted((steps or ())[at].values(), reverse=True)[:2]
    return at, best - second


def write(
    found: Sequence[Differing], requests: int, facts: Mapping[str, Any], output: Path
) -> None:
    """Write the files of the measurement."""
    document = {
        "schema": 1,
        "provenance": facts,
        "requests": requests,
        "differing": [asdict(differing) for differing in found],
    }
    save(output / f"alone-{facts['dtype']}", document, render(found, requests, facts))


def render(found: Sequence[Differing], requests: int, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    rows = [(d.dataset, str(d.row), f"`{d.arm}`", str(d.token), f"{d.gap:.1e}") for d in found]
    head = ("data set", "row", "arm", "first other token", "gap of the best two")
    table = ["", markdown.table(head, rows, right=3), ""] if rows else []
    return "\n".join(
        [
            "# A batch of all algorithms against each request alone",
            "",
            f"Testbed model, {facts['dtype']}{', eager' if facts['eager'] else ''}; "
            f"{facts['gpu']}, driver {facts['driver']}, vLLM {facts['vllm']}, torch "
            f"{facts['torch']}, commit {facts['commit']}. {requests} requests of {facts['arms']} "
            f"arms and {facts['datasets']} data sets in one batch, in random order; then each in "
            "an engine that holds nothing. Greedy replies to their end.",
            "",
            f"{len(found)} of {requests} requests have other tokens ({facts['tokens']:,} in all).",
            *table,
            "",
        ]
    )


def _draw(
    settings: ServeSettings, requests: int
) -> tuple[list[tuple[str, int, str, Request]], Any]:
    """(data set, row, arm, request): arms and data sets in turn, in random order."""
    arms, cases = settings.arms, settings.cases
    rows = -(-requests // len(cases))
    loads = {case.dataset: load_case(case, arms, rows) for case in cases}
    samples = [
        (dataset, row, load.samples[row % len(load.samples)])
        for row in range(rows)
        for dataset, load in loads.items()
    ]
    named = [
        (dataset, row, arm, to_request(sample, arm))
        for (dataset, row, sample), arm in zip(
            islice(samples, requests), islice(cycle(arms), requests), strict=True
        )
    ]
    Random(settings.seed).shuffle(named)
    return named, next(iter(loads.values()))


def _alone(engine: Engine, request: Request) -> Result:
    engine.reset()
    [result] = engine.generate([request], logprobs=2)
    return result


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


def measure_accuracy(
    device: str, dtype: str, rows: int, eager: bool, commit: str | None, output: Path
) -> None:
    """Run all rows through all arms, write a page; InvalidRun where scores are apart."""
    workloads = [_workload(name, rows) for name in DATASETS]
    with Engine(_config(workloads, device, dtype, eager)) as engine:
        engine.warm_up()
        about = engine.describe()
        scores = [score for workload in workloads for score in _scores(engine, workload)]
    facts = provenance.facts(*provenance.ENGINE, device=device, commit=commit)
    facts |= {"dtype": about["dtype"], "eager": eager}
    write_accuracy(scores, facts, output)
    check(scores)


def check(scores: Sequence[Score]) -> None:
    """Raise InvalidRun where scores over all of the card's rows are further apart than noise."""
    if apart := [s for s in scores if s.rows == ROWS and abs(s.difference) > TOLERANCE]:
        names = ", ".join(f"{s.arm} on {s.dataset}: {s.difference:+.3f}" for s in apart)
        raise InvalidRun(f"the engine's scores and the card's differ: {names}")


def write_accuracy(scores: Sequence[Score], facts: Mapping[str, Any], output: Path) -> None:
    """Write ``accuracy-DTYPE.json`` and ``.md``."""
    results = [asdict(score) | {"difference": score.difference} for score in scores]
    document = {"schema": 1, "provenance": facts, "rows": "synthetic", "results": results}
    save(output / f"accuracy-{facts['dtype']}", document, render_accuracy(scores, facts))


def render_accuracy(scores: Sequence[Score], facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    found = {(score.arm, score.dataset): score for score in scores}
    datasets = list(dict.fromkeys(score.dataset for score in scores))
    rows = [
        [arm, *(_cell(found[arm, dataset]) for dataset in datasets)]
        for arm in dict.fromkeys(score.arm for score in scores)
    ]
    worst = max(abs(score.difference) for score in scores)
    return "\n".join(
        [
            "# The engine's accuracy against the model card's",
            "",
            f"Testbed model, {scores[0].rows} synthetic rows of each set, greedy, {facts['dtype']}"
            f"{', eager' if facts['eager'] else ''}; {facts['gpu']}, driver {facts['driver']}, "
            f"vLLM {facts['vllm']}, torch {facts['torch']}, commit {facts['commit']}. Mean scores "
            "(word F1; rouge-l of samsum and multi_news): picbench's engine / torch in bfloat16 "
            "without any engine. One fixed set of rows, decoded once: no spread to report.",
            "",
            markdown.table(["arm", *datasets], rows),
            "",
            f"Largest difference: {worst:.3f}.",
            "",
        ]
    )


def _cell(score: Score) -> str:
    return f"{score.engine:.3f} / {score.card:.3f}"


def _workload(dataset: str, rows: int) -> Workload:
    return load_workload(
        parse_config({"algo": tuple(ARMS), "dataset": dataset, "limit": rows, "model": "testbed"})
    )


def _config(workloads: Sequence[Workload], device: str, dtype: str, eager: bool) -> EngineConfig:
    samples = [sample for workload in workloads for sample in workload.samples]
    longest = max(sample.prompt_tokens + sample.max_tokens for sample in samples)
    return EngineConfig(
        model=str(model_path()),
        device=device,
        dtype=dtype,
        eager=eager,
        context=longest,
        kv_blocks=blocks(longest) * 200,
        max_requests=64,
    )


def _scores(engine: Engine, workload: Workload) -> list[Score]:
    card = json.loads((Path(model_path()) / "scores.json").read_bytes())["base"]["arms"]
    found = []
    for arm, name in ARMS.items():
        requests = [to_request(sample, arm) for sample in workload.samples]
        results = engine.generate(requests)
        mean = fmean(
            workload.grader.score(result.text, sample.answers) or 0.0
            for sample, result in zip(workload.samples, results, strict=True)
        )
        known = card[name][workload.dataset]
        found.append(Score(workload.dataset, arm, len(results), mean, known))
        print(f"{workload.dataset:12} {arm:10} {mean:.3f} / {known:.3f}", flush=True)
    return found

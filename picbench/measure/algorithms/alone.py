"""Whether a batch of all algorithms gives each request what it gets alone in the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

from picbench.engines.engine import Engine
from picbench.engines.request import Request, Result
from picbench.errors import InvalidRun
from picbench.measure.algorithms.serve_arms import (
    ServeSettings,
    check_served,
    engine_config,
    load_case,
)
from picbench.measure.report import save
from picbench.output import markdown, provenance
from picbench.run.protocol import to_request


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


def measure(
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

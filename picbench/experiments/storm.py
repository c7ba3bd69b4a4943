"""A storm: mixed requests and aborts in a starved pool must answer like those in a large one.

Requests of many algorithms read the same chunks, and plain ones are among them. Everything is drawn
from a seed, token ids included, so any model with 1,000 tokens will do.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from picbench.engines.algorithms import parse, temperatures
from picbench.engines.chunk_cache.tiers.notation import probe_tiers
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, PromptSegment, Request, Result, Text
from picbench.errors import ConfigError
from picbench.experiments.oracle import as_served
from picbench.run.measurements import Outcome, Storm
from picbench.run.runner import random_tokens
from picbench.store import provenance
from picbench.tables.page import page, save
from picbench.tables.table import table
from picbench.workloads import models
from picbench.workloads.models.shapes import all_shapes, materialise

#: Algorithms of requests with chunks.
ALGORITHMS = (
    *("mepic", "naive", "epic:k=16", "epic:k=4:copy=shared", "cacheblend:r=0.15"),
    *("cacheblend:r=0.15:select=first", "full", "prefix", "mepic:pad=paper", "naive:anchor=head"),
    *("block-attention", "prompt-cache", "kvlink:n=5", "ape", "auto", "auto:naive"),
)

#: The algorithm of requests without chunks.
PLAIN = "prefix"

#: How many times the starved pool the large one is.
LARGE = 8

#: Requests that an engine runs and that are submitted at a time, and how many in the large pool's
#: second run. So many run that the pool is what they wait for.
RUNNING, FLYING, FEWER = 128, 192, 32

#: Two tokens whose log-probabilities differ by less (nats) tie: sums in another order may choose
#: the other.
TIES = {"float32": 1e-3, "bfloat16": 0.25}

#: In bfloat16 this many times as many answers may differ as between two runs of the large pool,
#: and this share of all more.
FACTOR, MARGIN = 2.0, 0.02

#: What is counted of an algorithm's requests: drawn, answered, and answered otherwise. `differ`
#: compares the starved pool with the large one, `control` two runs of the large pool; answers that
#: part at a tie are counted apart.
COUNTS = ("requests", "answered", "differ", "ties", "control", "control_ties")

#: Counts by algorithm.
Tallies = Mapping[str, Mapping[str, int]]


def draw_requests(count: int, longest: int, seed: int) -> list[Request]:
    """`count` requests with prompts of at most `longest` tokens, at least 256.

    Every seventh has no chunks, every twenty-fifth a prompt of nearly `longest` tokens, in which
    chunks may occur more than once.
    """
    dice = random.Random(seed)
    lengths = [dice.randint(17, min(400, longest // 8)) for _ in range(96)]
    chunks = [Chunk(tokens=random_tokens(n, f"c{i}")) for i, n in enumerate(lengths)]
    weights = [(rank + 1) ** -0.4 for rank in range(len(chunks))]
    requests = []
    for index in range(count):
        system = Text(tokens=random_tokens(24, f"system {dice.randrange(3)}"))
        question = Text(tokens=random_tokens(dice.randint(1, 40), f"question {index}"))
        long = index % 25 == 24
        room = (longest if long else longest // 2) - 64
        wanted = longest if long else dice.randint(1, 12)
        segments: list[PromptSegment] = [system]
        while len(segments) <= wanted:
            [chunk] = dice.choices(chunks, weights)
            room -= len(chunk.tokens or ())
            if room < 0:
                break
            segments.append(chunk)
        segments.append(question)
        algorithm = dice.choice(ALGORITHMS)
        if index % 7 == 0:
            tokens = tuple(token for segment in segments for token in segment.tokens or ())
            segments, algorithm = [Text(tokens=tokens)], PLAIN
        # The longer they are, the more requests lose their blocks.
        output = dice.choice((8, 60, 300, 300))
        requests.append(Request(segments, algorithm, output))
    return requests


def positions(request: Request) -> int:
    """The most positions of a request: visible pads (``pad=paper``) fill each segment's block."""
    tokens = sum(len(segment.tokens or ()) for segment in request.segments)
    return tokens + BLOCK_SIZE * len(request.segments) + (request.max_tokens or 0)


def serve(
    engine: Engine,
    requests: Sequence[Request],
    *,
    flying: int = FLYING,
    aborts: random.Random | None = None,
    logprobs: int | None = None,
) -> tuple[dict[int, Result], dict[str, Any]]:
    """Serve all requests, at most `flying` at a time; with `aborts`, some are aborted at random.

    Returns results by number, and what happened meanwhile: `unsound` counts ledger snapshots that
    do not sum to the pool, `compiled` kernels by name.
    """
    results, alive, aborted = dict[int, Result](), dict[str, int](), 0
    before, waiting = engine.preemptions, list(enumerate(requests))[::-1]
    engine.measure()
    engine.watch_compilations()
    while waiting or alive:
        while waiting and len(alive) < flying:
            index, request = waiting.pop()
            alive[engine.submit(request, logprobs=logprobs, ignore_eos=True)] = index
        for tag, result in engine.step().items():
            results[alive.pop(tag)] = result
        if aborts and alive and aborts.random() < 0.02:
            victim = aborts.choice(sorted(alive))
            engine.abort(victim)
            del alive[victim]
            aborted += 1
    engine.drain()
    memory = engine.memory
    return results, {
        "aborted": aborted,
        "preemptions": engine.preemptions - before,
        "steps": len(memory),
        "unsound": sum(sum(s.blocks.values()) != s.pool for s in memory),
        "drained": engine.drained,
        "compiled": dict(Counter(engine.compilations)),
    }


def measure(settings: Storm) -> Outcome:
    """Run the storm, and write what was found; exit code 1 if anything is wrong."""
    from picbench.engines.vllm.device import find

    probe_tiers(settings.tiers)
    requests = draw_requests(settings.requests, settings.longest, settings.seed)
    context = max(map(positions, requests))
    config = EngineConfig(
        model=str(_model(settings, context)),
        device=find(settings.device).name,
        asynchronous=not settings.synchronous,
        kv_blocks=settings.pool,
        context=context,
        batch_tokens=min(2048, settings.longest),
        max_requests=RUNNING,
        temperatures=temperatures(map(parse, ALGORITHMS)),
        **settings.model_dump(include={"dtype", "eager", "tensor_parallel", "tiers"}),
    )
    with Engine(config) as engine:
        found, run = serve(engine, requests, aborts=random.Random(settings.seed))
        described = engine.describe()
    # Where there was a choice, the answer is compared with one to what was chosen.
    choices = (found[n].choice if n in found else None for n in range(len(requests)))
    chosen = [as_served(*pair) for pair in zip(requests, choices, strict=True)]
    with Engine(replace(config, kv_blocks=LARGE * settings.pool, tiers="")) as engine:
        expected, _ = serve(engine, chosen, logprobs=5)
        engine.reset()
        # In float32 nothing may differ, whatever a second run would do.
        rounds = settings.dtype != "float32"
        control, _ = serve(engine, chosen, flying=FEWER) if rounds else ({}, {})
    tallies = tally(requests, expected, control, found, TIES[settings.dtype])
    wrong = faults(settings, tallies, run)
    facts = provenance.facts(*provenance.ENGINE, device=config.device, commit=settings.commit)
    known = settings.model_dump(exclude={"output", "commit"})
    facts |= {"engine": described, "settings": known}
    shown = render(facts, tallies, run, wrong)
    document = {"schema": 1, "provenance": facts, "algorithms": tallies, "faults": wrong}
    parts = ["storm", settings.dtype]
    parts += [f"tp{settings.tensor_parallel}"] if settings.tensor_parallel > 1 else []
    parts += [name for name in ("eager", "synchronous") if known[name]]
    save(settings.output / "-".join(parts), document | {"run": run}, shown)
    return Outcome(shown, 1 if wrong else 0)


def _model(settings: Storm, context: int) -> Path | str:
    """The folder of a model; shapes get as many positions as the storm needs."""
    name = settings.model
    shape = all_shapes().get(name.removeprefix("shape:")) if name.startswith("shape:") else None
    if shape is not None and shape.positions < context:
        return materialise(replace(shape, positions=context))
    model = models.resolve(name)
    if model.context is not None and model.context < context:
        raise ConfigError(
            f"`longest`: the model has {model.context} positions",
            hint=f"use `longest` <= {settings.longest * model.context // context}",
        )
    return model.path


def tally(
    requests: Sequence[Request],
    expected: Mapping[int, Result],
    control: Mapping[int, Result],
    found: Mapping[int, Result],
    tie: float,
) -> Tallies:
    """Counts by algorithm, in the order of their names; `tie` is in nats."""
    names = sorted({str(request.algorithm) for request in requests})
    tallies = {name: dict.fromkeys(COUNTS, 0) for name in names}
    for number, request in enumerate(requests):
        row, known = tallies[str(request.algorithm)], expected[number]
        row["requests"] += 1
        row["answered"] += number in found
        for results, differ, ties in (found, *COUNTS[2:4]), (control, *COUNTS[4:]):
            result = results.get(number, known)
            if result.tokens != known.tokens:
                row[ties if is_tie(known, result, tie) else differ] += 1
    return tallies


def is_tie(expected: Result, found: Result, tie: float) -> bool:
    """Whether two answers part at two tokens that were as likely but for `tie` nats."""
    pairs = zip(expected.tokens, found.tokens, strict=False)
    at = next((i for i, (one, two) in enumerate(pairs) if one != two), None)
    if at is None or expected.logprobs is None:
        return False
    likely = expected.logprobs[at]
    one, two = likely[expected.tokens[at]], likely.get(found.tokens[at])
    return two is not None and abs(one - two) < tie


def faults(settings: Storm, tallies: Tallies, run: Mapping[str, Any]) -> list[str]:
    """What is wrong with a storm, a line each. In float32 no answer may differ."""
    drawn, answered, differ, _, control, _ = _totals(tallies)
    unanswered, ours = settings.requests - answered - run["aborted"], _ours(run)
    allowed = answered * (FACTOR * control / drawn + MARGIN)
    if settings.dtype == "float32":
        allowed = 0
    few = run["preemptions"] < settings.preemptions
    found = {
        f"{unanswered} requests got no answer": unanswered != 0,
        f"{differ} of {answered} answers differ from the large pool's": differ > allowed,
        f"{run['preemptions']} preemptions, not {settings.preemptions}": few,
        f"the ledger does not sum to the pool at {run['unsound']} steps": run["unsound"] > 0,
        "the pool did not drain": not run["drained"],
        f"{ours} kernels of picbench were compiled while serving": ours > 0,
    }
    return [line for line, wrong in found.items() if wrong]


def _totals(tallies: Tallies) -> list[int]:
    return [sum(row[name] for row in tallies.values()) for name in COUNTS]


def _ours(run: Mapping[str, Any]) -> int:
    """How often kernels of picbench were compiled."""
    return sum(n for kernel, n in run["compiled"].items() if kernel.startswith("picbench."))


_ABOUT = """\
{gpu}, driver {driver}, torch {torch}, vLLM {vllm}, commit {commit}.
{model}, {tensor_parallel} worker(s), eager {eager}, synchronous {synchronous}; a pool of {pool:,}
blocks against {large:,}, tiers {tiers!r}, prompts to {longest:,} tokens, seed {seed}."""

_FOUND = """\
Answers are compared with the large pool's; control (not in float32): a second run of that, at most
{fewer} requests at a time. A tie is {tie} nats.
{aborted} aborted, {preemptions} preemptions, {steps:,} steps; kernels compiled while serving:
{ours} of picbench, {others} of others."""


def render(
    facts: Mapping[str, Any], tallies: Tallies, run: Mapping[str, Any], wrong: Sequence[str]
) -> str:
    """The page, in Markdown: one row an algorithm, and a line with the verdict last."""
    known, ours = facts["settings"], _ours(run)
    dtype, others = known["dtype"], sum(run["compiled"].values()) - ours
    head = ("algorithm", "requests", "answered", "differ", "ties", "control differ", "control ties")
    rows = [(name, *map(str, row.values())) for name, row in tallies.items()]
    return page(
        f"A storm in {dtype}",
        _ABOUT.format(**facts, **known, large=LARGE * known["pool"]),
        table(head, [*rows, ("all", *map(str, _totals(tallies)))], right=1),
        _FOUND.format(**run, fewer=FEWER, tie=TIES[dtype], ours=ours, others=others),
        "Wrong: " + "; ".join(wrong) if wrong else "Nothing is wrong.",
    )

"""A storm: mixed requests and aborts in a starved pool must answer like those in a large one.

Requests of many algorithms read the same chunks, and plain ones are among them. Everything is drawn
from a seed, token ids included, so any model with 1,000 tokens will do.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, PromptSegment, Request, Result, Text
from picbench.errors import ConfigError
from picbench.run.measurements import Outcome, Storm
from picbench.run.runner import random_tokens
from picbench.store import provenance
from picbench.tables.page import page, save
from picbench.tables.table import table
from picbench.workloads import models
from picbench.workloads.models.shapes import all_shapes, materialise

#: Algorithms of requests with chunks.
ALGORITHMS = (
    "mepic",
    "naive",
    "epic:k=16",
    "epic:k=4:copy=shared",
    "cacheblend:r=0.15",
    "cacheblend:r=0.15:select=first",
    "full",
    "prefix",
    "mepic:pad=paper",
    "naive:anchored=on",
    "block-attention",
    "prompt-cache",
    "kvlink:n=5",
)

#: The algorithm of requests without chunks.
PLAIN = "prefix"

#: Tokens that requests generate: the longer, the more requests lose their blocks.
OUTPUTS = (8, 60, 300, 300)

#: The most chunks of a request, unless its prompt is long.
MOST = 12

#: Tokens of the shortest and the longest chunk, and how many chunks there are.
SHORTEST, LONGEST, CHUNKS = 17, 400, 96

_SYSTEMS, _SKEW = 3, 0.4


def draw_requests(count: int, longest: int, seed: int) -> list[Request]:
    """`count` requests with prompts of at most `longest` tokens, at least 256.

    Every seventh has no chunks, every twenty-fifth a prompt of nearly `longest` tokens, in which
    chunks may occur more than once.
    """
    dice = random.Random(seed)
    chunks = [
        Chunk(tokens=random_tokens(dice.randint(SHORTEST, min(LONGEST, longest // 8)), f"c{i}"))
        for i in range(CHUNKS)
    ]
    return [_request(index, chunks, longest, dice) for index in range(count)]


def _request(index: int, chunks: Sequence[Chunk], longest: int, dice: random.Random) -> Request:
    system = Text(tokens=random_tokens(24, f"system {dice.randrange(_SYSTEMS)}"))
    question = Text(tokens=random_tokens(dice.randint(1, 40), f"question {index}"))
    most = longest if index % 25 == 24 else longest // 2
    wanted = None if index % 25 == 24 else dice.randint(1, MOST)
    picked = list(_picked(chunks, most - 64, wanted, dice))
    segments: list[PromptSegment] = [system, *picked, question]
    algorithm = dice.choice(ALGORITHMS)
    if index % 7 == 0:
        tokens = tuple(token for segment in segments for token in segment.tokens or ())
        segments, algorithm = [Text(tokens=tokens)], PLAIN
    return Request(segments, algorithm, dice.choice(OUTPUTS))


def _picked(
    chunks: Sequence[Chunk], room: int, count: int | None, dice: random.Random
) -> Iterator[Chunk]:
    """Chunks of at most `room` tokens together, `count` of them unless that is too many."""
    weights = [(rank + 1) ** -_SKEW for rank in range(len(chunks))]
    while count is None or count > 0:
        [chunk] = dice.choices(chunks, weights)
        room -= len(chunk.tokens or ())
        if room < 0:
            return
        count = None if count is None else count - 1
        yield chunk


#: How many times the starved pool the large one is.
LARGE = 8

#: Requests that an engine runs and that are submitted at a time, and how many in the large pool's
#: second run. So many run that the pool is what they wait for.
RUNNING, FLYING, FEWER = 128, 192, 32

#: The probability that some request is aborted after a step.
ABORTS = 0.02

#: Two tokens whose log-probabilities differ by less (nats) tie: sums in another order may choose
#: the other.
TIES = {"float32": 1e-3, "bfloat16": 0.25}

# Log-probabilities that are asked for a token, to find ties.
_LIKELY = 5

#: In bfloat16 this many times as many answers may differ as between two runs of the large pool,
#: and this share of all more.
FACTOR, MARGIN = 2.0, 0.02


def file_name(settings: Storm) -> str:
    """The name of the files with results."""
    parts = ["storm", settings.dtype]
    parts += [f"tp{settings.tensor_parallel}"] if settings.tensor_parallel > 1 else []
    parts += ["eager"] if settings.eager else []
    parts += ["synchronous"] if settings.synchronous else []
    return "-".join(parts)


def _starved(settings: Storm, context: int) -> EngineConfig:
    """The engine with the starved pool, for requests of at most `context` positions."""
    from picbench.engines.vllm.device import find

    return EngineConfig(
        model=str(_model(settings, context)),
        device=find(settings.device).name,
        dtype=settings.dtype,
        eager=settings.eager,
        asynchronous=not settings.synchronous,
        tensor_parallel=settings.tensor_parallel,
        kv_blocks=settings.pool,
        tiers=settings.tiers,
        context=context,
        batch_tokens=min(2048, settings.longest),
        max_requests=RUNNING,
    )


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


@dataclass(slots=True)
class StormRun:
    """What an engine made of the requests: results by number, and what happened meanwhile.

    `unsound` counts ledger snapshots that do not sum to the pool, `compiled` kernels by name.
    """

    results: dict[int, Result] = field(default_factory=dict)
    aborted: int = 0
    preemptions: int = 0
    steps: int = 0
    unsound: int = 0
    drained: bool = True
    compiled: Counter[str] = field(default_factory=Counter)

    @property
    def ours(self) -> int:
        """How often kernels of picbench were compiled."""
        return sum(n for kernel, n in self.compiled.items() if kernel.startswith("picbench."))

    def counts(self) -> dict[str, Any]:
        """What happened, for files."""
        names = ("aborted", "preemptions", "steps", "unsound", "drained")
        return {name: getattr(self, name) for name in names} | {"compiled": dict(self.compiled)}


@dataclass(frozen=True, slots=True)
class StormTally:
    """Requests of one algorithm: how many were drawn, answered, and answered otherwise.

    `differ` compares the starved pool with the large one, `control` two runs of the large pool.
    Answers that part at a tie are counted apart.
    """

    requests: int
    answered: int
    differ: int
    ties: int
    control: int
    control_ties: int


def serve(
    engine: Engine,
    requests: Sequence[Request],
    *,
    flying: int = FLYING,
    aborts: float = 0.0,
    seed: int = 0,
    logprobs: int | None = None,
) -> StormRun:
    """Serve all requests, at most `flying` at a time; after a step abort one of them at random."""
    dice, run, alive = random.Random(seed), StormRun(), dict[str, int]()
    before, waiting = engine.preemptions, list(enumerate(requests))[::-1]
    engine.measure()
    engine.watch_compilations()
    while waiting or alive:
        while waiting and len(alive) < flying:
            index, request = waiting.pop()
            alive[engine.submit(request, logprobs=logprobs, ignore_eos=True)] = index
        for tag, result in engine.step().items():
            run.results[alive.pop(tag)] = result
        if alive and dice.random() < aborts:
            victim = dice.choice(sorted(alive))
            engine.abort(victim)
            del alive[victim]
            run.aborted += 1
    engine.drain()
    memory = engine.memory
    run.steps, run.drained = len(memory), engine.drained
    run.unsound = sum(sum(s.blocks.values()) != s.pool for s in memory)
    run.preemptions = engine.preemptions - before
    run.compiled = Counter(engine.compilations)
    return run


def measure(settings: Storm) -> Outcome:
    """Run the storm, and write what was found; exit code 1 if anything is wrong."""
    requests = draw_requests(settings.requests, settings.longest, settings.seed)
    config = _starved(settings, max(map(positions, requests)))
    with Engine(replace(config, kv_blocks=LARGE * settings.pool, tiers="")) as engine:
        expected = serve(engine, requests, logprobs=_LIKELY)
        engine.reset()
        # In float32 nothing may differ, whatever a second run would do.
        rounds = settings.dtype != "float32"
        control = serve(engine, requests, flying=FEWER) if rounds else StormRun()
    with Engine(config) as engine:
        found = serve(engine, requests, aborts=ABORTS, seed=settings.seed)
        described = engine.describe()
    tallies = tally(requests, expected, control, found, TIES[settings.dtype])
    wrong = faults(settings, tallies, found)
    facts = provenance.facts(*provenance.ENGINE, device=config.device, commit=settings.commit)
    known = settings.model_dump(exclude={"output", "commit"})
    facts |= {"engine": described, "settings": known}
    shown = render(settings, facts, tallies, found, wrong)
    rows = {name: asdict(row) for name, row in tallies.items()}
    document = {"schema": 1, "provenance": facts, "algorithms": rows, "faults": wrong}
    save(settings.output / file_name(settings), document | {"run": found.counts()}, shown)
    return Outcome(shown, 1 if wrong else 0)


def positions(request: Request) -> int:
    """The most positions of a request: visible pads (``pad=paper``) fill each segment's block."""
    tokens = sum(len(segment.tokens or ()) for segment in request.segments)
    return tokens + BLOCK_SIZE * len(request.segments) + (request.max_tokens or 0)


def tally(
    requests: Sequence[Request], expected: StormRun, control: StormRun, found: StormRun, tie: float
) -> dict[str, StormTally]:
    """Counts by algorithm, in the order of their names; `tie` is in nats."""
    numbers: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        numbers.setdefault(str(request.algorithm), []).append(number)
    tallies = {}
    for algorithm, own in sorted(numbers.items()):
        counts = []
        for run in (found, control):
            pairs = [(expected.results[n], run.results[n]) for n in own if n in run.results]
            other = [(one, two) for one, two in pairs if one.tokens != two.tokens]
            ties = sum(is_tie(one, two, tie) for one, two in other)
            counts += [len(other) - ties, ties]
        answered = sum(n in found.results for n in own)
        tallies[algorithm] = StormTally(len(own), answered, *counts)
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


def faults(settings: Storm, tallies: Mapping[str, StormTally], run: StormRun) -> list[str]:
    """What is wrong with a storm, a line each. In float32 no answer may differ."""
    answered = sum(row.answered for row in tallies.values())
    differ = sum(row.differ for row in tallies.values())
    unanswered = settings.requests - answered - run.aborted
    drawn = sum(row.requests for row in tallies.values())
    share = sum(row.control for row in tallies.values()) / drawn
    allowed = 0 if settings.dtype == "float32" else answered * (FACTOR * share + MARGIN)
    found = {
        f"{unanswered} requests got no answer": unanswered != 0,
        f"{differ} of {answered} answers differ from the large pool's": differ > allowed,
        f"{run.preemptions} preemptions, not {settings.preemptions}": run.preemptions
        < settings.preemptions,
        f"the ledger does not sum to the pool at {run.unsound} steps": run.unsound > 0,
        "the pool did not drain": not run.drained,
        f"{run.ours} kernels of picbench were compiled while serving": run.ours > 0,
    }
    return [line for line, wrong in found.items() if wrong]


def render(
    settings: Storm,
    facts: Mapping[str, Any],
    tallies: Mapping[str, StormTally],
    run: StormRun,
    wrong: Sequence[str],
) -> str:
    """The page, in Markdown: one row an algorithm, and a line with the verdict last."""
    head = ("algorithm", "requests", "answered", "differ", "ties", "control differ", "control ties")
    rows = {name: astuple(row) for name, row in tallies.items()}
    rows["all"] = tuple(map(sum, zip(*rows.values(), strict=True)))
    others = ", ".join(sorted(k for k in run.compiled if not k.startswith("picbench.")))
    return page(
        f"A storm in {settings.dtype}",
        f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}, vLLM {facts['vllm']}, "
        f"commit {facts['commit']}.\n"
        f"{settings.model}, {settings.tensor_parallel} worker(s), "
        f"{'eager' if settings.eager else 'CUDA graphs where the device has them'}, "
        f"{'synchronous' if settings.synchronous else 'scheduling ahead'}; a pool of "
        f"{settings.pool:,} blocks against {LARGE * settings.pool:,}, tiers "
        f"{settings.tiers or 'none'}, prompts to {settings.longest:,} tokens, "
        f"seed {settings.seed}.",
        table(head, [(name, *map(str, row)) for name, row in rows.items()], right=1),
        "Answers are compared with the large pool's; control (not in float32): a second run "
        f"of that, at most {FEWER} requests at a time. A tie is {TIES[settings.dtype]} nats.\n"
        f"{run.aborted} aborted, {run.preemptions} preemptions, {run.steps:,} steps; kernels "
        f"compiled while serving: {run.ours} of picbench, "
        f"{run.compiled.total() - run.ours} of others"
        f"{f' ({others})' if others else ''}.",
        "Wrong: " + "; ".join(wrong) if wrong else "Nothing is wrong.",
    )

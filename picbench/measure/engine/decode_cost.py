"""What a token of a reply costs on a CPU where the request has a plan, beside a plain request.

One engine serves both, in alternation and in random order: prompts of the same tokens, once as one
text, and once as a text, chunks and a question. Everything is cached before it is timed, so that
all replies of a batch begin in one step, and the steps after it only decode. The first of them
gathers the keys of planned requests. CPU time is that of the engine's process, all threads
together: other work on the machine disturbs it less than wall time.
"""

import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.errors import InvalidRun
from picbench.measure.engine.interleaved import Measure, run_interleaved
from picbench.measure.engine.random_tokens import random_tokens
from picbench.measure.report import Spread, save
from picbench.output import markdown, provenance
from picbench.workloads import models

#: Tokens of the text before all chunks, of a chunk, of the question, and of a reply. With 16 chunks
#: they fill the testbed model's 4,096 positions.
LEAD, CHUNK, QUESTION, REPLY = 32, 240, 40, 65

#: What plain requests are called; the other arms are algorithms. `mepic` shares chunks, `epic`
#: copies them.
PLAIN = "plain"
PLANNED = ("mepic", "epic:k=16")

#: How many times a plain request's CPU time a planned one's may be.
ALLOWED = 1.3

_CLOCKS = ("cpu", "wall")
_FACTS = ("cpu", "threads", "capability", "variables", "python", "torch", "vllm", "commit", "load")


class ReplyBatch(NamedTuple):
    """How many requests decode at a time, and how many chunks each has."""

    requests: int
    chunks: int

    @property
    def prompt(self) -> int:
        """Prompt tokens of each request."""
        return LEAD + self.chunks * CHUNK + QUESTION

    @property
    def label(self) -> str:
        """What the batch is called in figures."""
        return f"{self.requests} x {self.prompt}"

    def drawn(self, arm: str) -> list[Request]:
        """The requests of an arm: the same tokens in every arm and every round."""
        return [self._request(arm, f"{self.label} {index}") for index in range(self.requests)]

    def _request(self, arm: str, name: str) -> Request:
        lead = random_tokens(LEAD, f"{name} lead")
        chunks = [random_tokens(CHUNK, f"{name} chunk {i}") for i in range(self.chunks)]
        question = random_tokens(QUESTION, f"{name} question")
        if arm == PLAIN:
            return Request([Text(tokens=sum(chunks, lead) + question)])
        cached = [Chunk(tokens=tokens) for tokens in chunks]
        return Request([Text(tokens=lead), *cached, Text(tokens=question)], arm)


#: One request and eight, of about 1,000 and 4,000 tokens.
BATCHES = tuple(ReplyBatch(requests, chunks) for requests in (1, 8) for chunks in (4, 16))


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """What an algorithm's requests cost in a batch, beside plain ones of as many tokens.

    By clock ("cpu", "wall"): milliseconds a token of either, and the ratio planned to plain, paired
    within a round.
    """

    requests: int
    prompt: int
    algorithm: str
    plain_ms: Mapping[str, Spread]
    planned_ms: Mapping[str, Spread]
    ratio: Mapping[str, Spread]


def time_replies(engine: Engine, name: str, *, batch: ReplyBatch) -> dict[str, float]:
    """Milliseconds a token by batch, arm and clock; `name` decides the order of the arms.

    Raises InvalidRun where an arm did not do what it is timed for.
    """
    arms = [PLAIN, *PLANNED]
    random.Random(name).shuffle(arms)
    found: dict[str, float] = {}
    for arm in arms:
        times = _time_arm(engine, arm, batch.drawn(arm))
        for clock, milliseconds in zip(_CLOCKS, times, strict=True):
            found[f"{batch.label} {arm} {clock}"] = milliseconds
    return found


def _time_arm(engine: Engine, arm: str, requests: Sequence[Request]) -> Iterator[float]:
    engine.generate(requests, max_tokens=1, ignore_eos=True)
    before, results, ends = engine.preemptions, dict[str, Result](), list[int]()
    tags = [engine.submit(r, max_tokens=REPLY, ignore_eos=True) for r in requests]
    clocks = [_now()]
    while len(ends) < len(tags):
        ended = engine.step()
        clocks.append(_now())
        ends += [len(clocks) - 1] * len(ended)
        results |= ended
    require_decoding(arm, list(results.values()), engine.preemptions - before)
    first, last = decoding(ends)
    tokens = (last - first) * len(requests)
    pairs = zip(clocks[first], clocks[last], strict=True)
    return ((end - begin) / tokens * 1e3 for begin, end in pairs)


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def decoding(ends: Collection[int]) -> tuple[int, int]:
    """The steps after which the first and the last token of all replies were there.

    `ends` are the steps, counted from 1, in which replies of `REPLY` tokens ended. Raises
    InvalidRun unless all of them ended in one.
    """
    if len(set(ends)) != 1:
        raise InvalidRun(
            f"replies of one batch ended in steps {sorted(ends)}",
            hint="raise `batch_tokens`, so that all of them begin in one",
        )
    last = max(ends)
    return last - REPLY + 1, last


def require_decoding(arm: str, results: Sequence[Result], preemptions: int) -> None:
    """Raises InvalidRun unless whole replies were decoded from what was cached before."""
    planned = arm != PLAIN
    wrong = {
        "lost its blocks": preemptions > 0,
        "was cut short": any(len(result.tokens) != REPLY for result in results),
        "computed chunks": any(result.counts.compiled for result in results),
        "read no chunk": planned and not all(r.hits.chunk + r.hits.copied for r in results),
        "read chunks": not planned and any(r.hits.chunk + r.hits.copied for r in results),
    }
    found = [line for line, happened in wrong.items() if happened]
    if found:
        raise InvalidRun(f"{arm}: a request that is timed {' and '.join(found)}")


def compare(
    batch: ReplyBatch, algorithm: str, figures: Mapping[str, Sequence[float]]
) -> DecodeCost:
    """The costs of an algorithm in a batch; `figures` are those of `time_replies`, by round."""
    plain, planned, ratio = {}, {}, {}
    for clock in _CLOCKS:
        ours, theirs = (figures[f"{batch.label} {arm} {clock}"] for arm in (algorithm, PLAIN))
        planned[clock], plain[clock] = Spread.of(ours), Spread.of(theirs)
        ratio[clock] = Spread.of([own / base for own, base in zip(ours, theirs, strict=True)])
    return DecodeCost(batch.requests, batch.prompt, algorithm, plain, planned, ratio)


def highest(costs: Sequence[DecodeCost], clock: str = "cpu") -> float:
    """The largest median ratio."""
    return max(cost.ratio[clock].median for cost in costs)


def render(costs: Sequence[DecodeCost], facts: Mapping[str, Any]) -> str:
    """The page, in Markdown: a row for each algorithm and batch, and a line with the verdict."""
    head = ("requests", "prompt tokens", "algorithm", "plain ms", "planned ms", "CPU time", "wall")
    rounds = max(cost.ratio["cpu"].n for cost in costs)
    worst = highest(costs)
    lines = [
        "# Decoding planned requests beside plain ones, on a CPU",
        "",
        f"{facts['cpu']} ({facts['capability']}), {facts['threads']} threads, "
        f"{facts['model']}, float32, torch {facts['torch']}, vLLM {facts['vllm']}, commit "
        f"{facts['commit'][:12]}.",
        _settings(facts),
        "",
        f"Milliseconds of CPU time a token, {REPLY - 1} tokens a reply, in steps that only decode: "
        "median of "
        f"{rounds} rounds. Ratios planned to plain, paired within a round: median (quartiles).",
        "",
        markdown.table(head, map(_cells, costs), right=3),
        "",
        f"The largest median ratio is {worst:.2f} in CPU time and {highest(costs, 'wall'):.2f} in "
        f"wall time; at most {ALLOWED} of CPU time is {'kept' if worst <= ALLOWED else 'MISSED'}.",
        "",
        "`picbench measure decode`",
    ]
    return "\n".join(lines) + "\n"


def _settings(facts: Mapping[str, Any]) -> str:
    variables = ", ".join(f"{name}={value}" for name, value in facts["variables"].items())
    one, five, _ = facts["load"]
    return f"{variables or 'No variable set'}; load when it ended: {one:.1f}, {five:.1f}."


def _cells(cost: DecodeCost) -> list[str]:
    ratios = (cost.ratio[clock] for clock in _CLOCKS)
    return [
        str(cost.requests),
        f"{cost.prompt:,}",
        cost.algorithm,
        f"{cost.plain_ms['cpu'].median:.2f}",
        f"{cost.planned_ms['cpu'].median:.2f}",
        *(f"{ratio.median:.2f} ({ratio.q25:.2f} - {ratio.q75:.2f})" for ratio in ratios),
    ]


def measures(batches: Sequence[ReplyBatch]) -> dict[str, Measure]:
    """A measure for each batch."""
    return {batch.label: partial(time_replies, batch=batch) for batch in batches}


def measure(
    model: str,
    rounds: int,
    commit: str | None,
    output: Path,
    batches: Sequence[ReplyBatch] = BATCHES,
) -> tuple[bool, str]:
    """Measure all batches, write ``decode.json`` and ``decode.md``; whether all is allowed."""
    found_model = models.resolve(model)
    most = max(batch.requests * (batch.prompt + REPLY) for batch in batches)
    config = EngineConfig(
        model=str(found_model.path),
        device="cpu",
        dtype="float32",
        context=max(batch.prompt for batch in batches) + REPLY,
        # Plain prompts, chunks and copies of a batch, and room for the keys that it gathers.
        kv_blocks=4 * most // BLOCK_SIZE,
        max_requests=max(batch.requests for batch in batches),
        tiers="",
    )
    found = run_interleaved({"picbench": config}, measures(batches), rounds)["picbench"]
    costs = [compare(batch, arm, found) for batch in batches for arm in PLANNED]
    facts = provenance.facts(*_FACTS, commit=commit) | {"model": found_model.label}
    page = render(costs, facts)
    document = {"schema": 1, "provenance": facts, "results": [asdict(cost) for cost in costs]}
    save(output / "decode", document, page)
    return highest(costs) <= ALLOWED, page

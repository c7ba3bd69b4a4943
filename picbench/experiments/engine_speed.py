"""Times of the PIC engine beside stock vLLM's, on one GPU; and what decoding costs on a CPU.

`ENGINE_COMPARISON`: plain requests (prefix caching on, nothing cached), which show what the engine
costs when PIC does nothing, and a prompt of 64 chunks whose KV is cached. `SMALL_STEPS`: prompts
that compute few tokens, by the size of CUDA graphs. Prompts are random tokens, so a model without
weights will do: these are times, not answers. `measure_decode_cost`: steps that only decode, of
planned requests beside plain ones in the same engine.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from random import Random
from statistics import median
from typing import Any, NamedTuple

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import PromptSegment, Request, Result, Text
from picbench.errors import InvalidRun
from picbench.run import runner
from picbench.run.measurements import DecodePlanned, EngineComparison, Outcome, SmallSteps
from picbench.run.runner import Measure, random_chunks, random_text, random_tokens
from picbench.store import provenance
from picbench.tables.page import (
    FigureRatio,
    FigureTable,
    Found,
    Spread,
    by_round,
    page,
    paragraphs,
    save,
    spread,
)
from picbench.tables.table import table
from picbench.workloads import models

#: 64 chunks and their surroundings make a prompt of 32k tokens.
CHUNKS, CHUNK_TOKENS = 64, 504


def plain(engine: Engine, name: str) -> dict[str, float]:
    """One request of 2,048 tokens alone, then 64 of 1,024 at once; 128 tokens out."""
    alone = _plain(random_tokens(2048, f"alone {name}"))
    many = [_plain(random_tokens(1024, f"{name} {i}")) for i in range(64)]
    engine.reset()
    [one] = engine.generate([alone], max_tokens=128, ignore_eos=True)
    engine.reset()
    all_of_them = engine.generate(many, max_tokens=128, ignore_eos=True)
    took = max(result.timings.e2e for result in all_of_them)
    return times_of(one) | {"tokens_per_s": len(many) * (1024 + 128) / took}


def warm(engine: Engine, name: str) -> dict[str, float]:
    """A prompt of 64 chunks that the engine has seen in another order; 64 tokens out."""
    chunks = random_chunks(CHUNKS, CHUNK_TOKENS, "chunk")
    algorithm = None if engine.config.stock else "mepic"
    if not engine.config.stock:
        engine.generate([Request([*chunks, random_text(80, "question")], algorithm)], max_tokens=1)
    Random(name).shuffle(chunks)
    asked = Request([*chunks, random_text(80, f"question {name}")], algorithm)
    [result] = engine.generate([asked], max_tokens=64, ignore_eos=True)
    return {f"warm_{figure}": value for figure, value in times_of(result).items()}


def hit(engine: Engine, name: str) -> dict[str, float]:
    """The same prompt with all but as many tokens cached as MEPIC recomputes (stock vLLM only)."""
    if not engine.config.stock:
        return {}
    linked = CHUNKS * BLOCK_SIZE
    common = random_tokens(CHUNKS * CHUNK_TOKENS - linked, "common")
    engine.generate([_plain(common)], max_tokens=1)
    asked = _plain((*common, *random_tokens(linked + 80, name)))
    [result] = engine.generate([asked], max_tokens=2, ignore_eos=True)
    return {"hit_ttft_ms": result.timings.ttft * 1e3}


def times_of(result: Result) -> dict[str, float]:
    """Milliseconds to the first token, and for each token after it."""
    timings = result.timings
    return {"ttft_ms": timings.ttft * 1e3, "tpot_ms": (timings.tpot or 0.0) * 1e3}


def _plain(tokens: tuple[int, ...]) -> Request:
    return Request([Text(tokens=tokens)], algorithm="prefix")


def _comparison(settings: EngineComparison) -> runner.ExperimentPlan:
    model = models.resolve(settings.model)
    config = EngineConfig(
        model=str(model.path),
        device="cuda",
        dtype="bfloat16",
        context=36_864,
        batch_tokens=8192,
        max_requests=64,
    )
    facts = provenance.facts(*provenance.GPU, device=config.device, commit=settings.commit)
    facts |= {"rounds": settings.repeats, "seed": 0, "model": model.name}
    engines = {"stock": replace(config, stock=True, algorithm="prefix"), "picbench": config}
    measures: dict[str, Measure] = {"plain": plain, "warm": warm, "hit": hit}
    return runner.interleaved("engine-comparison", facts, engines, measures, settings.repeats)


def _ratio(group: str, name: str, over: str, figure: str, below: str = "") -> FigureRatio:
    """A figure of the engine that `over` names over one of the other engine."""
    other = "stock" if over == "picbench" else "picbench"
    return FigureRatio(group, name, [((over, figure), (other, below or figure))])


ENGINE_COMPARISON = runner.Experiment(
    plan=_comparison,
    title="The engine against stock vLLM on a GPU",
    about=(
        "{gpu}, driver {driver}, torch {torch}, vLLM {vllm} "
        "(FlashAttention-3, CUDA graphs, torch.compile),\ncommit {commit}. "
        "{model}, dummy weights, bfloat16: times, not answers. Both engines at once, "
        "in alternation,\nin processes of their own; median (lowest - highest)."
    ),
    tables=[
        FigureTable(
            {
                "ttft_ms": "TTFT of one plain request of 2,048 tokens, ms",
                "tpot_ms": "time per output token of it, ms",
                "tokens_per_s": "64 plain requests of 1,024 + 128 tokens, tokens/s",
                "warm_ttft_ms": "TTFT of 64 warm chunks and a question, 32k tokens, ms",
                "warm_tpot_ms": "time per output token of it, ms",
                "hit_ttft_ms": "TTFT of a prefix hit that leaves as many new tokens, ms",
            },
            {"stock": "stock vLLM", "picbench": "picbench"},
            digits=2,
            counted=True,
        )
    ],
    ratios=[
        _ratio("pic_off", "throughput_ratio", "picbench", "tokens_per_s"),
        _ratio("pic_off", "ttft_ratio", "picbench", "ttft_ms"),
        _ratio("pic_off", "tpot_ratio", "picbench", "tpot_ms"),
        _ratio("warm_32k", "speedup_vs_full", "stock", "warm_ttft_ms"),
        _ratio("warm_32k", "ratio_vs_prefix_hit", "picbench", "warm_ttft_ms", "hit_ttft_ms"),
    ],
    sentences=[
        "Plain requests: TTFT {ttft_ratio:.3f}, time per output token {tpot_ratio:.3f}, "
        "throughput {throughput_ratio:.3f} of stock vLLM's. Warm chunks (mepic):\n"
        "{speedup_vs_full:.1f} times faster to the first token than full recompute, "
        "{ratio_vs_prefix_hit:.2f} of a prefix hit's time."
    ],
)


#: Chunks that recur, tokens of each and of a question.
CORPUS, SMALL_CHUNK, SMALL_QUESTION = 24, 480, 16

#: Requests whose median is one figure.
REQUESTS = 10


@dataclass(frozen=True, slots=True)
class SmallPrompt:
    """A prompt of `warm` chunks of the corpus and of `new` ones."""

    warm: int
    new: int = 0

    @property
    def name(self) -> str:
        """What its figures are called."""
        return f"{self.warm} warm" + (f", {self.new} new" if self.new else "")

    @property
    def tokens(self) -> int:
        """Its length."""
        return SMALL_CHUNK * (self.warm + self.new) + SMALL_QUESTION

    @property
    def computed(self) -> int:
        """Tokens that it computes: the first block of chunks after the first one, and what is new.

        The first chunk of a prompt has its own position and is linked to nothing.
        """
        linked = BLOCK_SIZE * (self.warm + self.new - 1)
        return linked + SMALL_CHUNK * self.new + SMALL_QUESTION

    def draw(self, name: str, *, stock: bool) -> Request:
        """A request for an engine, or for stock vLLM, which finds as many tokens cached."""
        if stock:
            common = random_tokens(self.tokens - self.computed, "common")
            return _plain((*common, *random_tokens(self.computed, name)))
        order = Random(name)
        known = random_chunks(CORPUS, SMALL_CHUNK, "chunk")
        chunks: list[PromptSegment] = list(order.sample(known, self.warm))
        chunks += random_chunks(self.new, SMALL_CHUNK, name)
        order.shuffle(chunks)
        return Request([*chunks, random_text(SMALL_QUESTION, name)], "mepic")

    def cached(self, *, stock: bool) -> list[Request]:
        """Requests whose answers leave in the cache what others find there."""
        if stock:
            return [_plain(random_tokens(self.tokens - self.computed, "common"))]
        known = random_chunks(CORPUS, SMALL_CHUNK, "chunk")
        asked = random_text(SMALL_QUESTION, "cache")
        return [Request([*known[i : i + 8], asked], "mepic") for i in range(0, CORPUS, 8)]


#: Of a few blocks up to more than a graph of 512 tokens serves.
PROMPTS = tuple(SmallPrompt(*counts) for counts in ((3,), (8,), (20,), (4, 1), (12, 1), (4, 2)))

#: Blocks that the corpus and one request at a time take, twice.
POOL = 2 * (CORPUS + 20 + 4) * SMALL_CHUNK // BLOCK_SIZE


def ttft(engine: Engine, name: str, *, prompt: SmallPrompt) -> dict[str, float]:
    """Milliseconds to the first token, a median, and for how long the GPU computed for one request.

    The latter is left out where there is no GPU.
    """
    stock, times = engine.config.stock, []
    for request in prompt.cached(stock=stock):
        engine.generate([request], max_tokens=1, ignore_eos=True)
    for number in range(REQUESTS):
        request = prompt.draw(f"{name} {number}", stock=stock)
        [result] = engine.generate([request], max_tokens=1, ignore_eos=True)
        times.append(result.timings.ttft * 1e3)
    found = {f"ttft {prompt.name}": median(times)}
    if engine.describe()["device"] == "cuda":
        request = prompt.draw(f"{name} profiled", stock=stock)
        work = partial(engine.generate, [request], max_tokens=1, ignore_eos=True)
        found[f"gpu {prompt.name}"] = _gpu_ms(work)
    return found


def _gpu_ms(work: Callable[[], object]) -> float:
    """For how many milliseconds the GPU runs kernels and copies."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    events = profiled.key_averages()
    on_gpu = (event for event in events if event.device_type.name == "CUDA")
    return float(sum(event.self_device_time_total for event in on_gpu)) / 1e3


def small_steps_plan(settings: SmallSteps) -> runner.ExperimentPlan:
    """A cell for each prompt, on two engines for each size of graphs."""
    longest = max(prompt.tokens for prompt in PROMPTS)
    config = runner.engine_of(
        settings, context=longest + BLOCK_SIZE, batch_tokens=8192, kv_blocks=POOL
    )
    engines: dict[str, EngineConfig] = {}
    for size in settings.graph_tokens:
        sized = replace(config, graph_tokens=size)
        engines[f"mepic, {size}"] = sized
        engines[f"stock, {size}"] = replace(sized, stock=True, algorithm="prefix")
    measures: dict[str, Measure] = {each.name: partial(ttft, prompt=each) for each in PROMPTS}
    facts = runner.facts_of(settings) | {"repeats": settings.repeats}
    return runner.interleaved("small-steps", facts, engines, measures, settings.repeats)


class GraphRatios:
    """TTFT over that with the smallest graphs, repeat by repeat."""

    def render(self, found: Found) -> str:
        """See `DrawnTable`; nothing if graphs have one size."""
        by_kind: dict[str, list[str]] = {}
        for arm in sorted(found, key=lambda name: int(name.split(", ")[1])):
            by_kind.setdefault(arm.split(",")[0], []).append(arm)
        larger = {arm: sized[0] for sized in by_kind.values() for arm in sized[1:]}
        if not larger:
            return ""
        rows = []
        for prompt in PROMPTS:
            row = [prompt.name]
            for pair in larger.items():
                times, others = (found[each].get(f"ttft {prompt.name}") for each in pair)
                row.append(spread(by_round(times, others) if times and others else None, 2))
            rows.append(row)
        said = "Time to the first token over that with the smallest graphs, repeat by repeat:"
        return paragraphs(said, table(("chunks", *larger), rows, right=1))


def _small_table(figure: str, heading: str) -> FigureTable:
    return FigureTable(
        {f"{figure} {prompt.name}": prompt.name for prompt in PROMPTS},
        heading=heading,
        head="chunks",
        extra={"computed tokens": {f"{figure} {p.name}": str(p.computed) for p in PROMPTS}},
    )


SMALL_STEPS = runner.Experiment(
    plan=small_steps_plan,
    title="Time to the first token where few tokens are computed",
    about=(
        "{model}, {dtype}: times, not answers; {gpu}, vLLM {vllm}, torch {torch}, commit {commit}. "
        f"One request at a time, chunks of {SMALL_CHUNK} tokens and a question of "
        f"{SMALL_QUESTION}; engines by the most tokens that CUDA graphs serve, all up at once; "
        f"n={{repeats}}, each the median of {REQUESTS} requests. Median (lowest - highest)."
    ),
    tables=[
        _small_table("ttft", "Milliseconds to the first token:"),
        _small_table(
            "gpu",
            "Milliseconds for which the GPU computes; the rest of the time it waits for the host:",
        ),
        GraphRatios(),
    ],
)


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
        found = []
        for name in (f"{self.label} {index}" for index in range(self.requests)):
            lead = random_text(LEAD, f"{name} lead")
            question = random_text(QUESTION, f"{name} question")
            segments = [lead, *random_chunks(self.chunks, CHUNK, f"{name} chunk"), question]
            if arm == PLAIN:
                tokens = tuple(chain(*(each.tokens or () for each in segments)))
                found.append(Request([Text(tokens=tokens)]))
            else:
                found.append(Request(segments, arm))
        return found


#: One request and eight, of about 1,000 and 4,000 tokens.
BATCHES = tuple(ReplyBatch(requests, chunks) for requests in (1, 8) for chunks in (4, 16))


def time_replies(engine: Engine, name: str, *, batch: ReplyBatch) -> dict[str, float]:
    """Milliseconds a token by batch, arm and clock; `name` decides the order of the arms.

    Raises InvalidRun where an arm did not do what it is timed for.
    """
    arms = [PLAIN, *PLANNED]
    Random(name).shuffle(arms)
    found: dict[str, float] = {}
    for arm in arms:
        times = time_arm(engine, arm, batch.drawn(arm))
        found |= {f"{batch.label} {arm} {clock}": value for clock, value in times.items()}
    return found


def time_arm(engine: Engine, arm: str, requests: Sequence[Request]) -> dict[str, float]:
    """Milliseconds a token by clock, from the first token of all replies to the last.

    Raises InvalidRun unless whole replies were decoded at once from what was cached before.
    """
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
    if len(set(ends)) != 1:
        raise InvalidRun(
            f"replies of one batch ended in steps {sorted(ends)}",
            hint="raise `batch_tokens`, so that all of them begin in one",
        )
    tokens = (REPLY - 1) * len(requests)
    first, last = clocks[max(ends) - REPLY + 1], clocks[max(ends)]
    took = ((end - begin) / tokens * 1e3 for begin, end in zip(first, last, strict=True))
    return dict(zip(_CLOCKS, took, strict=True))


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def require_decoding(arm: str, results: Sequence[Result], preemptions: int) -> None:
    """Raises InvalidRun unless whole replies were decoded from what was cached before."""
    planned = arm != PLAIN
    read = [result.hits.chunk + result.hits.copied for result in results]
    wrong = {
        "lost its blocks": preemptions > 0,
        "was cut short": any(len(result.tokens) != REPLY for result in results),
        "computed chunks": any(result.counts.compiled for result in results),
        "read no chunk": planned and not all(read),
        "read chunks": not planned and any(read),
    }
    found = [line for line, happened in wrong.items() if happened]
    if found:
        raise InvalidRun(f"{arm}: a request that is timed {' and '.join(found)}")


def compare(
    batch: ReplyBatch, algorithm: str, figures: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """What an algorithm's requests cost in a batch, beside plain ones of as many tokens.

    By clock ("cpu", "wall"): milliseconds a token of either, and the ratio planned to plain, paired
    within a round. `figures` are those of `time_replies`, by round.
    """
    found: dict[str, Any] = {
        "requests": batch.requests,
        "prompt": batch.prompt,
        "algorithm": algorithm,
        "plain_ms": {},
        "planned_ms": {},
        "ratio": {},
    }
    for clock in _CLOCKS:
        ours, theirs = (figures[f"{batch.label} {arm} {clock}"] for arm in (algorithm, PLAIN))
        found["plain_ms"][clock] = asdict(Spread.of(theirs))
        found["planned_ms"][clock] = asdict(Spread.of(ours))
        found["ratio"][clock] = asdict(Spread.of_ratios(ours, theirs))
    return found


def highest(costs: Sequence[Mapping[str, Any]], clock: str = "cpu") -> float:
    """The largest median ratio."""
    return max(float(cost["ratio"][clock]["median"]) for cost in costs)


def render_decode_cost(costs: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The page, in Markdown: a row for each algorithm and batch, and a line with the verdict."""
    head = ("requests", "prompt tokens", "algorithm", "plain ms", "planned ms", "CPU time", "wall")
    rows = [
        (
            str(cost["requests"]),
            f"{cost['prompt']:,}",
            cost["algorithm"],
            *(f"{cost[name]['cpu']['median']:.2f}" for name in ("plain_ms", "planned_ms")),
            *(Spread(**cost["ratio"][clock]).text(2) for clock in _CLOCKS),
        )
        for cost in costs
    ]
    rounds = max(cost["ratio"]["cpu"]["n"] for cost in costs)
    variables = ", ".join(f"{name}={value}" for name, value in facts["variables"].items())
    one, five, _ = facts["load"]
    worst = highest(costs)
    return page(
        "Decoding planned requests beside plain ones, on a CPU",
        f"{facts['cpu']} ({facts['capability']}), {facts['threads']} threads, {facts['model']}, "
        f"float32, torch {facts['torch']}, vLLM {facts['vllm']}, commit {facts['commit'][:12]}.\n"
        f"{variables or 'No variable set'}; load when it ended: {one:.1f}, {five:.1f}.",
        f"Milliseconds of CPU time a token, {REPLY - 1} tokens a reply, in steps that only decode: "
        f"median of {rounds} rounds. Ratios planned to plain, paired within a round: median "
        "(quartiles).",
        table(head, rows, right=3),
        f"The largest median ratio is {worst:.2f} in CPU time and {highest(costs, 'wall'):.2f} in "
        f"wall time; at most {ALLOWED} of CPU time is {'kept' if worst <= ALLOWED else 'MISSED'}.",
        "`picbench measure decode`",
    )


def measure_decode_cost(
    settings: DecodePlanned, batches: Sequence[ReplyBatch] = BATCHES
) -> Outcome:
    """Measure all batches, write ``decode.json`` and ``.md``; the code is 1 if it is too much."""
    model = models.resolve(settings.model)
    most = max(batch.requests * (batch.prompt + REPLY) for batch in batches)
    config = EngineConfig(
        model=str(model.path),
        device="cpu",
        dtype="float32",
        context=max(batch.prompt for batch in batches) + REPLY,
        # Plain prompts, chunks and copies of a batch, and room for the keys that it gathers.
        kv_blocks=4 * most // BLOCK_SIZE,
        max_requests=max(batch.requests for batch in batches),
        tiers="",
    )
    measures: Mapping[str, Measure] = {b.label: partial(time_replies, batch=b) for b in batches}
    plan = runner.interleaved("decode", {}, {"picbench": config}, measures, settings.rounds)
    record = runner.ArmsRecord(runner.say)
    runner.run(plan, record, runner.say)
    found = record.found["picbench"]
    costs = [compare(batch, arm, found) for batch in batches for arm in PLANNED]
    facts = provenance.facts(*_FACTS, commit=settings.commit) | {"model": model.label}
    rendered = render_decode_cost(costs, facts)
    save(settings.output / "decode", {"schema": 1, "provenance": facts, "results": costs}, rendered)
    return Outcome(rendered, 0 if highest(costs) <= ALLOWED else 1)

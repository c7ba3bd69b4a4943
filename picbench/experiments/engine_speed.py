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
from random import Random
from statistics import median
from typing import Any, NamedTuple

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Request, Result, Text
from picbench.errors import InvalidRun
from picbench.run import runner
from picbench.run.measurements import DecodePlanned, EngineComparison, Outcome, SmallSteps
from picbench.run.runner import Measure, random_chunks, random_text, random_tokens
from picbench.store import provenance
from picbench.tables import page as pages
from picbench.tables.page import FigureRatio, FigureTable, Found, Spread, by_round, spread
from picbench.tables.table import table
from picbench.workloads import models

#: 64 chunks and their surroundings make a prompt of 32k tokens.
CHUNKS, CHUNK_TOKENS = 64, 504

#: Tokens of short plain requests; the host takes longer than the GPU for all but the last.
SHORT = (160, 288, 500, 1024)


def plain(engine: Engine, name: str) -> dict[str, float]:
    """One request of 2,048 tokens alone, then 64 of 1,024 at once; 128 tokens out."""
    alone = _plain(random_tokens(2048, f"alone {name}"))
    many = [_plain(random_tokens(1024, f"{name} {i}")) for i in range(64)]
    engine.reset()
    [one] = engine.generate([alone], max_tokens=128, ignore_eos=True)
    engine.reset()
    all_of_them = engine.generate(many, max_tokens=128, ignore_eos=True)
    took = max(result.timings.e2e for result in all_of_them)
    return _times(one) | {"tokens_per_s": len(many) * (1024 + 128) / took}


def short(engine: Engine, name: str) -> dict[str, float]:
    """Requests of few tokens, one at a time: milliseconds to the first token, medians."""
    found = dict[str, float]()
    for size in SHORT:
        asked = [_plain(random_tokens(size, f"{name} {size} {i}")) for i in range(REQUESTS)]
        served = [engine.generate([one], max_tokens=1, ignore_eos=True)[0] for one in asked]
        found[f"ttft_{size}_ms"] = median(result.timings.ttft * 1e3 for result in served)
    return found


def warm(engine: Engine, name: str) -> dict[str, float]:
    """A prompt of 64 chunks that the engine has seen in another order; 64 tokens out."""
    chunks = random_chunks(CHUNKS, CHUNK_TOKENS, "chunk")
    algorithm = None if engine.config.stock else "mepic"
    if algorithm:
        engine.generate([Request([*chunks, random_text(80, "question")], algorithm)], max_tokens=1)
    Random(name).shuffle(chunks)
    asked = Request([*chunks, random_text(80, f"question {name}")], algorithm)
    [result] = engine.generate([asked], max_tokens=64, ignore_eos=True)
    return {f"warm_{figure}": value for figure, value in _times(result).items()}


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


def _times(result: Result) -> dict[str, float]:
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
    measures: dict[str, Measure] = {"plain": plain, "short": short, "warm": warm, "hit": hit}
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
        "(FlashAttention-3, CUDA graphs, torch.compile), commit {commit}. "
        "{model}, dummy weights, bfloat16: times, not answers. Both engines at once, "
        "in alternation, in processes of their own; median (lowest - highest)."
    ),
    tables=[
        FigureTable(
            {
                "ttft_ms": "TTFT of one plain request of 2,048 tokens, ms",
                "tpot_ms": "time per output token of it, ms",
                "tokens_per_s": "64 plain requests of 1,024 + 128 tokens, tokens/s",
                **{f"ttft_{n}_ms": f"TTFT of one plain request of {n:,} tokens, ms" for n in SHORT},
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
        "throughput {throughput_ratio:.3f} of stock vLLM's. Warm chunks (mepic): "
        "{speedup_vs_full:.1f} times faster to the first token than full recompute, "
        "{ratio_vs_prefix_hit:.2f} of a prefix hit's time."
    ],
)


#: Chunks that recur, tokens of each and of a question, and requests whose median is one figure.
CORPUS, SMALL_CHUNK, SMALL_QUESTION, REQUESTS = 24, 480, 16, 10


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


#: Of a few blocks up to more than a graph of 512 tokens serves.
PROMPTS = tuple(SmallPrompt(*counts) for counts in ((3,), (8,), (20,), (4, 1), (12, 1), (4, 2)))

#: Blocks that the corpus and one request at a time take, twice.
POOL = 2 * (CORPUS + 20 + 4) * SMALL_CHUNK // BLOCK_SIZE


def ttft(engine: Engine, name: str, *, prompt: SmallPrompt) -> dict[str, float]:
    """Milliseconds to the first token, a median, and for how long the GPU computed for one request.

    The latter is left out where there is no GPU. Stock vLLM finds as many tokens cached.
    """
    serve = partial(engine.generate, max_tokens=1, ignore_eos=True)
    common = random_tokens(prompt.tokens - prompt.computed, "common")
    corpus = random_chunks(CORPUS, SMALL_CHUNK, "chunk")

    def ask(own: str) -> Request:
        if engine.config.stock:
            return _plain((*common, *random_tokens(prompt.computed, own)))
        dice = Random(own)
        chunks = [*dice.sample(corpus, prompt.warm), *random_chunks(prompt.new, SMALL_CHUNK, own)]
        dice.shuffle(chunks)
        return Request([*chunks, random_text(SMALL_QUESTION, own)], "mepic")

    if engine.config.stock:
        serve([_plain(common)])
    else:
        for first in range(0, CORPUS, 8):
            text = random_text(SMALL_QUESTION, "cache")
            serve([Request([*corpus[first : first + 8], text], "mepic")])
    times = [serve([ask(f"{name} {i}")])[0].timings.ttft * 1e3 for i in range(REQUESTS)]
    found = {f"ttft {prompt.name}": median(times)}
    if engine.describe()["device"] == "cuda":
        found[f"gpu {prompt.name}"] = _gpu_ms(partial(serve, [ask(f"{name} profiled")]))
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


def graph_ratios(found: Found) -> str:
    """TTFT over that with the smallest graphs, by repeat; nothing if graphs have one size."""
    least, *sizes = sorted({int(arm.split(", ")[1]) for arm in found})
    kinds = dict.fromkeys(arm.split(", ")[0] for arm in found)
    pairs = [(f"{kind}, {size}", f"{kind}, {least}") for kind in kinds for size in sizes]
    rows = []
    for prompt in PROMPTS:
        times = [[found[arm].get(f"ttft {prompt.name}", ()) for arm in pair] for pair in pairs]
        rows.append((prompt.name, *(spread(by_round(*both), 2) for both in times)))
    said = "Time to the first token over that with the smallest graphs, repeat by repeat:"
    head = ("chunks", *(arm for arm, _ in pairs))
    return pages.paragraphs(said, table(head, rows, right=1)) if sizes else ""


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
        _small_table("gpu", "Milliseconds for which the GPU computes:"),
        graph_ratios,
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
                tokens = tuple(token for each in segments for token in each.tokens or ())
                found.append(Request([Text(tokens=tokens)]))
            else:
                found.append(Request(segments, arm))
        return found


#: One request and eight, of about 1,000 and 4,000 tokens.
BATCHES = tuple(ReplyBatch(requests, chunks) for requests in (1, 8) for chunks in (4, 16))


def time_replies(engine: Engine, name: str, *, batch: ReplyBatch) -> dict[str, float]:
    """Milliseconds a token by batch, arm and clock; `name` decides the order of the arms.

    They are from the first token of all replies to the last. Raises InvalidRun unless whole replies
    were decoded at once from what was cached before.
    """
    arms = [PLAIN, *PLANNED]
    Random(name).shuffle(arms)
    found: dict[str, float] = {}
    for arm in arms:
        requests = batch.drawn(arm)
        engine.generate(requests, max_tokens=1, ignore_eos=True)
        before, results, ends = engine.preemptions, list[Result](), list[int]()
        for request in requests:
            engine.submit(request, max_tokens=REPLY, ignore_eos=True)
        clocks = [_now()]
        while len(ends) < len(requests):
            ended = engine.step().values()
            clocks.append(_now())
            ends += [len(clocks) - 1] * len(ended)
            results += ended
        read = [bool(result.hits.chunk + result.hits.copied) for result in results]
        cached = set(read) == {arm != PLAIN} and not any(r.counts.compile_work for r in results)
        whole = all(len(r.tokens) == REPLY for r in results) and engine.preemptions == before
        if not cached or not whole:
            raise InvalidRun(f"{arm}: not all replies were decoded in full, from what was cached")
        if len(set(ends)) != 1:
            raise InvalidRun(
                f"replies of one batch ended in steps {sorted(ends)}",
                hint="raise `batch_tokens`, so that all of them begin in one",
            )
        first, last = clocks[ends[0] - REPLY + 1], clocks[ends[0]]
        for clock, begin, end in zip(_CLOCKS, first, last, strict=True):
            took = (end - begin) / ((REPLY - 1) * len(requests)) * 1e3
            found[f"{batch.label} {arm} {clock}"] = took
    return found


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def compare(
    batch: ReplyBatch, algorithm: str, figures: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """What an algorithm's requests cost in a batch, beside plain ones of as many tokens.

    By clock ("cpu", "wall"): milliseconds a token of either, and the ratio planned to plain, paired
    within a round. `figures` are those of `time_replies`, by round.
    """
    plain, planned, ratio = {}, {}, {}
    for clock in _CLOCKS:
        ours, theirs = (figures[f"{batch.label} {arm} {clock}"] for arm in (algorithm, PLAIN))
        plain[clock], planned[clock] = asdict(Spread.of(theirs)), asdict(Spread.of(ours))
        ratio[clock] = asdict(Spread.of_ratios(ours, theirs))
    found = {"requests": batch.requests, "prompt": batch.prompt, "algorithm": algorithm}
    return {**found, "plain_ms": plain, "planned_ms": planned, "ratio": ratio}


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
    variables = ", ".join(f"{name}={value}" for name, value in facts["variables"].items())
    about = (
        "{cpu} ({capability}), {threads} threads, {model}, float32, torch {torch}, vLLM {vllm}, "
        "commit {commit:.12}. {set}; load when it ended: {load[0]:.1f}, {load[1]:.1f}."
    )
    worst, rounds = highest(costs), max(cost["ratio"]["cpu"]["n"] for cost in costs)
    return pages.page(
        "Decoding planned requests beside plain ones, on a CPU",
        about.format(set=variables or "No variable set", **facts),
        f"Milliseconds of CPU time a token, {REPLY - 1} tokens a reply, in steps that only decode: "
        f"median of {rounds} rounds. Ratios planned to plain, paired within a round: median "
        "(quartiles).",
        table(head, rows, right=3),
        f"The largest median ratio is {worst:.2f} in CPU time and {highest(costs, 'wall'):.2f} in "
        f"wall time; at most {ALLOWED} of CPU time is {'kept' if worst <= ALLOWED else 'MISSED'}.",
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
    measures: dict[str, Measure] = {b.label: partial(time_replies, batch=b) for b in batches}
    plan = runner.interleaved("decode", {}, {"picbench": config}, measures, settings.rounds)
    record = runner.RoundsRecord()
    runner.run(plan, record, runner.say)
    found = record.found["picbench"]
    costs = [compare(batch, arm, found) for batch in batches for arm in PLANNED]
    names = ("cpu", "threads", "capability", "variables", "python", "torch", "vllm", "load")
    facts = provenance.facts(*names, "commit", commit=settings.commit) | {"model": model.label}
    page = render_decode_cost(costs, facts)
    document = {"schema": 1, "provenance": facts, "results": costs}
    pages.save(settings.output / "decode", document, page)
    return Outcome(page, 0 if highest(costs) <= ALLOWED else 1)

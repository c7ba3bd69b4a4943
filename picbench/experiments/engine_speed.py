"""Times the PIC engine against stock vLLM on one GPU, in alternation.

Plain requests (prefix caching on, nothing cached): what the engine costs when PIC does nothing.
Warm chunks: a prompt of 64 chunks whose KV is cached, against stock vLLM without any of it. Prompts
are random tokens, so a model without weights will do: these are times, not answers.
"""

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, PromptSegment, Request, Result, Text
from picbench.errors import InvalidRun
from picbench.experiments.engines import ArmFigures, Measure, random_tokens, run_interleaved
from picbench.experiments.page import Spread, save, spread, update_summary
from picbench.store import provenance
from picbench.tables import table as markdown
from picbench.workloads import models

#: 64 chunks and their surroundings make a prompt of 32k tokens.
CHUNKS, CHUNK_TOKENS = 64, 504

_ROWS = {
    "ttft_ms": "TTFT of one plain request of 2,048 tokens, ms",
    "tpot_ms": "time per output token of it, ms",
    "tokens_per_s": "64 plain requests of 1,024 + 128 tokens, tokens/s",
    "warm_ttft_ms": "TTFT of 64 warm chunks and a question, 32k tokens, ms",
    "warm_tpot_ms": "time per output token of it, ms",
    "hit_ttft_ms": "TTFT of a prefix hit that leaves as many new tokens, ms",
}


def plain(engine: Engine, name: str) -> dict[str, float]:
    """One request of 2,048 tokens alone, then 64 of 1,024 at once; 128 tokens out."""
    alone = _plain(random_tokens(2048, f"alone {name}"))
    many = [_plain(random_tokens(1024, f"{name} {i}")) for i in range(64)]
    engine.reset()
    [one] = engine.generate([alone], max_tokens=128, ignore_eos=True)
    engine.reset()
    all_of_them = engine.generate(many, max_tokens=128, ignore_eos=True)
    took = max(result.timings.e2e for result in all_of_them)
    return {
        "ttft_ms": one.timings.ttft * 1e3,
        "tpot_ms": _tpot(one),
        "tokens_per_s": len(many) * (1024 + 128) / took,
    }


def warm(engine: Engine, name: str) -> dict[str, float]:
    """A prompt of 64 chunks that the engine has seen in another order; 64 tokens out."""
    chunks = [Chunk(tokens=random_tokens(CHUNK_TOKENS, f"chunk {i}")) for i in range(CHUNKS)]
    algorithm = None if engine.config.stock else "mepic"
    if not engine.config.stock:
        engine.generate([Request([*chunks, _question("")], algorithm)], max_tokens=1)
    random.Random(name).shuffle(chunks)
    asked = Request([*chunks, _question(name)], algorithm)
    [result] = engine.generate([asked], max_tokens=64, ignore_eos=True)
    return {"warm_ttft_ms": result.timings.ttft * 1e3, "warm_tpot_ms": _tpot(result)}


def hit(engine: Engine, name: str) -> dict[str, float]:
    """The same prompt with all but as many tokens cached as MEPIC recomputes (stock vLLM only)."""
    if not engine.config.stock:
        return {}
    linked = CHUNKS * 16
    common = random_tokens(CHUNKS * CHUNK_TOKENS - linked, "common")
    engine.generate([_plain(common)], max_tokens=1)
    asked = _plain((*common, *random_tokens(linked + 80, name)))
    [result] = engine.generate([asked], max_tokens=2, ignore_eos=True)
    return {"hit_ttft_ms": result.timings.ttft * 1e3}


MEASURES: dict[str, Measure] = {"plain": plain, "warm": warm, "hit": hit}


def _plain(tokens: tuple[int, ...]) -> Request:
    return Request([Text(tokens=tokens)], algorithm="prefix")


def _question(name: str) -> Text:
    return Text(tokens=random_tokens(80, f"question {name}"))


def _tpot(result: Result) -> float:
    return (result.timings.tpot or 0.0) * 1e3


def measure(model: str, repeats: int, commit: str | None, output: Path) -> None:
    """Measure both engines, print medians with their spread, and write what was found."""
    found_model = models.resolve(model)
    config = EngineConfig(
        model=str(found_model.path),
        device="cuda",
        dtype="bfloat16",
        context=36_864,
        batch_tokens=8192,
        max_requests=64,
    )
    stock = replace(config, stock=True, algorithm="prefix")
    found = run_interleaved({"stock": stock, "picbench": config}, MEASURES, repeats)
    _show(found)
    facts = provenance.facts(*provenance.GPU, device=config.device, commit=commit)
    write(found, facts | {"rounds": repeats, "seed": 0, "model": found_model.name}, output)


def write(found: ArmFigures, facts: Mapping[str, Any], output: Path) -> None:
    """Write ``engine-comparison.json``, ``engine-comparison.md`` and the summary's figures."""
    document = {"schema": 1, "provenance": facts, "found": found}
    save(output / "engine-comparison", document, render(found, facts))
    update_summary(output, ratios(found))


def ratios(found: ArmFigures) -> dict[str, dict[str, float]]:
    """The figures for `results/gpu/summary.json`: medians, picbench over stock vLLM.

    `speedup_vs_full` is the other way round: full recompute's TTFT over warm chunks'.
    """
    stock, ours = ({k: median(v) for k, v in found[arm].items()} for arm in ("stock", "picbench"))
    return {
        "pic_off": {
            "throughput_ratio": ours["tokens_per_s"] / stock["tokens_per_s"],
            "ttft_ratio": ours["ttft_ms"] / stock["ttft_ms"],
            "tpot_ratio": ours["tpot_ms"] / stock["tpot_ms"],
        },
        "warm_32k": {
            "speedup_vs_full": stock["warm_ttft_ms"] / ours["warm_ttft_ms"],
            "ratio_vs_prefix_hit": ours["warm_ttft_ms"] / stock["hit_ttft_ms"],
        },
    }


def render(found: ArmFigures, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown; `facts` are its provenance."""
    figures = ratios(found)
    warm, off = figures["warm_32k"], figures["pic_off"]
    rows = [
        (text, *(spread(found[arm].get(key), 2, counted=True) for arm in ("stock", "picbench")))
        for key, text in _ROWS.items()
    ]
    lines = [
        "# The engine against stock vLLM on a GPU",
        "",
        f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}, vLLM {facts['vllm']} "
        f"(FlashAttention-3, CUDA graphs, torch.compile),\ncommit {facts['commit']}. "
        f"{facts['model']}, dummy weights, bfloat16: times, not answers. Both engines at once, "
        "in alternation,\nin processes of their own; median (lowest - highest).",
        "",
        markdown.table(("", "stock vLLM", "picbench"), rows, right=1),
        "",
        f"Plain requests: TTFT {off['ttft_ratio']:.3f}, time per output token "
        f"{off['tpot_ratio']:.3f}, throughput {off['throughput_ratio']:.3f} of stock vLLM's. "
        f"Warm chunks (mepic):\n{warm['speedup_vs_full']:.1f} times faster to the first token "
        f"than full recompute, {warm['ratio_vs_prefix_hit']:.2f} of a prefix hit's time.",
    ]
    return "\n".join(lines) + "\n"


def _show(found: ArmFigures) -> None:
    for name, rows in found.items():
        for key, values in rows.items():
            ends = f"{min(values):.2f} .. {max(values):.2f}"
            print(f"{name:9} {key:13} {median(values):10.2f}   ({ends}, n={len(values)})")


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


def render_decode_cost(costs: Sequence[DecodeCost], facts: Mapping[str, Any]) -> str:
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


def measure_decode_cost(
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
    page = render_decode_cost(costs, facts)
    document = {"schema": 1, "provenance": facts, "results": [asdict(cost) for cost in costs]}
    save(output / "decode", document, page)
    return highest(costs) <= ALLOWED, page


#: Chunks that recur, tokens of each and of a question.
CORPUS, SMALL_STEPS_CHUNK, SMALL_STEPS_QUESTION = 24, 480, 16

#: Requests whose median is one figure.
REQUESTS = 10

ALGORITHM = "mepic"


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
        return SMALL_STEPS_CHUNK * (self.warm + self.new) + SMALL_STEPS_QUESTION

    @property
    def computed(self) -> int:
        """Tokens that it computes: the first block of chunks after the first one, and what is new.

        The first chunk of a prompt has its own position and is linked to nothing.
        """
        return (
            BLOCK_SIZE * (self.warm + self.new - 1)
            + SMALL_STEPS_CHUNK * self.new
            + SMALL_STEPS_QUESTION
        )


#: Of a few blocks up to more than a graph of 512 tokens serves.
PROMPTS = (
    SmallPrompt(3),
    SmallPrompt(8),
    SmallPrompt(20),
    SmallPrompt(4, 1),
    SmallPrompt(12, 1),
    SmallPrompt(4, 2),
)

#: Blocks that the corpus and one request at a time take, twice.
POOL = 2 * (CORPUS + 20 + 4) * SMALL_STEPS_CHUNK // BLOCK_SIZE


def ttft(engine: Engine, name: str, *, prompt: SmallPrompt) -> dict[str, float]:
    """Milliseconds to the first token, a median, and for how long the GPU computed for one request.

    The latter is left out where there is no GPU.
    """
    _cache(engine, prompt)
    times = []
    for number in range(REQUESTS):
        [result] = _serve(engine, _request(engine, prompt, f"{name} {number}"))
        times.append(result.timings.ttft * 1e3)
    found = {f"ttft {prompt.name}": median(times)}
    if engine.describe()["device"] == "cuda":
        request = _request(engine, prompt, f"{name} profiled")
        found[f"gpu {prompt.name}"] = _gpu_ms(partial(_serve, engine, request))
    return found


def _cache(engine: Engine, prompt: SmallPrompt) -> None:
    """Have the engine cache what its requests find; what it has already costs little."""
    if engine.config.stock:
        _serve(engine, Request([Text(tokens=_common(prompt))], "prefix"))
        return
    chunks = _corpus()
    for first in range(0, CORPUS, 8):
        asked = [
            *chunks[first : first + 8],
            Text(tokens=random_tokens(SMALL_STEPS_QUESTION, "cache")),
        ]
        _serve(engine, Request(asked, ALGORITHM))


def _request(engine: Engine, prompt: SmallPrompt, name: str) -> Request:
    if engine.config.stock:
        own = random_tokens(prompt.computed, name)
        return Request([Text(tokens=(*_common(prompt), *own))], "prefix")
    order = random.Random(name)
    chunks: list[PromptSegment] = list(order.sample(_corpus(), prompt.warm))
    chunks += [
        Chunk(tokens=random_tokens(SMALL_STEPS_CHUNK, f"{name} {i}")) for i in range(prompt.new)
    ]
    order.shuffle(chunks)
    return Request([*chunks, Text(tokens=random_tokens(SMALL_STEPS_QUESTION, name))], ALGORITHM)


def _corpus() -> list[Chunk]:
    return [Chunk(tokens=random_tokens(SMALL_STEPS_CHUNK, f"chunk {i}")) for i in range(CORPUS)]


def _common(prompt: SmallPrompt) -> tuple[int, ...]:
    """What stock vLLM finds of a prompt, whole blocks."""
    return random_tokens(prompt.tokens - prompt.computed, "common")


def _serve(engine: Engine, request: Request) -> list[Result]:
    return engine.generate([request], max_tokens=1, ignore_eos=True)


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


def small_step_measures(prompts: Sequence[SmallPrompt]) -> dict[str, Measure]:
    """A measure for each prompt."""
    return {prompt.name: partial(ttft, prompt=prompt) for prompt in prompts}


def measure_small_steps(
    model: str,
    device: str,
    repeats: int,
    graph_tokens: Sequence[int],
    commit: str | None,
    output: Path,
) -> str:
    """Measure engines of all sizes of graphs at once, write and return the page."""
    found_model = models.resolve(model)
    config = EngineConfig(
        model=str(found_model.path),
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        context=max(prompt.tokens for prompt in PROMPTS) + BLOCK_SIZE,
        batch_tokens=8192,
        kv_blocks=POOL,
        tiers="",
    )
    arms = dict(_arms(config, graph_tokens))
    found = run_interleaved(arms, small_step_measures(PROMPTS), repeats)
    facts = provenance.facts(*provenance.ENGINE, device=device, commit=commit)
    facts |= {"model": found_model.label, "dtype": config.dtype, "repeats": repeats}
    page = render_small_steps(found, facts)
    document = {"schema": 1, "provenance": facts, "found": found}
    save(output / "small-steps", document, page)
    return page


def _arms(config: EngineConfig, sizes: Sequence[int]) -> Iterator[tuple[str, EngineConfig]]:
    for size in sizes:
        sized = replace(config, graph_tokens=size)
        yield f"{ALGORITHM}, {size}", replace(sized, algorithm=ALGORITHM)
        yield f"stock, {size}", replace(sized, stock=True, algorithm="prefix")


def render_small_steps(found: ArmFigures, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    lines = [
        "# Time to the first token where few tokens are computed",
        "",
        f"{facts['model']}, {facts['dtype']}: times, not answers; {facts['gpu']}, vLLM "
        f"{facts['vllm']}, torch {facts['torch']}, commit {facts['commit']}. One request at a "
        f"time, chunks of {SMALL_STEPS_CHUNK} tokens and a question of {SMALL_STEPS_QUESTION}; "
        "engines by the most tokens "
        f"that CUDA graphs serve, all up at once; n={facts['repeats']}, each the median of "
        f"{REQUESTS} requests. Median (lowest - highest).",
        "",
        "Milliseconds to the first token:",
        "",
        _table(found, "ttft"),
    ]
    if any(figure.startswith("gpu ") for arm in found.values() for figure in arm):
        said = (
            "Milliseconds for which the GPU computes; the rest of the time it waits for the host:"
        )
        lines += ["", said, "", _table(found, "gpu")]
    if ratios := list(_ratio_rows(found)):
        said = "Time to the first token over that with the smallest graphs, repeat by repeat:"
        lines += ["", said, "", markdown.table(("chunks", *_larger(found)), ratios, right=1)]
    return "\n".join(lines) + "\n"


def _table(found: ArmFigures, figure: str) -> str:
    rows = [
        (prompt.name, str(prompt.computed), *(spread(arm.get(key), 1) for arm in found.values()))
        for prompt in PROMPTS
        for key in [f"{figure} {prompt.name}"]
    ]
    return markdown.table(("chunks", "computed tokens", *found), rows, right=1)


def _ratio_rows(found: ArmFigures) -> Iterator[Sequence[str]]:
    larger = _larger(found)
    for prompt in PROMPTS if larger else ():
        key = f"ttft {prompt.name}"
        pairs = [(found[arm].get(key), found[base].get(key)) for arm, base in larger.items()]
        yield prompt.name, *(_ratio(times, base) for times, base in pairs)


def _ratio(times: Sequence[float] | None, base: Sequence[float] | None) -> str:
    if not times or not base:
        return "-"
    return spread([one / other for one, other in zip(times, base, strict=True)], 2)


def _larger(found: ArmFigures) -> dict[str, str]:
    """Arms of other sizes than the smallest, each with the arm of its kind that has this."""
    by_kind: dict[str, list[str]] = {}
    for arm in found:
        by_kind.setdefault(arm.split(",")[0], []).append(arm)
    return {
        arm: sized[0]
        for kind in by_kind.values()
        for sized in [sorted(kind, key=lambda name: int(name.split(", ")[1]))]
        for arm in sized[1:]
    }

"""Time to the first token where few tokens are computed, by the size of CUDA graphs.

The GPU needs milliseconds for such a step, and the host may need longer to start its kernels one by
one. Graphs start those between attention layers at once, in steps of up to
`EngineConfig.graph_tokens` tokens. Prompts are chunks of random tokens and a question, one request
at a time. picbench has the chunks cached, but for some prompts' new ones, and links them; stock
vLLM has all cached but as many tokens at the end.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, PromptSegment, Request, Result, Text
from picbench.measure.engine.interleaved import ArmFigures, Measure, run_interleaved
from picbench.measure.engine.random_tokens import random_tokens
from picbench.measure.report import save, spread
from picbench.output import markdown, provenance
from picbench.workloads import models

#: Chunks that recur, tokens of each and of a question.
CORPUS, CHUNK, QUESTION = 24, 480, 16

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
        return CHUNK * (self.warm + self.new) + QUESTION

    @property
    def computed(self) -> int:
        """Tokens that it computes: the first block of chunks after the first one, and what is new.

        The first chunk of a prompt has its own position and is linked to nothing.
        """
        return BLOCK_SIZE * (self.warm + self.new - 1) + CHUNK * self.new + QUESTION


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
POOL = 2 * (CORPUS + 20 + 4) * CHUNK // BLOCK_SIZE


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
        asked = [*chunks[first : first + 8], Text(tokens=random_tokens(QUESTION, "cache"))]
        _serve(engine, Request(asked, ALGORITHM))


def _request(engine: Engine, prompt: SmallPrompt, name: str) -> Request:
    if engine.config.stock:
        own = random_tokens(prompt.computed, name)
        return Request([Text(tokens=(*_common(prompt), *own))], "prefix")
    order = random.Random(name)
    chunks: list[PromptSegment] = list(order.sample(_corpus(), prompt.warm))
    chunks += [Chunk(tokens=random_tokens(CHUNK, f"{name} {i}")) for i in range(prompt.new)]
    order.shuffle(chunks)
    return Request([*chunks, Text(tokens=random_tokens(QUESTION, name))], ALGORITHM)


def _corpus() -> list[Chunk]:
    return [Chunk(tokens=random_tokens(CHUNK, f"chunk {i}")) for i in range(CORPUS)]


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


def measures(prompts: Sequence[SmallPrompt]) -> dict[str, Measure]:
    """A measure for each prompt."""
    return {prompt.name: partial(ttft, prompt=prompt) for prompt in prompts}


def measure(
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
    found = run_interleaved(arms, measures(PROMPTS), repeats)
    facts = provenance.facts(*provenance.ENGINE, device=device, commit=commit)
    facts |= {"model": found_model.label, "dtype": config.dtype, "repeats": repeats}
    page = render(found, facts)
    document = {"schema": 1, "provenance": facts, "found": found}
    save(output / "small-steps", document, page)
    return page


def _arms(config: EngineConfig, sizes: Sequence[int]) -> Iterator[tuple[str, EngineConfig]]:
    for size in sizes:
        sized = replace(config, graph_tokens=size)
        yield f"{ALGORITHM}, {size}", replace(sized, algorithm=ALGORITHM)
        yield f"stock, {size}", replace(sized, stock=True, algorithm="prefix")


def render(found: ArmFigures, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    lines = [
        "# Time to the first token where few tokens are computed",
        "",
        f"{facts['model']}, {facts['dtype']}: times, not answers; {facts['gpu']}, vLLM "
        f"{facts['vllm']}, torch {facts['torch']}, commit {facts['commit']}. One request at a "
        f"time, chunks of {CHUNK} tokens and a question of {QUESTION}; engines by the most tokens "
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

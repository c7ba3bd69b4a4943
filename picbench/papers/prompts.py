"""What single prompts take and do: time to the first token, attention, work by layer."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from picbench.engines.algorithms import Algorithm, parse
from picbench.engines.algorithms.epic import Epic
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.engines.request import Request
from picbench.figures.picture import example_picks, planned_tokens
from picbench.papers.data import (
    START,
    ExperimentData,
    Number,
    PointArm,
    PointData,
    StoredPoint,
    conditions,
)
from picbench.papers.settings import BASE, TESTBED, RowExperiment
from picbench.run import runner
from picbench.store import provenance
from picbench.workloads import models

if TYPE_CHECKING:
    from picbench.engines.oracle import GivenSegment, Oracle
    from picbench.workloads.testbed.pic import PromptTokens

#: Tokens of the question of a single request, and prompt tokens a second, for estimates. CPU: two
#: cores of an AMD EPYC, testbed model; CUDA: H200, shapes of 7 and 8 billion weights.
QUESTION, _ALONE = 32, {"cpu": 2_700, "cuda": 38_000}

#: Arms of stock vLLM.
STOCK = ("full", "prefix")

_COLD = " cold"


@dataclass(frozen=True, kw_only=True)
class TimedPrompt(runner.Cell):
    """A prompt of an experiment with single requests; each repeat is a point, in one of `files`.

    `identity` has the settings of its experiment and of the prompt, and its device; `facts` are
    those of the engines that serve it.
    """

    label: str
    identity: Mapping[str, Any]
    files: Sequence[Path]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def plan(
        cls, name: str, label: str, identity: Mapping[str, Any], files: Sequence[Path]
    ) -> "TimedPrompt":
        """With about how many seconds a repeat takes.

        A warm arm compiles its chunks first, which takes about as long as full recompute.
        """
        arms, size = {}, (identity["chunks"], identity["tokens"])
        for arm in identity["arms"]:
            serve = partial(serve_prompt, arm=arm, size=size)
            arms[arm] = runner.ServedArm("stock" if arm in STOCK else "picbench", serve, serve)
        seconds = (math.prod(size) + QUESTION) * len(arms) * 1.2 / _ALONE[identity["device"]]
        return cls(
            name=name,
            arms=arms,
            seconds=seconds,
            most=len(files),
            label=label,
            identity=identity,
            files=files,
        )

    @property
    def tokens(self) -> int:
        """Tokens of its chunks and its question."""
        return int(self.identity["chunks"] * self.identity["tokens"] + QUESTION)

    def stored(self) -> list[StoredPoint]:
        """The repeats that are measured. Raises ConfigError for those of other settings."""
        found = (StoredPoint.find(file, self.identity) for file in self.files)
        return [one for one in found if one is not None]

    @property
    def missing(self) -> bool:
        """Whether repeats are still to be measured."""
        return len(self.stored()) < len(self.files)

    def serve(self, engines: runner.Engines, number: int) -> Mapping[str, Mapping[str, Any]]:
        """Serve a repeat, and write it."""
        figures = super().serve(engines, number)
        facts, wanted = self.facts, self.identity
        model = models.resolve(wanted["model"])
        weights = TESTBED if model.name == BASE else model.label
        caption = (
            f"{facts['gpu']}; vLLM {facts['vllm']}, torch {facts['torch']}; commit "
            f"{facts['commit'][:7]}. {weights}, random tokens, type {wanted['dtype']}; one "
            f"request at a time, arms in turn, {wanted['repeats']} repeats. Chunks are cached "
            "but for full, prefix and cold arms."
        )
        size = {"chunks": wanted["chunks"], "chunk_tokens": wanted["tokens"]}
        size["mean_tokens"] = BLOCK_SIZE + self.tokens
        arms = {}
        for arm, found in figures.items():
            arms[arm] = PointArm({name: round(value, 3) for name, value in found.items()})
        about = conditions(caption, weights, facts["gpu"], facts["commit"])
        point = PointData(self.label, number, size, arms)
        StoredPoint(wanted, about, point).write(self.files[number - 1])
        return figures


def measure_prompts(
    prompts: Sequence[TimedPrompt], commit: str | None, budget: runner.TimeBudget
) -> None:
    """Measure the repeats that are missing, as long as the budget lasts.

    Prompts for the same model and type are measured on engines that start once. Raises the error
    of an engine that fails.
    """
    groups: dict[tuple[str, str], list[TimedPrompt]] = {}
    for prompt in prompts:
        served = (prompt.identity["model"], prompt.identity["dtype"])
        groups.setdefault(served, []).append(prompt)
    for (model, dtype), group in groups.items():
        left = [prompt for prompt in group if prompt.missing]
        if not left:
            continue
        device, most = left[0].identity["device"], max(len(prompt.files) for prompt in left)
        if not budget.allows(left[0].seconds, START[device]):
            return
        facts = provenance.facts(*provenance.ENGINE, device=device, commit=commit)
        context = max(prompt.tokens for prompt in group) + 2 * BLOCK_SIZE
        config = EngineConfig(
            model=str(models.resolve(model).path),
            device=device,
            dtype=dtype,
            context=context,
            batch_tokens=min(8192, max(2048, context)),
            kv_blocks=max(1024, context // BLOCK_SIZE * 5),
            max_requests=8,
            tiers="",
        )
        engines = {"picbench": config}
        if any(arm in STOCK for prompt in group for arm in prompt.arms):
            engines["stock"] = replace(config, stock=True, algorithm="prefix")
        cells = [replace(prompt, rank=rank, facts=facts) for rank, prompt in enumerate(left)]
        plan = runner.ExperimentPlan(
            name="latencies", facts=facts, engines=engines, cells=cells, rounds=most, few=most
        )
        # How long a repeat took is not kept with it.
        seconds = {prompt.name: [prompt.seconds] * len(prompt.stored()) for prompt in left}
        record = runner.RoundsRecord(seconds=seconds)
        runner.run(plan, record, print, budget)
        budget.stopped = budget.stopped or not plan.done(record)


def serve_prompt(engine: Engine, name: str, *, arm: str, size: tuple[int, int]) -> dict[str, float]:
    """Figures of one request under an arm: milliseconds, and tokens.

    Its `size` is the number of chunks, and the tokens of each.
    """
    name = f"{name} {arm}"
    given = runner.random_chunks(*size, name)

    def ask(name: str) -> Any:
        # A head of its own, so that one chunk is not a prefix that was there before.
        head = runner.random_text(BLOCK_SIZE, f"{name} head")
        question = runner.random_text(QUESTION, f"{name} question")
        algorithm = "prefix" if arm in STOCK else arm.removesuffix(_COLD)
        request = Request([head, *given, question], algorithm)
        [result] = engine.generate([request], max_tokens=1, ignore_eos=True)
        return result

    if not arm.endswith(_COLD) and arm != "full":
        ask(f"{name} before")
        # Orders that begin alike would share what follows from it.
        given = [*given[1:], given[0]]
    found = ask(name)
    ttft, counts = found.timings.ttft, found.counts
    return {"ttft_ms": ttft * 1e3, "linked": counts.linked, "compiled": counts.compiled}


#: Figures of an arm, by layer or by place of a token in its chunk.
Figures = Sequence[Mapping[str, Number]]


def measure_rows(
    paper: str, wanted: Mapping[str, RowExperiment], commit: str | None, *, counted: bool
) -> Iterator[ExperimentData]:
    """The data of experiments with the same settings, from one pass over their rows.

    It is what the question's tokens attend to or, `counted`, what every layer computes.
    """
    from tokenizers import Tokenizer

    from picbench.engines.oracle import Oracle
    from picbench.workloads.testbed import rows
    from picbench.workloads.testbed.judge import tokens_of
    from picbench.workloads.testbed.prompt import Coder

    folder, settings = Path(models.resolve(BASE).path), next(iter(wanted.values())).cpu
    coder = Coder(Tokenizer.from_file(str(folder / "tokenizer.json")))
    config = json.loads((folder / "config.json").read_bytes())
    measure = partial(_count, config) if counted else partial(_look, Oracle(folder))
    points = {name: list[PointData]() for name in wanted}
    for number, row in enumerate(rows(settings.dataset, count=settings.rows), 1):
        prompt = tokens_of(row, coder)
        tokens = sum(map(len, (prompt.head, *prompt.chunks, prompt.tail)))
        facts = {"requests": 1, "mean_tokens": tokens}
        by_arm = [measure(prompt, arm, wanted.values()) for arm in settings.arms]
        for name, figures in zip(wanted, zip(*by_arm, strict=True), strict=True):
            for place, metrics in enumerate(zip(*figures, strict=True), 1):
                arms = dict(zip(settings.arms, map(PointArm, metrics), strict=True))
                points[name].append(PointData(str(place), number, facts, arms))
        print(f"{', '.join(wanted)}: {number} of {settings.rows} rows")
    known = provenance.facts("gpu", "torch", "transformers", "commit", commit=commit)
    of_rows = f"{settings.rows} rows of {settings.dataset}-like"
    if counted:
        model, where = "testbed's shape", "Counted from plans, not timed"
        caption = (
            f"{where}; commit {known['commit'][:7]}. {model}, {of_rows}, chunks cached. Tokens "
            "that CacheBlend picks after its check layer, here evenly spread ones, go through the "
            "first layers again in picbench."
        )
    else:
        model, where = TESTBED, known["gpu"]
        caption = (
            f"Hugging Face's model in float32 on {where}; torch {known['torch']}, transformers "
            f"{known['transformers']}; commit {known['commit'][:7]}. {model}, {of_rows}, attention "
            "of the question's tokens, averaged over them; chunks but the first."
        )
    about = conditions(caption, model, where, known["commit"], repeats="rows")
    for name, one in wanted.items():
        yield ExperimentData(paper, name, "cpu", one.varies, about, points[name])


def _look(
    oracle: "Oracle", prompt: "PromptTokens", arm: str, wanted: Iterable[RowExperiment]
) -> list[Figures]:
    """The question's attention under an arm; in full recompute chunks are text."""
    from picbench.engines.oracle import epic, naive

    algorithm = parse(arm)
    rule = epic(algorithm.k) if isinstance(algorithm, Epic) else naive()
    kind = "text" if arm == "full" else "chunk"
    segments: list[GivenSegment] = [("text", prompt.head)]
    segments += [(kind, chunk) for chunk in prompt.chunks]
    segments.append(("text", prompt.tail))
    attention = oracle.attention(segments, rule, len(prompt.tail)).numpy()
    spans = list(pairwise(accumulate(map(len, prompt.chunks), initial=len(prompt.head))))
    counts = [one.cpu.tokens if one.by == "token" else None for one in wanted]
    return [even_shares(attention, spans, count) for count in counts]


def even_shares(
    attention: np.ndarray, spans: Sequence[tuple[int, int]], tokens: int | None
) -> Figures:
    """What each of the first `tokens` of chunks gets, over an even share of its chunk's attention.

    `attention` is [layers, heads, tokens of the prompt]; `spans` are those of chunks, of which the
    first is left out. Averaged over chunks, layers and heads; figures of layers without `tokens`.
    """
    chunks = [attention[..., begin:end] for begin, end in spans[1:]]
    found = [c[..., : tokens or 4] / c.mean(axis=-1, keepdims=True) for c in chunks]
    shares = np.asarray(np.mean(found, axis=0))
    if tokens:
        return [{"share": round(float(share), 4)} for share in shares.mean(axis=(0, 1))]
    figures = {
        "first_share": shares[..., 0].mean(axis=1),
        "sinks_share": shares.mean(axis=(1, 2)),
        "top_head_share": shares.mean(axis=2).max(axis=1),
    }
    layers = range(len(shares))
    return [{name: round(float(of[n]), 4) for name, of in figures.items()} for n in layers]


def _count(
    config: Mapping[str, Any], prompt: "PromptTokens", arm: str, wanted: Iterable[RowExperiment]
) -> list[Figures]:
    chunks = [Segment(tuple(chunk), chunk=True) for chunk in prompt.chunks]
    segments = [Segment(tuple(prompt.head)), *chunks, Segment(tuple(prompt.tail))]
    works = count_layers(segments, parse(arm), config["num_hidden_layers"])
    return [[work.metrics(config) for work in works] for _ in wanted]


class LayerWork(NamedTuple):
    """Of a layer: tokens with new keys and values, tokens that leave it, pairs that attend."""

    projected: int
    finished: int
    pairs: int

    def metrics(self, config: Mapping[str, Any]) -> Mapping[str, Number]:
        """Figures of a point, of a Llama layer with the shape in a model's config.json.

        A multiplication and an addition of matrices are two operations.
        """
        hidden, size = config["hidden_size"], config["head_dim"]
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        operations = (
            # Query, key and value; then output projection and MLP; then queries with keys.
            self.projected * 2 * hidden * (heads + 2 * groups) * size
            + self.finished * 2 * hidden * (heads * size + 3 * config["intermediate_size"])
            + self.pairs * 4 * heads * size
        )
        figures = {"projected": self.projected, "finished": self.finished}
        return {**figures, "gigaoperations": round(operations / 1e9, 6)}


def count_layers(segments: list[Segment], algorithm: Algorithm, layers: int) -> list[LayerWork]:
    """The work of each layer for a prompt whose chunks are cached.

    Which tokens are picked is not known; as an example they are evenly spread, which the number of
    pairs depends on and nothing else.
    """
    layout = LayoutConfig(pad=algorithm.pads)
    plan = lay_out(algorithm.arrange(segments, layout), algorithm.plan_chunk, layout)
    planned = planned_tokens(plan, example_picks(plan))
    computed = [t.position for t in planned if t.compiled is None]
    tokens, pairs = len(computed), sum(position + 1 for position in computed)
    found = [LayerWork(tokens, tokens, pairs)] * layers
    if plan.picks is not None and plan.picks.deviation is not None:
        total = plan.end
        found[0] = LayerWork(tokens + total, tokens + total, pairs + total * (total + 1) // 2)
        found[1] = LayerWork(tokens + total, tokens, pairs)
    return found

"""What single prompts take and do: time to the first token, attention, work by layer."""

import json
from collections.abc import Iterator, Mapping, Sequence
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
    POINTS,
    START,
    ExperimentData,
    Number,
    PointArm,
    PointData,
    StoredPoint,
    conditions,
)
from picbench.papers.settings import (
    BASE,
    TESTBED,
    Device,
    LatencyPoint,
    LatencySettings,
    RowExperiment,
    RowSettings,
    point_name,
)
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


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """A prompt of an experiment with single requests, whose repeats are points below `output`."""

    experiment: str
    label: str
    device: Device
    settings: LatencySettings
    output: Path

    @property
    def tokens(self) -> int:
        """Tokens of its chunks and its question."""
        point = self.settings.points[self.label]
        return point.chunks * point.tokens + QUESTION

    @property
    def expected(self) -> float:
        """About how many seconds a repeat takes.

        A warm arm compiles its chunks first, which takes about as long as full recompute.
        """
        return self.tokens * len(self.settings.arms) * 1.2 / _ALONE[self.device]

    @property
    def identity(self) -> dict[str, Any]:
        """What tells whether a repeat is one of this prompt."""
        point = self.settings.points[self.label].model_dump()
        settings = self.settings.model_dump(mode="json", exclude={"points"})
        return settings | point | {"device": self.device}

    def stored(self) -> list[StoredPoint]:
        """The repeats that are measured. Raises ConfigError for those of other settings."""
        files = map(self._file, range(1, self.settings.repeats + 1))
        found = (StoredPoint.find(file, self.identity) for file in files)
        return [one for one in found if one is not None]

    @property
    def missing(self) -> bool:
        """Whether repeats are still to be measured."""
        return len(self.stored()) < self.settings.repeats

    def _file(self, repeat: int) -> Path:
        name = point_name(self.device, self.experiment, self.label, repeat)
        return self.output / POINTS / f"{name}.json"

    def keep(
        self, repeat: int, figures: Mapping[str, Mapping[str, float]], facts: Mapping[str, Any]
    ) -> None:
        """Write a repeat that an engine with these facts served."""
        model = models.resolve(self.settings.model)
        weights = TESTBED if model.name == BASE else model.label
        caption = (
            f"{facts['gpu']}; vLLM {facts['vllm']}, torch {facts['torch']}; commit "
            f"{facts['commit'][:7]}. {weights}, random tokens, type {self.settings.dtype}; one "
            f"request at a time, arms in turn, {self.settings.repeats} repeats. Chunks are cached "
            "but for full, prefix and cold arms."
        )
        about = conditions(caption, weights, facts["gpu"], facts["commit"])
        point = self.settings.points[self.label]
        size = {"chunks": point.chunks, "chunk_tokens": point.tokens}
        size["mean_tokens"] = BLOCK_SIZE + self.tokens
        arms = {}
        for arm, found in figures.items():
            arms[arm] = PointArm({name: round(value, 3) for name, value in found.items()})
        data = PointData(self.label, repeat, size, arms)
        StoredPoint(self.identity, about, data).write(self._file(repeat))


@dataclass(slots=True)
class PromptRecord(runner.RoundsRecord):
    """Keeps each repeat of prompts, by name, as a point."""

    prompts: Mapping[str, TimedPrompt] = field(default_factory=dict)

    def note(
        self, cell: runner.Cell, number: int, figures: Mapping[str, Any], seconds: float
    ) -> None:
        """Keep a repeat."""
        self.seconds.setdefault(cell.name, []).append(seconds)
        self.prompts[cell.name].keep(number, figures, self.facts)


def measure_prompts(
    prompts: Sequence[TimedPrompt], commit: str | None, budget: runner.TimeBudget
) -> None:
    """Measure the repeats that are missing, as long as the budget lasts.

    Prompts for the same model and type are measured on engines that start once. Raises the error
    of an engine that fails.
    """
    groups: dict[tuple[str, str], list[TimedPrompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.settings.model, prompt.settings.dtype), []).append(prompt)
    for group in groups.values():
        left = {f"{one.experiment}: {one.label}": one for one in group if one.missing}
        if not left:
            continue
        first = next(iter(left.values()))
        if not budget.allows(first.expected, START[first.device]):
            return
        configs = _engines(group)
        facts = provenance.facts(*provenance.ENGINE, device=first.device, commit=commit)
        cells = []
        for rank, (name, prompt) in enumerate(left.items()):
            arms = {}
            for arm in prompt.settings.arms:
                serve = partial(serve_prompt, arm=arm, point=prompt.settings.points[prompt.label])
                arms[arm] = runner.ServedArm("stock" if arm in STOCK else "picbench", serve, serve)
            repeats = prompt.settings.repeats
            cells.append(runner.Cell(name, arms, prompt.expected, rank, repeats))
        most = max(prompt.settings.repeats for prompt in left.values())
        plan = runner.ExperimentPlan(
            name="latencies", facts=facts, engines=configs, cells=cells, rounds=most, few=most
        )
        # How long a repeat took is not kept with it.
        seconds = {name: [prompt.expected] * len(prompt.stored()) for name, prompt in left.items()}
        record = PromptRecord(seconds=seconds, prompts=left, facts=facts)
        runner.run(plan, record, print, budget)
        budget.stopped = budget.stopped or not plan.done(record)


def _engines(prompts: Sequence[TimedPrompt]) -> dict[str, EngineConfig]:
    """The engines for prompts: one of picbench's, and stock vLLM if an arm is its."""
    first = prompts[0]
    context = max(prompt.tokens for prompt in prompts) + 2 * BLOCK_SIZE
    ours = EngineConfig(
        model=str(models.resolve(first.settings.model).path),
        device=first.device,
        dtype=first.settings.dtype,
        context=context,
        batch_tokens=min(8192, max(2048, context)),
        kv_blocks=max(1024, context // BLOCK_SIZE * 5),
        max_requests=8,
        tiers="",
    )
    found = {"picbench": ours}
    if any(arm in STOCK for prompt in prompts for arm in prompt.settings.arms):
        found["stock"] = replace(ours, stock=True, algorithm="prefix")
    return found


def serve_prompt(engine: Engine, name: str, *, arm: str, point: LatencyPoint) -> dict[str, float]:
    """Figures of one request under an arm: milliseconds, and tokens."""
    name = f"{name} {arm}"
    given = runner.random_chunks(point.chunks, point.tokens, name)

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


def _rows(settings: RowSettings) -> Iterator["PromptTokens"]:
    """The first rows of a data set, for the testbed."""
    from tokenizers import Tokenizer

    from picbench.workloads.testbed import rows
    from picbench.workloads.testbed.judge import tokens_of
    from picbench.workloads.testbed.prompt import Coder

    coder = Coder(Tokenizer.from_file(str(_testbed() / "tokenizer.json")))
    for row in rows(settings.dataset, count=settings.rows):
        yield tokens_of(row, coder)


def _testbed() -> Path:
    return Path(models.resolve(BASE).path)


#: Metrics of an arm, by layer or by place.
_Metrics = Sequence[Mapping[str, Number]]


def _row_points(number: int, tokens: int, arms: Mapping[str, _Metrics]) -> Iterator[PointData]:
    """The points of a row: one for each layer or place, counted from 1."""
    facts = {"requests": 1, "mean_tokens": tokens}
    for place, metrics in enumerate(zip(*arms.values(), strict=True), 1):
        found = dict(zip(arms, map(PointArm, metrics), strict=True))
        yield PointData(str(place), number, facts, found)


#: Attention [layers, heads, tokens of the prompt], averaged over the question's tokens.
Attention = np.ndarray


def measure_attention(
    wanted: Mapping[str, RowExperiment], paper: str, commit: str | None
) -> Iterator[ExperimentData]:
    """The data of experiments with the same settings, from one pass over their rows."""
    from picbench.engines.oracle import Oracle

    settings = next(iter(wanted.values())).cpu
    oracle, points = Oracle(_testbed()), {name: list[PointData]() for name in wanted}
    for number, prompt in enumerate(_rows(settings), 1):
        ends = list(accumulate(map(len, prompt.chunks), initial=len(prompt.head)))
        spans, tokens = list(pairwise(ends)), ends[-1] + len(prompt.tail)
        seen = {arm: _attention(oracle, prompt, arm)[..., : ends[-1]] for arm in settings.arms}
        for name, experiment in wanted.items():
            first = 4 if experiment.by == "layer" else settings.tokens
            shares = {arm: even_shares(found, spans, first) for arm, found in seen.items()}
            metrics = {arm: _metrics(found, experiment.by) for arm, found in shares.items()}
            points[name] += _row_points(number, tokens, metrics)
        print(f"attention: {number} of {settings.rows} rows")
    facts = provenance.facts("gpu", "torch", "transformers", "commit", commit=commit)
    caption = (
        f"Hugging Face's model in float32 on {facts['gpu']}; torch {facts['torch']}, transformers "
        f"{facts['transformers']}; commit {facts['commit'][:7]}. {TESTBED}, {settings.rows} rows "
        f"of {settings.dataset}-like, attention of the question's tokens, averaged over them; "
        "chunks but the first."
    )
    about = conditions(caption, TESTBED, facts["gpu"], facts["commit"], repeats="rows")
    for name, experiment in wanted.items():
        yield ExperimentData(paper, name, "cpu", experiment.varies, about, points[name])


def even_shares(attention: Attention, spans: Sequence[tuple[int, int]], tokens: int) -> Attention:
    """Attention on each of the first `tokens` of chunks, over an even share of their chunk's.

    Averaged over the chunks but the first, [layers, heads, tokens]. Chunks are `spans`, (begin,
    end), of `tokens` tokens or more.
    """
    chunks = [attention[..., begin:end] for begin, end in spans[1:]]
    found = [chunk[..., :tokens] / chunk.mean(axis=-1, keepdims=True) for chunk in chunks]
    return np.asarray(np.mean(found, axis=0))


def _metrics(shares: Attention, by: str) -> _Metrics:
    """Metrics of layers or tokens, from even shares [layers, heads, tokens]."""
    if by == "token":
        return [{"share": round(float(share), 4)} for share in shares.mean(axis=(0, 1))]
    figures = {
        "first_share": shares[..., 0].mean(axis=1),
        "sinks_share": shares.mean(axis=(1, 2)),
        "top_head_share": shares.mean(axis=2).max(axis=1),
    }
    layers = range(len(shares))
    return [{name: round(float(of[n]), 4) for name, of in figures.items()} for n in layers]


def _attention(oracle: "Oracle", prompt: "PromptTokens", arm: str) -> Attention:
    """The question's attention under an arm; in full recompute chunks are text."""
    from picbench.engines.oracle import epic, naive

    algorithm = parse(arm)
    rule = epic(algorithm.k) if isinstance(algorithm, Epic) else naive()
    kind = "text" if arm == "full" else "chunk"
    segments: list[GivenSegment] = [("text", prompt.head)]
    segments += [(kind, chunk) for chunk in prompt.chunks]
    segments.append(("text", prompt.tail))
    return oracle.attention(segments, rule, len(prompt.tail)).numpy()


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


def measure_layers(
    paper: str, name: str, experiment: RowExperiment, commit: str | None
) -> ExperimentData:
    """Count all rows under all arms."""
    settings, points = experiment.cpu, list[PointData]()
    algorithms = {arm: parse(arm) for arm in settings.arms}
    config = json.loads((_testbed() / "config.json").read_bytes())
    for number, prompt in enumerate(_rows(settings), 1):
        chunks = [Segment(tuple(chunk), chunk=True) for chunk in prompt.chunks]
        segments = [Segment(tuple(prompt.head)), *chunks, Segment(tuple(prompt.tail))]
        metrics = {}
        for arm, algorithm in algorithms.items():
            works = count_layers(segments, algorithm, config["num_hidden_layers"])
            metrics[arm] = [work.metrics(config) for work in works]
        points += _row_points(number, sum(len(each.tokens) for each in segments), metrics)
    commit = provenance.facts("commit", commit=commit)["commit"]
    caption = (
        f"Counted from plans, not timed; commit {commit[:7]}. testbed's shape, {settings.rows} "
        f"rows of {settings.dataset}-like, chunks cached. Tokens that CacheBlend picks after its "
        "check layer, here evenly spread ones, go through the first layers again in picbench."
    )
    where = "Counted from plans, not timed"
    about = conditions(caption, "testbed's shape", where, commit, repeats="rows")
    return ExperimentData(paper, name, "cpu", experiment.varies, about, points)

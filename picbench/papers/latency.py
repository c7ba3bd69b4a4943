"""What single prompts take and do: time to the first token, attention, work by layer."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from picbench.engines.algorithms import Algorithm, Registry
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.engines.request import Chunk, Request, Text
from picbench.errors import PicBenchError
from picbench.figures.picture import example_picks, planned_tokens
from picbench.files import write_json
from picbench.papers.data import (
    ALONE,
    QUESTION,
    START,
    ExperimentData,
    Number,
    PointArm,
    PointData,
    conditions,
    other_settings,
)
from picbench.papers.judge import BASE, TESTBED
from picbench.papers.settings import (
    Device,
    LatencyPoint,
    LatencySettings,
    RowExperiment,
    RowSettings,
)
from picbench.run.runner import (
    Cell,
    Described,
    Engines,
    ExperimentPlan,
    ServedArm,
    TimeBudget,
    add_figures,
    random_tokens,
    run,
)
from picbench.store import provenance
from picbench.workloads import models

if TYPE_CHECKING:
    from picbench.engines.oracle import GivenSegment, Oracle, Rule
    from picbench.workloads.testbed.pic import PromptTokens

#: Arms of stock vLLM.
STOCK = ("full", "prefix")

COLD = " cold"

#: Figures of a request.
_METRICS = ("ttft_ms", "linked", "compiled")

#: Separates arm and metric in a figure's key.
_BETWEEN = "\t"

#: Metrics by arm, a list of repeats each.
Figures = dict[str, dict[str, list[float]]]


class LatencyRun:
    """The file of an experiment: the figures of points, and which points are missing.

    Raises ConfigError if the file was measured with other settings.
    """

    def __init__(self, settings: LatencySettings, device: Device, path: Path) -> None:
        self.settings = settings
        self._device = device
        self._path = path
        self._points: dict[str, Figures] = {}
        self._facts: dict[str, Any] = {}
        if path.exists():
            found = json.loads(path.read_bytes())
            if found["settings"] != self._identity:
                raise other_settings(path, "measured with")
            self._points, self._facts = found["points"], found["facts"]

    @property
    def missing(self) -> dict[str, LatencyPoint]:
        """Points some repeats of which are still to be measured."""
        points = self.settings.points.items()
        return {label: p for label, p in points if self.repeats(label) < self.settings.repeats}

    def repeats(self, label: str) -> int:
        """Repeats of a point that are measured."""
        arms = self._points.get(label, {}).values()
        return min((len(values) for arm in arms for values in arm.values()), default=0)

    @property
    def engine_kind(self) -> tuple[str, str]:
        """What engines are the same for: a model, and a type."""
        return self.settings.model, self.settings.dtype

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Note what measures from now on."""
        self._facts = dict(facts)

    def keep(self, label: str, found: Mapping[str, Mapping[str, float]]) -> None:
        """Add a repeat of a point, and write the file."""
        figures: dict[str, dict[str, float]] = {arm: {} for arm in self.settings.arms}
        for key, value in (each for engine in found.values() for each in engine.items()):
            arm, metric = key.split(_BETWEEN)
            figures[arm][metric] = round(value, 3)
        add_figures(self._points.setdefault(label, {}), figures)
        document = {"settings": self._identity, "facts": self._facts, "points": self._points}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, document, indent=None)

    def expected(self, label: str) -> float:
        """About how many seconds a repeat of a point takes.

        A warm arm compiles its chunks first, which takes about as long as full recompute.
        """
        point = self.settings.points[label]
        tokens = point.chunks * point.tokens + QUESTION
        return tokens * len(self.settings.arms) * 1.2 / ALONE[self._device]

    def data(self, paper: str, experiment: str, varies: str) -> ExperimentData:
        """The complete points, a repeat a point."""
        points = [
            PointData(label, repeat + 1, _size(self.settings.points[label]), arms)
            for label in self.settings.points
            if label not in self.missing
            for repeat, arms in enumerate(_by_repeat(self._points[label]))
        ]
        facts = self._facts
        model = models.resolve(self.settings.model)
        weights = TESTBED if model.name == BASE else model.label
        caption = (
            f"{facts['gpu']}; vLLM {facts['vllm']}, torch {facts['torch']}; commit "
            f"{facts['commit'][:7]}. {weights}, random tokens, type {self.settings.dtype}; one "
            f"request at a time, arms in turn, {self.settings.repeats} repeats. Chunks are cached "
            "but for full, prefix and cold arms."
        )
        about = conditions(caption, weights, facts["gpu"], facts["commit"])
        return ExperimentData(paper, experiment, self._device, varies, about, points)

    @property
    def _identity(self) -> dict[str, Any]:
        kept = self.settings.model_dump(mode="json")
        return kept | {"device": self._device, "points": None}


@dataclass(slots=True)
class LatencyRecord:
    """Points of several experiments on the same engines, each kept in the file of its own.

    `places` has the file and the label of each cell by its name.
    """

    places: Mapping[str, tuple[LatencyRun, str]]
    facts: Mapping[str, Any]
    seconds: dict[str, list[float]]
    start: float | None = None

    def begin(self, engines: Engines, described: Described, seconds: float) -> None:
        """Note what measures."""
        for latency, _ in self.places.values():
            latency.begin(self.facts)

    def note(self, cell: Cell, number: int, figures: Mapping[str, Any], seconds: float) -> None:
        """Keep a repeat."""
        latency, label = self.places[cell.name]
        latency.keep(label, figures)
        self.seconds[cell.name].append(seconds)

    def fail(self, cell: Cell, error: PicBenchError) -> None:
        """Raise the error."""
        raise error


def measure_latencies(
    runs: Mapping[str, LatencyRun], device: Device, commit: str | None, budget: TimeBudget
) -> None:
    """Measure what is missing in several experiments, as long as the budget lasts.

    Those with the same model and type are measured on engines that start once. Raises the error of
    an engine that fails.
    """
    for kind in dict.fromkeys(one.engine_kind for one in runs.values() if one.missing):
        alike = {name: one for name, one in runs.items() if one.engine_kind == kind}
        places = {
            f"{name}: {label}": (one, label) for name, one in alike.items() for label in one.missing
        }
        first, label = next(iter(places.values()))
        if budget.allows(first.expected(label), START[device]):
            configs = engines([latency.settings for latency in alike.values()], device)
            _measure_alike(places, configs, device, commit, budget)


def _measure_alike(
    places: Mapping[str, tuple[LatencyRun, str]],
    configs: Mapping[str, EngineConfig],
    device: Device,
    commit: str | None,
    budget: TimeBudget,
) -> None:
    facts = provenance.facts(*provenance.ENGINE, device=device, commit=commit)
    cells = [
        _cell(name, latency, label, configs, rank)
        for rank, (name, (latency, label)) in enumerate(places.items())
    ]
    repeats = max(latency.settings.repeats for latency, _ in places.values())
    plan = ExperimentPlan(
        name="latencies", facts=facts, engines=configs, cells=cells, rounds=repeats, few=repeats
    )
    # Of a repeat that is measured it is not known any more how long it took.
    seconds = {
        name: [latency.expected(label)] * latency.repeats(label)
        for name, (latency, label) in places.items()
    }
    record = LatencyRecord(places, facts, seconds)
    run(plan, record, print, budget)
    budget.stopped = budget.stopped or not plan.done(record)


def _cell(
    name: str, latency: LatencyRun, label: str, configs: Mapping[str, EngineConfig], rank: int
) -> Cell:
    arms, point = tuple(latency.settings.arms), latency.settings.points[label]
    measure = partial(serve_point, arms=arms, point=point)
    served = {engine: ServedArm(engine, measure, measure) for engine in configs}
    return Cell(name, served, latency.expected(label), rank, latency.settings.repeats)


def engines(experiments: Sequence[LatencySettings], device: Device) -> dict[str, EngineConfig]:
    """The engines that experiments with the same model and type need.

    One of picbench's, and stock vLLM if an arm is its.
    """
    settings = experiments[0]
    points = [point for found in experiments for point in found.points.values()]
    longest = max(point.chunks * point.tokens for point in points)
    context = longest + QUESTION + 2 * BLOCK_SIZE
    ours = EngineConfig(
        model=str(models.resolve(settings.model).path),
        device=device,
        dtype=settings.dtype,
        context=context,
        batch_tokens=min(8192, max(2048, context)),
        kv_blocks=max(1024, context // BLOCK_SIZE * 5),
        max_requests=8,
        tiers="",
    )
    found = {"picbench": ours}
    if any(arm in STOCK for found in experiments for arm in found.arms):
        found["stock"] = replace(ours, stock=True, algorithm="prefix")
    return found


def serve_point(
    engine: Engine, name: str, *, arms: Sequence[str], point: LatencyPoint
) -> dict[str, float]:
    """Figures of one repeat, by arm and metric: milliseconds, and tokens."""
    served = [arm for arm in arms if (arm in STOCK) == engine.config.stock]
    return {
        _BETWEEN.join((arm, metric)): value
        for arm in served
        for metric, value in zip(_METRICS, _serve(engine, name, arm, point), strict=True)
    }


def _serve(engine: Engine, name: str, arm: str, point: LatencyPoint) -> Iterator[float]:
    drawn = f"{name} {arm}"
    chunks = [
        Chunk(tokens=random_tokens(point.tokens, f"{drawn} {n}")) for n in range(point.chunks)
    ]
    if not arm.endswith(COLD) and arm != "full":
        _request(engine, arm, chunks, f"{drawn} before")
        # Orders that begin alike would share what follows from it.
        chunks = [*chunks[1:], chunks[0]] if len(chunks) > 1 else chunks
    result = _request(engine, arm, chunks, drawn)
    yield result.timings.ttft * 1e3
    yield result.counts.linked
    yield result.counts.compiled


def _request(engine: Engine, arm: str, chunks: Sequence[Chunk], name: str) -> Any:
    algorithm = "prefix" if arm in STOCK else arm.removesuffix(COLD)
    question = Text(tokens=random_tokens(QUESTION, f"{name} question"))
    # A head of its own, so that one chunk is not a prefix that was there before.
    head = Text(tokens=random_tokens(BLOCK_SIZE, f"{name} head"))
    request = Request([head, *chunks, question], algorithm)
    [result] = engine.generate([request], max_tokens=1, ignore_eos=True)
    return result


def _size(point: LatencyPoint) -> Mapping[str, Number]:
    total = BLOCK_SIZE + point.chunks * point.tokens + QUESTION
    return {"chunks": point.chunks, "chunk_tokens": point.tokens, "mean_tokens": total}


def _by_repeat(figures: Figures) -> Iterator[dict[str, PointArm]]:
    repeats = min(len(values) for arm in figures.values() for values in arm.values())
    for repeat in range(repeats):
        yield {
            arm: PointArm({metric: values[repeat] for metric, values in metrics.items()})
            for arm, metrics in figures.items()
        }


def testbed_folder() -> Path:
    """Where the testbed's model lies."""
    return Path(models.resolve(BASE).path)


def testbed_prompts(settings: RowSettings) -> Iterator["PromptTokens"]:
    """The first rows of a data set."""
    from tokenizers import Tokenizer

    from picbench.workloads.testbed import rows
    from picbench.workloads.testbed.judge import tokens_of
    from picbench.workloads.testbed.prompt import Coder

    coder = Coder(Tokenizer.from_file(str(testbed_folder() / "tokenizer.json")))
    for row in rows(settings.dataset, count=settings.rows):
        yield tokens_of(row, coder)


#: Metrics of an arm, by layer or by place.
_Metrics = Sequence[Mapping[str, Number]]


def _row_points(number: int, tokens: int, arms: Mapping[str, _Metrics]) -> Iterator[PointData]:
    """The points of a row: one for each layer or place, counted from 1."""
    facts = {"requests": 1, "mean_tokens": tokens}
    for place, metrics in enumerate(zip(*arms.values(), strict=True), 1):
        found = {arm: PointArm(of_arm) for arm, of_arm in zip(arms, metrics, strict=True)}
        yield PointData(str(place), number, facts, found)


#: First tokens that are taken together.
SINKS = 4

#: Attention [layers, heads, tokens of the prompt], averaged over the question's tokens.
Attention = np.ndarray


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """A prompt: where its chunks begin and end, and the question's attention under each arm."""

    spans: Sequence[tuple[int, int]]
    tokens: int
    arms: Mapping[str, Attention]

    def points(self, number: int, experiment: RowExperiment) -> Iterator[PointData]:
        """The points of a row's experiment."""
        by_layer = experiment.by == "layer"
        tokens = SINKS if by_layer else experiment.cpu.tokens
        shares = {arm: even_shares(found, self.spans, tokens) for arm, found in self.arms.items()}
        view = _by_layer if by_layer else _by_place
        arms = {arm: view(found) for arm, found in shares.items()}
        return _row_points(number, self.tokens, arms)


def measure_attention(
    wanted: Mapping[str, RowExperiment],
    settings: RowSettings,
    paper: str,
    commit: str | None,
    say: Callable[[str], None],
) -> Iterator[ExperimentData]:
    """The data of experiments with the same settings, from one pass over their rows."""
    from picbench.engines.oracle import Oracle

    oracle, rows = Oracle(testbed_folder()), list[AttentionRow]()
    for prompt in testbed_prompts(settings):
        rows.append(_row(oracle, prompt, settings))
        say(f"attention: {len(rows)} of {settings.rows} rows")
    names = ("gpu", "torch", "transformers", "commit")
    facts = provenance.facts(*names, device="cpu", commit=commit)
    caption = (
        f"Hugging Face's model in float32 on {facts['gpu']}; torch {facts['torch']}, transformers "
        f"{facts['transformers']}; commit {facts['commit'][:7]}. {TESTBED}, "
        f"{settings.rows} rows of {settings.dataset}-like, attention of the question's tokens, "
        "averaged over them; chunks but the first."
    )
    about = conditions(caption, TESTBED, facts["gpu"], facts["commit"], repeats="rows")
    for name, experiment in wanted.items():
        points = [
            point for number, row in enumerate(rows, 1) for point in row.points(number, experiment)
        ]
        yield ExperimentData(paper, name, "cpu", experiment.varies, about, points)


def even_shares(attention: Attention, spans: Sequence[tuple[int, int]], tokens: int) -> Attention:
    """Attention on each of the first `tokens` of chunks, over an even share of their chunk's.

    Averaged over the chunks but the first, [layers, heads, tokens]. Chunks are `spans`, (begin,
    end), of `tokens` tokens or more.
    """
    chunks = [attention[..., begin:end] for begin, end in spans[1:]]
    found = [chunk[..., :tokens] / chunk.mean(axis=-1, keepdims=True) for chunk in chunks]
    return np.asarray(np.mean(found, axis=0))


def _by_layer(shares: Attention) -> _Metrics:
    """Metrics of layers, from even shares [layers, heads, tokens]."""
    return [
        {
            "first_share": round(float(heads[:, 0].mean()), 4),
            "sinks_share": round(float(heads.mean()), 4),
            "top_head_share": round(float(heads.mean(axis=1).max()), 4),
        }
        for heads in shares
    ]


def _by_place(shares: Attention) -> _Metrics:
    return [{"share": round(float(share), 4)} for share in shares.mean(axis=(0, 1))]


def _row(oracle: "Oracle", prompt: "PromptTokens", settings: RowSettings) -> AttentionRow:
    ends = list(accumulate(map(len, prompt.chunks), initial=len(prompt.head)))
    arms = {arm: _attention(oracle, prompt, arm)[..., : ends[-1]] for arm in settings.arms}
    return AttentionRow(list(pairwise(ends)), ends[-1] + len(prompt.tail), arms)


def _attention(oracle: "Oracle", prompt: "PromptTokens", arm: str) -> Attention:
    rule, kind = _rule(arm)
    segments: list[GivenSegment] = [("text", prompt.head)]
    segments += [(kind, chunk) for chunk in prompt.chunks]
    segments.append(("text", prompt.tail))
    return oracle.attention(segments, rule, len(prompt.tail)).numpy()


def _rule(arm: str) -> "tuple[Rule, str]":
    """The oracle's rule of an arm, and what its chunks are; in full recompute they are text."""
    from picbench.engines.algorithms import parse
    from picbench.engines.algorithms.epic import Epic
    from picbench.engines.oracle import epic, naive

    if arm == "full":
        return naive(), "text"
    algorithm = parse(arm)
    return (epic(algorithm.k) if isinstance(algorithm, Epic) else naive()), "chunk"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Operations of a Llama layer, two for a multiplication and an addition of matrices.

    `keys` for the query, key and value of a token, `rest` for its output projection and MLP, `pair`
    for a query and a key that it sees.
    """

    layers: int
    keys: int
    rest: int
    pair: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The shape in a model's config.json."""
        hidden, size = config["hidden_size"], config["head_dim"]
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            keys=2 * hidden * (heads + 2 * groups) * size,
            rest=2 * hidden * (heads * size + 3 * config["intermediate_size"]),
            pair=4 * heads * size,
        )


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Of a layer: tokens with new keys and values, tokens that leave it, pairs that attend."""

    projected: int
    finished: int
    pairs: int

    def metrics(self, shape: LayerShape) -> Mapping[str, Number]:
        """Figures of a point."""
        operations = (
            self.projected * shape.keys + self.finished * shape.rest + self.pairs * shape.pair
        )
        return {
            "projected": self.projected,
            "finished": self.finished,
            "gigaoperations": round(operations / 1e9, 6),
        }


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
    found = [LayerWork(tokens, tokens, pairs) for _ in range(layers)]
    if plan.picks is not None and plan.picks.deviation is not None:
        total = plan.end
        found[0] = LayerWork(tokens + total, tokens + total, pairs + total * (total + 1) // 2)
        found[1] = LayerWork(tokens + total, tokens, pairs)
    return found


def measure_layers(
    paper: str, name: str, experiment: RowExperiment, commit: str | None
) -> ExperimentData:
    """Count all rows under all arms."""
    settings, registry = experiment.cpu, Registry()
    arms = {arm: registry.parse(arm) for arm in settings.arms}
    shape = LayerShape.of(json.loads((testbed_folder() / "config.json").read_bytes()))
    points: list[PointData] = []
    for number, prompt in enumerate(testbed_prompts(settings), 1):
        segments = _segments(prompt)
        counts = {name: count_layers(segments, arm, shape.layers) for name, arm in arms.items()}
        metrics = {arm: [work.metrics(shape) for work in works] for arm, works in counts.items()}
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


def _segments(prompt: "PromptTokens") -> list[Segment]:
    return [
        Segment(tuple(prompt.head)),
        *(Segment(tuple(chunk), chunk=True) for chunk in prompt.chunks),
        Segment(tuple(prompt.tail)),
    ]

"""What each layer computes under an arm, counted from the plans of prompts; nothing is timed.

Chunks are in the cache. A request computes its text and linked tokens in every layer. Where tokens
are picked by deviation (CacheBlend), all tokens of the prompt go through the first layer before
that, and as far as their keys and values through the second, the check layer
(`engines.vllm.worker.first_layers`).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from picbench.engines.algorithms import Algorithm, Registry
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.picture import example_picks, planned_tokens
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.output import provenance
from picbench.papers.experiments.experiment_data import ExperimentData, PointArm, PointData
from picbench.papers.experiments.testbed_prompts import testbed_folder, testbed_prompts
from picbench.papers.paper_settings import LayerExperiment

if TYPE_CHECKING:
    from picbench.workloads.testbed.lm.pic import PromptTokens


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

    def metrics(self, shape: LayerShape) -> dict[str, float | None]:
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
    paper: str, name: str, experiment: LayerExperiment, commit: str | None
) -> ExperimentData:
    """Count all rows under all arms."""
    settings = experiment.cpu
    registry = Registry()
    arms = {arm: registry.parse(arm) for arm in settings.arms}
    shape = LayerShape.of(json.loads((testbed_folder() / "config.json").read_bytes()))
    points = [
        point
        for number, prompt in enumerate(testbed_prompts(settings.dataset, settings.rows), 1)
        for point in _points(_segments(prompt), number, arms, shape)
    ]
    short = provenance.facts("commit", device="cpu", commit=commit)["commit"][:7]
    caption = (
        f"Counted from plans, not timed; commit {short}. testbed's shape, {settings.rows} rows of "
        f"{settings.dataset}-like, chunks cached. Tokens that CacheBlend picks after its check "
        "layer, here evenly spread ones, go through the first layers again in picbench."
    )
    conditions = {
        "caption": caption,
        "model": "testbed's shape",
        "hardware": "Counted from plans, not timed",
        "commit": short,
        "repeats": "rows",
    }
    return ExperimentData(paper, name, "cpu", experiment.varies, conditions, points)


def _points(
    segments: list[Segment], number: int, arms: Mapping[str, Algorithm], shape: LayerShape
) -> Iterator[PointData]:
    works = {name: count_layers(segments, arm, shape.layers) for name, arm in arms.items()}
    size = sum(len(segment.tokens) for segment in segments)
    for layer in range(shape.layers):
        found = {arm: PointArm(work[layer].metrics(shape)) for arm, work in works.items()}
        yield PointData(str(layer + 1), number, {"requests": 1, "mean_tokens": size}, found)


def _segments(prompt: "PromptTokens") -> list[Segment]:
    return [
        Segment(tuple(prompt.head)),
        *(Segment(tuple(chunk), chunk=True) for chunk in prompt.chunks),
        Segment(tuple(prompt.tail)),
    ]

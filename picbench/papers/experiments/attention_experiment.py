"""Where a question looks: attention on the first tokens of chunks, layer by layer.

Hugging Face's model on the CPU computes each prompt under an arm's rule, with an explicit mask (the
oracle), and its attention from the question to every token that it sees is kept. A chunk's first
tokens attract more than their share when they were compiled as the beginning of a text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from picbench.output import provenance
from picbench.papers.experiments.experiment_data import ExperimentData, PointArm, PointData
from picbench.papers.experiments.testbed_prompts import testbed_folder, testbed_prompts
from picbench.papers.paper_settings import AttentionExperiment, AttentionSettings

if TYPE_CHECKING:
    from picbench.engines.oracle import GivenSegment, Oracle, Rule
    from picbench.workloads.testbed.lm.pic import PromptTokens

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


def measure_attention(
    wanted: Mapping[str, AttentionExperiment],
    settings: AttentionSettings,
    paper: str,
    commit: str | None,
    say: Callable[[str], None],
) -> Iterator[ExperimentData]:
    """The data of experiments with the same settings, from one pass over their rows."""
    rows = list(_rows(settings, say))
    names = ("gpu", "torch", "transformers", "commit")
    facts = provenance.facts(*names, device="cpu", commit=commit)
    caption = (
        f"Hugging Face's model in float32 on {facts['gpu']}; torch {facts['torch']}, transformers "
        f"{facts['transformers']}; commit {facts['commit'][:7]}. testbed weights, "
        f"{settings.rows} rows of {settings.dataset}-like, attention of the question's tokens, "
        "averaged over them; chunks but the first."
    )
    conditions = {
        "caption": caption,
        "model": "testbed weights",
        "hardware": facts["gpu"],
        "commit": facts["commit"][:7],
        "repeats": "rows",
    }
    for name, experiment in wanted.items():
        by_layer = experiment.by == "layer"
        points = [
            PointData(label, number, {"requests": 1, "mean_tokens": row.tokens}, arms)
            for number, row in enumerate(rows, 1)
            for label, arms in (_layers(row) if by_layer else _places(row, settings.tokens))
        ]
        yield ExperimentData(paper, name, "cpu", experiment.varies, conditions, points)


def even_shares(attention: Attention, spans: Sequence[tuple[int, int]], tokens: int) -> Attention:
    """Attention on each of the first `tokens` of chunks, over an even share of their chunk's.

    Averaged over the chunks but the first, [layers, heads, tokens]. Chunks are `spans`, (begin,
    end), of `tokens` tokens or more.
    """
    found = []
    for begin, end in spans[1:]:
        even = attention[..., begin:end].mean(axis=-1, keepdims=True)
        found.append(attention[..., begin : begin + tokens] / even)
    return np.asarray(np.mean(found, axis=0))


def _layers(row: AttentionRow) -> Iterator[tuple[str, dict[str, PointArm]]]:
    layers = next(iter(row.arms.values())).shape[0]
    shares = {arm: even_shares(found, row.spans, SINKS) for arm, found in row.arms.items()}
    for layer in range(layers):
        yield (
            str(layer + 1),
            {arm: PointArm(_layer_metrics(found[layer])) for arm, found in shares.items()},
        )


def _layer_metrics(heads: Attention) -> dict[str, float | None]:
    """Of one layer, [heads, tokens]."""
    return {
        "first_share": round(float(heads[:, 0].mean()), 4),
        "sinks_share": round(float(heads.mean()), 4),
        "top_head_share": round(float(heads.mean(axis=1).max()), 4),
    }


def _places(row: AttentionRow, tokens: int) -> Iterator[tuple[str, dict[str, PointArm]]]:
    shares = {
        arm: even_shares(found, row.spans, tokens).mean(axis=(0, 1))
        for arm, found in row.arms.items()
    }
    for place in range(tokens):
        yield (
            str(place + 1),
            {
                arm: PointArm({"share": round(float(found[place]), 4)})
                for arm, found in shares.items()
            },
        )


def _rows(settings: AttentionSettings, say: Callable[[str], None]) -> Iterator[AttentionRow]:
    from picbench.engines.oracle import Oracle

    oracle = Oracle(testbed_folder())
    for number, prompt in enumerate(testbed_prompts(settings.dataset, settings.rows), 1):
        yield _row(oracle, prompt, settings)
        say(f"attention: {number} of {settings.rows} rows")


def _row(oracle: "Oracle", prompt: "PromptTokens", settings: AttentionSettings) -> AttentionRow:
    begin, spans = len(prompt.head), []
    for chunk in prompt.chunks:
        spans.append((begin, begin + len(chunk)))
        begin += len(chunk)
    total = begin + len(prompt.tail)
    arms = {arm: _attention(oracle, prompt, arm)[..., :begin] for arm in settings.arms}
    return AttentionRow(spans, total, arms)


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

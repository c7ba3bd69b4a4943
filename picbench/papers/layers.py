"""Attention and work inside a model, layer by layer, on rows of data sets.

Attention is Hugging Face's model's, with explicit masks (`Oracle`); work is counted from plans.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from picbench.engines.algorithms import parse, stand_ins
from picbench.engines.algorithms.epic import Epic
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.policy import Segment
from picbench.figures.picture import example_picks, planned_tokens
from picbench.papers.arm_scores import FULL, Case
from picbench.papers.data import ExperimentData, Number, PointArm, PointData, conditions
from picbench.papers.serve_arms import load_case
from picbench.papers.settings import BASE, TESTBED, RowExperiment
from picbench.run import runner
from picbench.run.measurements import Outcome, Sinks
from picbench.store import provenance
from picbench.tables.page import page, save
from picbench.tables.table import NOTHING, table
from picbench.workloads import models
from picbench.workloads.sample import Sample

if TYPE_CHECKING:
    from picbench.engines.oracle import Oracle
    from picbench.workloads.testbed.pic import PromptTokens

#: Figures of an arm, by layer or by place of a token in its chunk.
Figures = Sequence[Mapping[str, Number]]


def measure_rows(
    paper: str, name: str, experiment: RowExperiment, commit: str | None, *, counted: bool
) -> ExperimentData:
    """What the question's tokens of each row attend to or, `counted`, what every layer computes."""
    from tokenizers import Tokenizer

    from picbench.engines.oracle import Oracle
    from picbench.workloads import testbed
    from picbench.workloads.testbed.judge import tokens_of
    from picbench.workloads.testbed.prompt import Coder

    folder, settings = Path(models.resolve(BASE).path), experiment.cpu
    coder = Coder(Tokenizer.from_file(str(folder / "tokenizer.json")))
    if counted:
        config = json.loads((folder / "config.json").read_bytes())
        measured: Callable[[PromptTokens, str], Figures] = partial(count_layers, config)
    else:
        count = settings.tokens if experiment.by == "token" else None
        measured = partial(look, Oracle(folder), count)
    points = []
    for number, row in enumerate(testbed.rows(settings.dataset, count=settings.rows), 1):
        prompt = tokens_of(row, coder)
        tokens = sum(map(len, (prompt.head, *prompt.chunks, prompt.tail)))
        facts = {"requests": 1, "mean_tokens": tokens}
        figures = [measured(prompt, arm) for arm in settings.arms]
        for place, metrics in enumerate(zip(*figures, strict=True), 1):
            arms = dict(zip(settings.arms, map(PointArm, metrics), strict=True))
            points.append(PointData(str(place), number, facts, arms))
        runner.say(f"{name}: {number} of {settings.rows} rows")
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
    return ExperimentData(paper, name, "cpu", experiment.varies, about, points)


def look(oracle: "Oracle", count: int | None, prompt: "PromptTokens", arm: str) -> Figures:
    """The question's attention under an arm (`even_shares`); in full recompute chunks are text."""
    chunks = [("chunk", chunk) for chunk in prompt.chunks]
    segments = [("text", prompt.head), *chunks, ("text", prompt.tail)]
    attention, spans = attend(oracle, segments, arm)
    return even_shares(attention, spans, count)


def attend(
    oracle: "Oracle", segments: Sequence[tuple[str, Sequence[int]]], arm: str
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """What the tokens of the last segment attend to, averaged over them; where chunks are.

    [layers, heads, tokens of the prompt], under `full`, ``naive`` or ``epic``.
    """
    from picbench.engines.oracle import epic, naive

    algorithm = parse(arm)
    rule = epic(algorithm.k) if isinstance(algorithm, Epic) else naive()
    given = [("text" if arm == FULL else kind, tokens) for kind, tokens in segments]
    attention = oracle.attention(given, rule, len(segments[-1][1])).numpy()
    ends = pairwise(accumulate((len(tokens) for _, tokens in segments), initial=0))
    spans = [span for (kind, _), span in zip(segments, ends, strict=True) if kind == "chunk"]
    return attention, spans


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


def count_layers(config: Mapping[str, Any], prompt: "PromptTokens", arm: str) -> Figures:
    """Of each layer: tokens with new keys and values, tokens that leave it, 10^9 operations.

    They are those of a Llama model with the shape in its config.json, for a prompt whose chunks are
    cached. Which tokens are picked is not known; as an example they are evenly spread, which
    the number of pairs depends on and nothing else.
    """
    chunks = [Segment(tuple(chunk), chunk=True) for chunk in prompt.chunks]
    segments = [Segment(tuple(prompt.head)), *chunks, Segment(tuple(prompt.tail))]
    algorithm = parse(arm)
    layout = algorithm.layout(anchors=stand_ins(algorithm.anchor_text))
    plan = lay_out(algorithm.arrange(segments, layout), algorithm.plan_chunk, layout)
    planned = planned_tokens(plan, example_picks(plan))
    computed = [t.position for t in planned if t.compiled is None]
    tokens, pairs = len(computed), sum(position + 1 for position in computed)
    layers = [(tokens, tokens, pairs)] * config["num_hidden_layers"]
    if plan.picks is not None and plan.picks.deviation is not None:
        total = plan.end
        layers[0] = (tokens + total, tokens + total, pairs + total * (total + 1) // 2)
        layers[1] = (tokens + total, tokens, pairs)
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    # Operations of a token: query, key and value; output projection and MLP; and of a pair. A
    # multiplication and an addition of matrices are two.
    projection = 2 * hidden * (heads + 2 * groups) * size
    finish = 2 * hidden * (heads * size + 3 * config["intermediate_size"])
    figures = []
    for projected, finished, attended in layers:
        operations = projected * projection + finished * finish + attended * 4 * heads * size
        counted = {"projected": projected, "finished": finished}
        figures.append({**counted, "gigaoperations": round(operations / 1e9, 6)})
    return figures


#: The arms under which sinks are looked at.
SINK_ARMS = (FULL, "naive", "epic:k=16")


def measure_sinks(settings: Sinks) -> Outcome:
    """How much of the question's attention to chunks goes to the first token of each.

    Writes ``sinks.json`` and ``sinks.md``.
    """
    from picbench.engines.oracle import Oracle

    found, even = dict[str, dict[str, Sequence[float]]](), dict[str, float]()
    for name in settings.model:
        load = load_case(Case(name, settings.dataset), (FULL,), settings.rows)
        oracle, samples = Oracle(Path(load.model.path)), load.samples
        found[name] = {}
        for arm in SINK_ARMS:
            mean = np.mean([first_share(oracle, sample, arm) for sample in samples], axis=0)
            found[name][arm] = [round(float(share), 4) for share in mean]
            runner.say(f"{name}: {arm} on {len(samples)} rows")
        chunks = [chunk.tokens for sample in samples for chunk in sample.chunks]
        even[name] = len(chunks) / sum(map(len, chunks))
    known = provenance.facts("gpu", "torch", "transformers", "commit", commit=settings.commit)
    columns = [(name, arm) for name, arms in found.items() for arm in arms]
    shares = [found[name][arm] for name, arm in columns]
    rows = [["mean", *(f"{np.mean(share):.3f}" for share in shares)]]
    for number, layer in enumerate(zip_longest(*shares), 1):
        rows.append([str(number), *(NOTHING if s is None else f"{s:.3f}" for s in layer)])
    evenly = ", ".join(f"{share:.3f} on {name}" for name, share in even.items())
    about = (
        f"Hugging Face's model in float32 with explicit masks; {known['gpu']}, torch "
        f"{known['torch']}, transformers {known['transformers']}, commit {known['commit'][:7]}. "
        f"{len(samples)} bundled rows of {settings.dataset}; attention of the tokens after the "
        f"chunks, averaged over tokens, heads and rows. An even share would be {evenly}."
    )
    title = "How much of the attention to chunks their first tokens draw, by layer"
    made = page(title, about, table(("layer", *(f"{n}, `{a}`" for n, a in columns)), rows, right=1))
    document = {"schema": 1, "provenance": known, "rows": len(samples), "even": even}
    save(settings.output / "sinks", document | {"shares": found}, made)
    return Outcome(made)


def first_share(oracle: "Oracle", sample: Sample, arm: str) -> np.ndarray:
    """The share of the first tokens of chunks in the attention to chunks, [layers]."""
    segments = [(part.kind, part.tokens) for part in sample.segments]
    attention, spans = attend(oracle, segments, arm)
    first = sum(attention[..., begin] for begin, _ in spans)
    whole = sum(attention[..., begin:end].sum(axis=-1) for begin, end in spans)
    return np.asarray((first / whole).mean(axis=1))

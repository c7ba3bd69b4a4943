"""Attention and work by layer: shares of chunks, operations of arms, and the sinks of models."""

import json
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from picbench.engines import oracle
from picbench.papers.arm_scores import Case
from picbench.papers.data import ExperimentData
from picbench.papers.layers import count_layers, even_shares, measure_rows, measure_sinks
from picbench.papers.serve_arms import load_case
from picbench.papers.settings import RowExperiment, RowSettings
from picbench.run.measurements import Sinks
from picbench.workloads.testbed.pic import PromptTokens


class Looks:
    """Attends to the first token of each chunk five times as much, unless chunks are text."""

    def __init__(self, folder: object) -> None:
        self.calls: list[str] = []

    def attention(
        self, segments: list[tuple[str, list[int]]], rule: object, asking: int
    ) -> torch.Tensor:
        self.calls.append(segments[1][0])
        lengths = [len(tokens) for _, tokens in segments]
        assert asking == lengths[-1]
        found = np.ones((3, 2, sum(lengths)))
        starts = accumulate(lengths[:-1], initial=0)
        for start, (kind, _) in zip(starts, segments, strict=True):
            found[..., start] = 5.0 if kind == "chunk" else 1.0
        return torch.from_numpy(found)


#: 16 tokens of text, two chunks of 32, a question of 8.
PROMPT = PromptTokens(
    [*range(100, 116)], [[*range(200, 232)], [*range(300, 332)]], [*range(400, 408)]
)

#: Pairs of the text's and the question's tokens.
_TEXT_PAIRS = 16 * 17 // 2 + sum(range(81, 89))

#: A model of which all operations are those of pairs: a billion each.
PAIRS = {
    **{"hidden_size": 0, "intermediate_size": 0, "head_dim": 1},
    **{"num_attention_heads": 250_000_000, "num_key_value_heads": 1},
}


def counted(arm: str, layers: int, **shape: int) -> list[tuple[object, ...]]:
    found = count_layers({**PAIRS, "num_hidden_layers": layers, **shape}, PROMPT, arm)
    return [tuple(layer.values()) for layer in found]


@pytest.mark.parametrize(
    ("arm", "tokens", "pairs"),
    [
        ("full", 88, 88 * 89 // 2),
        ("naive", 24, _TEXT_PAIRS),
        ("epic:k=16", 24 + 16, _TEXT_PAIRS + sum(range(49, 65))),
    ],
)
def test_static_arms_compute_the_same_in_every_layer(arm: str, tokens: int, pairs: int) -> None:
    assert counted(arm, 3) == [(tokens, tokens, pairs)] * 3
    shape = {"hidden_size": 8_000, "intermediate_size": 16, "head_dim": 4}
    [(*_, operations)] = counted(arm, 1, **shape, num_attention_heads=2)
    token = 2 * 8_000 * (2 + 2) * 4 + 2 * 8_000 * (2 * 4 + 3 * 16)
    assert operations == round((tokens * token + pairs * 4 * 2 * 4) / 1e9, 6)


def test_cacheblend_computes_all_tokens_first() -> None:
    first, check, *later = counted("cacheblend:r=0.25", 4)
    picked, pairs = 16, later[0][2]
    assert isinstance(pairs, float)
    assert later == [(24 + picked, 24 + picked, pairs)] * 2
    assert first == (24 + picked + 88, 24 + picked + 88, pairs + 88 * 89 // 2)
    assert check == (24 + picked + 88, 24 + picked, pairs)


def mean(data: ExperimentData, label: str, arm: str, metric: str) -> float:
    return fmean(data.values(label, arm, metric).values())


def test_rows_are_repeats() -> None:
    settings = RowSettings(dataset="musique", rows=2, arms=["full", "cacheblend:r=0.15"])
    experiment = RowExperiment(varies="layer", cpu=settings)
    data = measure_rows("epic", "layers", experiment, "abc", counted=True)
    assert data.labels == [str(layer) for layer in range(1, 9)]
    assert data.repeats == "rows"
    assert data.seeds == [1, 2]
    first, last = (mean(data, at, "cacheblend:r=0.15", "gigaoperations") for at in "18")
    assert first > mean(data, "1", "full", "gigaoperations") > last


VIEWS = RowSettings(dataset="musique", rows=2, arms=["full", "epic:k=16"], tokens=6)


def test_shares_are_those_of_chunks_but_the_first() -> None:
    attention = np.full((1, 1, 30), 0.01)
    attention[0, 0, 5] = 1.0
    attention[0, 0, 15] = 0.11
    spans = [(5, 15), (15, 25)]
    shares = [figures["share"] for figures in even_shares(attention, spans, 4)]
    assert shares == pytest.approx([5.5, 0.5, 0.5, 0.5])
    [layer] = even_shares(attention, spans, None)
    assert layer == {"first_share": 5.5, "sinks_share": 1.75, "top_head_share": 1.75}


def test_attention_is_seen_by_layer_and_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(None)
    monkeypatch.setattr(oracle, "Oracle", lambda folder: looks)
    sinks, places = (
        measure_rows(
            "epic", "views", RowExperiment(varies=by, by=by, cpu=VIEWS), "abc", counted=False
        )
        for by in ("layer", "token")
    )
    assert looks.calls == ["text", "chunk"] * 4
    assert sinks.labels == ["1", "2", "3"]
    assert places.labels == ["1", "2", "3", "4", "5", "6"]
    assert places.seeds == [1, 2]
    assert mean(places, "1", "full", "share") == 1.0
    first, second = (mean(places, label, "epic:k=16", "share") for label in "12")
    assert first == pytest.approx(5 * second, rel=1e-3)
    top = mean(sinks, "2", "epic:k=16", "top_head_share")
    assert top == pytest.approx(sum((first, 3 * second)) / 4, rel=1e-3)
    assert sinks.repeats == "rows"


def test_first_tokens_of_chunks_draw_attention_where_they_are_compiled_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(oracle, "Oracle", Looks)
    outcome = measure_sinks(Sinks(model=("testbed",), rows=2, output=tmp_path, commit="abc"))
    samples = load_case(Case("testbed", "musique"), ("full",), 2).samples
    chunks = [(len(s.chunks), sum(len(chunk.tokens) for chunk in s.chunks)) for s in samples]
    alone = fmean(5 * count / (tokens + 4 * count) for count, tokens in chunks)
    shares = json.loads((tmp_path / "sinks.json").read_text())["shares"]["testbed"]
    assert shares["naive"] == pytest.approx([alone] * 3, abs=1e-4)
    assert shares["full"] == pytest.approx([fmean(n / t for n, t in chunks)] * 3, abs=1e-4)
    assert f"| mean | {shares['full'][0]:.3f} | {alone:.3f} |" in outcome.page
    assert (tmp_path / "sinks.md").read_text() == outcome.page

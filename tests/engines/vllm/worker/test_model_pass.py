"""What is measured of a question's attention, with keys cached as on a GPU and as on a CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from picbench.engines.vllm.worker import model_pass
from picbench.engines.vllm.worker.model_pass import CachedTokens, QuestionAttention
from picbench.kernels.rope import RopeTable, rotate

HEADS, KV_HEADS, SIZE, LAYERS = 4, 2, 8, 3
#: Positions of chunk tokens, where they were compiled, and of the tokens that are computed.
CHUNK = torch.tensor([3, 4, 5, 6, 9, 10])
COMPILED = torch.tensor([0, 1, 2, 3, 7, 8])
OWN = torch.tensor([0, 1, 2, 7, 8, 11, 12])
QUESTION = 11


@pytest.fixture
def rope() -> RopeTable:
    angles = torch.arange(32).unsqueeze(1) / 100 ** (torch.arange(SIZE // 2) / (SIZE // 2))
    return RopeTable(torch.cat([angles.cos(), angles.sin()], dim=-1), SIZE)


class Projections:
    """Queries, keys and values [positions, heads, size] of a layer, none of them with RoPE."""

    def __init__(self, layer: int) -> None:
        noise = torch.Generator().manual_seed(layer)
        heads = (HEADS, KV_HEADS, KV_HEADS)
        self.q, self.k, self.v = (torch.randn(16, n, SIZE, generator=noise) for n in heads)


class FakePass:
    """A model whose layers have projections by position, and whose cache has one slot a token."""

    def __init__(self, rope: RopeTable, tokens: int, *, bare: bool) -> None:
        self.rope, self.tokens, self.bare = rope, tokens, bare
        self.layers = [Projections(i) for i in range(LAYERS)]
        self.attentions = [self.attention(p) for p in self.layers]
        self.attended: list[list[Tensor]] = [[] for _ in self.layers]
        self.sizes: list[int] = []

    def attention(self, layer: Projections) -> Any:
        keys = layer.k[CHUNK] if self.bare else self.rotated(layer.k[CHUNK], COMPILED)
        return SimpleNamespace(
            kv_cache=torch.stack([keys, layer.v[CHUNK]]),
            impl=SimpleNamespace(scale=0.5),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_size=SIZE,
        )

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, self.rope.shift_rows(positions), is_neox=True)

    def run(self, tokens: Tensor, positions: Tensor, stand_ins: list[nn.Module]) -> None:
        assert torch.equal(tokens, positions + 100)
        self.sizes.append(len(tokens))
        for layer, stand_in, out in zip(self.layers, stand_ins, self.attended, strict=True):
            query = self.rotated(layer.q[positions], positions)
            key = layer.k[positions] if self.bare else self.rotated(layer.k[positions], positions)
            out.append(stand_in(query.flatten(1), key.flatten(1), layer.v[positions].flatten(1)))


def read(kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    return kv_cache[0, slots], kv_cache[1, slots]


def plain(model: FakePass, layer: Projections) -> tuple[Tensor, Tensor]:
    """Attention [own, heads, size] and weights [heads, own, all], one query and head at a time."""
    at = torch.cat([CHUNK, OWN])
    weights = torch.zeros(HEADS, len(OWN), len(at))
    attended = torch.zeros(len(OWN), HEADS, SIZE)
    query, keys = model.rotated(layer.q[OWN], OWN), model.rotated(layer.k[at], at)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        for i, position in enumerate(OWN):
            seen = (at <= position).nonzero().flatten()
            found = (keys[seen, kv_head] @ query[i, head] * 0.5).softmax(0)
            weights[head, i, seen] = found
            attended[i, head] = found @ layer.v[at[seen], kv_head]
    return attended, weights


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("tokens", [2, 100])
@pytest.mark.parametrize("scores", [1, 1 << 20])
def test_the_question_is_summed_over_tokens_heads_and_layers(
    rope: RopeTable, monkeypatch: pytest.MonkeyPatch, bare: bool, tokens: int, scores: int
) -> None:
    """Whatever is computed at a time, and whether keys are cached with RoPE."""
    monkeypatch.setattr(model_pass, "SCORES", scores)
    model = FakePass(rope, tokens, bare=bare)
    question = QuestionAttention(model, read)  # type: ignore[arg-type]
    before = [attention.kv_cache.clone() for attention in model.attentions]
    cached = CachedTokens(torch.arange(len(CHUNK)), CHUNK, COMPILED)
    mass = question.run(OWN + 100, OWN, cached, QUESTION)
    expected = torch.zeros(len(CHUNK))
    for layer, parts in zip(model.layers, model.attended, strict=True):
        attended, weights = plain(model, layer)
        torch.testing.assert_close(torch.cat(parts), attended.flatten(1))
        expected += weights[:, OWN >= QUESTION, : len(CHUNK)].sum((0, 1))
    torch.testing.assert_close(mass, expected)
    assert max(model.sizes) <= tokens
    for attention, kv_cache in zip(model.attentions, before, strict=True):
        assert torch.equal(attention.kv_cache, kv_cache)

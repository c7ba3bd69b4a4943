"""The oracle against the textbook form of PIC, which needs no mask and no expanded sequence.

Every chunk is compiled alone at position 0. Its keys are re-rotated to the position of the chunk in
the prompt and spliced, token by token, into the cache of one request that runs from left to right.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from picbench.engines.oracle import Oracle, OracleSegment, Rule, naive

#: Token ids of a piece, and the offsets to link; None for text.
Segment = tuple[list[int], set[int] | None]

Layers = list[tuple[torch.Tensor, torch.Tensor]]


class SplicedCache:
    """One request whose KV cache is filled from left to right."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.logits = torch.empty(0)

    def compute(self, token: int) -> None:
        output = self.model(torch.tensor([[token]]), past_key_values=self.cache)
        self.logits = output.logits[0, -1]

    def splice(self, layers: Layers, offset: int) -> None:
        shift = self.cache.get_seq_length() - offset
        for index, (keys, values) in enumerate(layers):
            key = self.rotate(keys[:, :, offset : offset + 1], shift)
            self.cache.update(key, values[:, :, offset : offset + 1], index)

    def rotate(self, keys: torch.Tensor, shift: int) -> torch.Tensor:
        cos, sin = self.model.model.rotary_emb(keys, torch.tensor([[shift]]))
        rotated: torch.Tensor = apply_rotary_pos_emb(keys, keys, cos, sin)[0]
        return rotated

    def compiled(self, tokens: Sequence[int]) -> Layers:
        cache = self.model(torch.tensor([tokens]), use_cache=True).past_key_values
        return [(layer.keys, layer.values) for layer in cache.layers]


@torch.inference_mode()
def spliced_logprobs(
    model: LlamaForCausalLM, segments: Sequence[Segment], anchor: list[int], continuation: list[int]
) -> torch.Tensor:
    request = SplicedCache(model)
    for tokens, links in segments:
        layers = [] if links is None else request.compiled([*anchor, *tokens])
        for offset, token in enumerate(tokens):
            if links is None or offset in links:
                request.compute(token)
            else:
                request.splice(layers, len(anchor) + offset)
    steps = [request.logits]
    for token in continuation[:-1]:
        request.compute(token)
        steps.append(request.logits)
    return torch.stack(steps).log_softmax(-1)


def rule_of(segments: Sequence[Segment], anchor: list[int]) -> Rule:
    chunks = [links for _, links in segments if links is not None]
    return replace(naive(), links=lambda index, _: chunks[index], anchor=lambda _: anchor)


tokens = st.lists(st.integers(3, 1023), min_size=1, max_size=12)
texts = tokens.map(lambda ids: (ids, None))
chunks = tokens.flatmap(lambda ids: st.tuples(st.just(ids), st.sets(st.integers(0, len(ids) - 1))))


@pytest.mark.parametrize("name", ["oracle", "oracle3"])
@given(
    segments=st.lists(texts | chunks, max_size=4),
    question=texts,
    anchor=st.lists(st.integers(3, 1023), max_size=4),
)
@settings(max_examples=15, deadline=None)
def test_expanded_sequence_equals_spliced_cache(
    name: str,
    request: pytest.FixtureRequest,
    segments: list[Segment],
    question: Segment,
    anchor: list[int],
) -> None:
    oracle: Oracle = request.getfixturevalue(name)
    prompt = [*segments, question]
    segments: list[OracleSegment] = [
        ("text" if links is None else "chunk", ids) for ids, links in prompt
    ]
    continuation = [5, 6, 7]
    expected = spliced_logprobs(oracle.model, prompt, anchor, continuation)
    actual = oracle.logprobs(segments, rule_of(prompt, anchor), continuation)
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=0)

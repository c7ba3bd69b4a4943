"""Requests whose answer is known without the oracle's mask."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from picbench.engines.oracle import (
    ExpandedRow,
    Oracle,
    OracleSegment,
    Rule,
    epic,
    epic_zero,
    expand,
    full,
    mepic,
    naive,
    visible,
)

TOLERANCE = 1e-3
APART = 0.1

PARTIAL = [naive(), epic(1), epic_zero(bos=1), mepic()]


@pytest.fixture(scope="module")
def prompt(draw: Any) -> list[OracleSegment]:
    """System text, chunks A, B, A and a question."""
    a, b = draw(40, 1), draw(17, 2)
    return [("text", draw(9, 3)), ("chunk", a), ("chunk", b), ("chunk", a), ("text", draw(5, 4))]


def flat(segments: list[OracleSegment]) -> list[int]:
    return [token for _, tokens in segments for token in tokens]


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@torch.inference_mode()
def plain(model: LlamaForCausalLM, tokens: list[int], steps: int) -> torch.Tensor:
    """The model's own causal forward: log-probabilities of the last `steps` predictions."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits[-steps:].log_softmax(-1)


@pytest.mark.parametrize("name", ["oracle", "oracle3"])
def test_full_is_the_models_own_forward(
    name: str, request: pytest.FixtureRequest, prompt: list[OracleSegment]
) -> None:
    oracle: Oracle = request.getfixturevalue(name)
    expected = plain(oracle.model, [*flat(prompt), 7, 8], steps=3)
    assert gap(oracle.logprobs(prompt, full(), [7, 8, 9]), expected) < TOLERANCE


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_model_honours_mask_and_positions(llama: Path, draw: Any, implementation: str) -> None:
    """With the first half masked, the second half answers as if alone."""
    model = LlamaForCausalLM.from_pretrained(llama, attn_implementation=implementation)
    tokens = draw(20, 5)
    hidden = torch.ones(20, 20).triu(1).bool()
    hidden[10:, :10] = True
    bias = torch.zeros(20, 20).masked_fill(hidden, float("-inf"))
    positions = torch.tensor([[*range(10), *range(100, 110)]])
    with torch.inference_mode():
        logits = model(
            torch.tensor([tokens]), attention_mask=bias[None, None], position_ids=positions
        ).logits[0, 10:]
    assert gap(logits.log_softmax(-1), plain(model, list(tokens[10:]), 10)) < TOLERANCE


@pytest.mark.parametrize("rule", PARTIAL)
def test_partial_recompute_is_told_from_full(
    oracle: Oracle, prompt: list[OracleSegment], rule: Rule
) -> None:
    expected = oracle.logprobs(prompt, full(), [7, 8])
    assert gap(oracle.logprobs(prompt, rule, [7, 8]), expected) > APART


def test_no_two_rules_answer_alike(oracle: Oracle, draw: Any) -> None:
    chunks: list[OracleSegment] = [("chunk", draw(count, count)) for count in (81, 35, 150)]
    prompt: list[OracleSegment] = [("text", draw(21, 1)), *chunks, ("text", draw(19, 2))]
    rules = [full(), naive(), naive().anchored(), *map(epic, (1, 2, 4, 8, 16, 32, 64)), mepic()]
    rules += [epic_zero(bos=1), naive().padded(0), epic(16).padded(0), mepic().padded(0)]
    answers = [oracle.logprobs(prompt, rule, [7, 8]) for rule in rules]
    assert min(gap(a, b) for a, b in combinations(answers, 2)) > 10 * TOLERANCE


@pytest.mark.parametrize("rule", [epic(64), mepic()])
def test_linking_whole_chunks_is_full(oracle: Oracle, draw: Any, rule: Rule) -> None:
    """The first chunk leads the prompt, so leaving it alone changes nothing."""
    chunks: list[OracleSegment] = [("chunk", draw(16, seed)) for seed in range(3)]
    prompt: list[OracleSegment] = [*chunks, ("text", draw(5, 4))]
    expected = oracle.logprobs(prompt, full(), [7, 8])
    assert gap(oracle.logprobs(prompt, rule, [7, 8]), expected) < TOLERANCE


@pytest.mark.parametrize("rule", [naive(), epic(4), mepic()])
def test_one_leading_chunk_is_full(oracle: Oracle, draw: Any, rule: Rule) -> None:
    prompt: list[OracleSegment] = [("chunk", draw(30, 1)), ("text", draw(5, 4))]
    expected = oracle.logprobs(prompt, full(), [7, 8])
    assert gap(oracle.logprobs(prompt, rule, [7, 8]), expected) < TOLERANCE


def test_one_anchored_chunk_is_full(oracle: Oracle, prompt: list[OracleSegment]) -> None:
    single = [*prompt[:2], prompt[-1]]
    expected = oracle.logprobs(single, full(), [7, 8])
    assert gap(oracle.logprobs(single, naive().anchored(), [7, 8]), expected) < TOLERANCE
    assert gap(oracle.logprobs(single, naive(), [7, 8]), expected) > APART


def test_paper_pads_are_tokens_of_the_prompt(oracle: Oracle, draw: Any) -> None:
    system, chunk, question = draw(9, 1), draw(17, 2), draw(5, 3)
    prompt: list[OracleSegment] = [("text", system), ("chunk", chunk), ("text", question)]
    tokens = [*system, *[0] * 7, *[0] * 15, *chunk, *question]
    assert gap(oracle.logprobs(prompt, full().padded(0), [7]), plain(oracle.model, tokens, 1)) < (
        TOLERANCE
    )


def test_chunk_order_changes_the_answer_but_no_canonical_row(oracle: Oracle, draw: Any) -> None:
    a: OracleSegment = ("chunk", draw(20, 1))
    b: OracleSegment = ("chunk", draw(33, 2))
    question: OracleSegment = ("text", draw(5, 3))
    forth = oracle.logits(expand([a, b, question], (), naive()))
    back = oracle.logits(expand([b, a, question], (), naive()))
    assert gap(forth[:53], torch.cat([back[33:53], back[:33]])) < TOLERANCE
    assert gap(forth[-1], back[-1]) > APART


@pytest.mark.parametrize("name", ["oracle", "oracle3"])
def test_canonical_rows_do_not_depend_on_position(
    name: str, request: pytest.FixtureRequest, draw: Any
) -> None:
    oracle: Oracle = request.getfixturevalue(name)
    chunk: OracleSegment = ("chunk", draw(20, 1))
    near = oracle.logits(expand([chunk, ("text", [5])], (), naive()))
    far = oracle.logits(expand([("text", draw(300, 2)), chunk, ("text", [5])], (), naive()))
    assert gap(near[:20], far[:20]) < TOLERANCE


def test_rope_scaling_reaches_the_oracle(llama3: Path, oracle3: Oracle, draw: Any) -> None:
    default = {"rope_type": "default", "rope_theta": 500_000.0}
    unscaled = LlamaForCausalLM.from_pretrained(llama3, rope_parameters=default)
    tokens = draw(300, 1)
    scaled = oracle3.logprobs([("text", tokens)], full(), [7])
    assert gap(scaled, plain(unscaled, list(tokens), 1)) > APART


ABC: list[OracleSegment] = [("text", [1]), ("chunk", [2, 3]), ("chunk", [4, 5]), ("text", [6])]


def request_rows(segments: list[OracleSegment], rule: Rule) -> list[tuple[int, int]]:
    rows = expand(segments, (), rule)
    return [(row.token, row.position) for row in rows if row.compiled is None]


def reused_rows(segments: list[OracleSegment], rule: Rule) -> list[tuple[int, int]]:
    rows = expand(segments, (), rule)
    return [(row.token, row.position) for row in rows if row.compiled is not None and row.reused]


def test_rows_of_a_linked_request() -> None:
    assert expand(ABC, [7, 8], epic(1)) == [
        ExpandedRow(2, 1, compiled=0),
        ExpandedRow(3, 2, compiled=0),
        ExpandedRow(4, 3, compiled=1, reused=False),
        ExpandedRow(5, 4, compiled=1),
        ExpandedRow(1, 0),
        ExpandedRow(4, 3),
        ExpandedRow(6, 5),
        ExpandedRow(7, 6),
        ExpandedRow(8, 7),
    ]


def test_mask_of_a_linked_request() -> None:
    expected = [
        # 2  3  4' 5  1  4  6   (4' is replaced by 4)
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],
        [1, 1, 0, 1, 1, 1, 1],
    ]
    assert torch.equal(visible(expand(ABC, (), epic(1))), torch.tensor(expected).bool())


def test_mask_of_an_anchored_request() -> None:
    rows = expand(
        [("text", [1]), ("chunk", [2]), ("chunk", [3]), ("text", [4])], (), naive().anchored()
    )
    expected = [
        # 1' 2  1" 3  1  4   (1' and 1" anchor the chunks after them)
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 1, 0, 1, 1, 1],
    ]
    assert torch.equal(visible(rows), torch.tensor(expected).bool())
    assert [row.position for row in rows] == [1, 2, 2, 3, 1, 4]


def test_mask_of_chunks_in_documents() -> None:
    """Each chunk is compiled after the anchor and then its own document, which is longer."""
    rule = naive().anchored().within([(), (8, 9)])
    rows = expand([("text", [1]), ("chunk", [2]), ("chunk", [3]), ("text", [4])], (), rule)
    expected = [
        # 1' 2  1" 8" 9" 3  1  4
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0],
        [0, 1, 0, 0, 0, 1, 1, 1],
    ]
    assert torch.equal(visible(rows), torch.tensor(expected).bool())
    assert [row.token for row in rows] == [1, 2, 1, 8, 9, 3, 1, 4]
    assert [row.position for row in rows] == [3, 4, 2, 3, 4, 5, 3, 6]


def test_anchor_of_a_leading_chunk_starts_at_zero() -> None:
    rows = expand([("chunk", [5, 6]), ("text", [7])], (), epic_zero(bos=1))
    assert rows[:4] == [ExpandedRow(1, position, 0, reused=False) for position in range(4)]
    compiled = [ExpandedRow(5, 4, 0, reused=False), ExpandedRow(6, 5, 0)]
    assert rows[4:] == [*compiled, ExpandedRow(5, 4), ExpandedRow(7, 6)]


def test_paper_pads_take_positions_and_are_seen() -> None:
    segments: list[OracleSegment] = [
        ("text", [1]),
        ("chunk", [2] * 15),
        ("text", [3]),
        ("text", [4, 5]),
    ]
    rule = mepic().padded(0)
    assert reused_rows(segments, rule) == []
    assert request_rows(segments, rule) == [
        *((1, 0), *((0, i) for i in range(1, 16))),
        *((0, 16), *((2, i) for i in range(17, 32))),
        *((3, 32), (4, 33), (5, 34)),
    ]


def test_paper_pads_end_a_text_between_chunks_but_not_the_prompt() -> None:
    segments: list[OracleSegment] = [("chunk", [2] * 16), ("text", [3]), ("chunk", [4] * 17)]
    rows = expand(segments, (), naive().padded(0))
    assert [row.token for row in rows if row.compiled == 1] == [0] * 15 + [4] * 17
    assert request_rows(segments, naive().padded(0))[:2] == [(3, 16), (0, 17)]
    assert request_rows(segments, naive().padded(0))[-1] == (4, 63)


def test_anchor_under_paper_pads_is_the_padded_text() -> None:
    rows = expand([("text", [1]), ("chunk", [2] * 16)], (), naive().anchored().padded(0))
    assert [row.token for row in rows[:17]] == [1] + [0] * 15 + [2]


def test_question_may_be_empty() -> None:
    segments: list[OracleSegment] = [("chunk", [2, 3]), ("chunk", [4, 5]), ("text", [])]
    assert request_rows(segments, naive()) == [(5, 3)]
    assert reused_rows(segments, naive()) == [(2, 0), (3, 1), (4, 2)]


@pytest.mark.parametrize("rule", [full(), naive(), epic(1), mepic()])
def test_split_text_is_one_text(rule: Rule) -> None:
    split: list[OracleSegment] = [
        ("text", [1]),
        ("text", [2]),
        ("chunk", [3]),
        ("text", []),
        ("text", [4]),
    ]
    whole: list[OracleSegment] = [("text", [1, 2]), ("chunk", [3]), ("text", [4])]
    assert expand(split, [5], rule.padded(0)) == expand(whole, [5], rule.padded(0))


def test_repeated_chunk_is_compiled_twice() -> None:
    rows = expand([("chunk", [2, 3]), ("chunk", [2, 3]), ("text", [4])], (), naive())
    assert [row.compiled for row in rows] == [0, 0, 1, 1, None]


@pytest.mark.parametrize(
    ("rule", "linked"),
    [
        (full(), (20, 20)),
        (naive(), (0, 0)),
        (epic(1), (0, 1)),
        (epic(64), (0, 20)),
        (epic_zero(bos=1), (0, 0)),
        (mepic(), (16, 16)),
    ],
)
def test_linked_tokens_of_each_algorithm(rule: Rule, linked: tuple[int, int]) -> None:
    assert tuple(len(rule.links(index, 20)) for index in (0, 1)) == linked
    assert tuple(rule.links(1, 20)) == tuple(range(linked[1]))


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
    for place, (tokens, links) in enumerate(segments):
        layers = [] if links is None else request.compiled([*anchor, *tokens])
        for offset, token in enumerate(tokens):
            begins = anchor and place == offset == 0
            if links is None or offset in links or begins:
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

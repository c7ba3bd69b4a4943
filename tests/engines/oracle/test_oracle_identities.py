"""Requests whose answer is known without the oracle's mask."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from picbench.engines.oracle import (
    Oracle,
    OracleSegment,
    Rule,
    epic,
    epic_zero,
    expand,
    full,
    mepic,
    naive,
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

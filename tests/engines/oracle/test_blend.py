"""CacheBlend in the oracle, against forward passes without any mask."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from picbench.engines.oracle import Blend, GivenSegment, Oracle, full, naive
from picbench.engines.oracle.picked import BlendedRows

TOLERANCE = 1e-3
APART = 0.1


@pytest.fixture(scope="module")
def prompt(draw: Any) -> list[GivenSegment]:
    """System text, two chunks, text between them, and a question."""
    texts = [("text", draw(count, count)) for count in (9, 4, 5)]
    return [texts[0], ("chunk", draw(40, 1)), texts[1], ("chunk", draw(17, 2)), texts[2]]  # type: ignore[list-item]


@torch.inference_mode()
def check_layer(oracle: Oracle, tokens: Any, of: str, start: int = 0) -> torch.Tensor:
    """Keys or values [tokens, heads, size] of the second layer, by a plain forward pass."""
    positions = torch.arange(start, start + len(tokens))[None]
    out = oracle.model(torch.tensor([tokens]), position_ids=positions, use_cache=True)
    layer = out.past_key_values.layers[1]
    kv: torch.Tensor = (layer.keys if of == "k" else layer.values)[0]
    return kv.transpose(0, 1)


@pytest.mark.parametrize("name", ["oracle", "oracle3"])
@pytest.mark.parametrize("of", ["v", "k"])
def test_picks_are_the_largest_differences_of_two_plain_passes(
    name: str, of: Any, request: pytest.FixtureRequest, prompt: list[GivenSegment]
) -> None:
    oracle: Oracle = request.getfixturevalue(name)
    whole = check_layer(oracle, [t for _, tokens in prompt for t in tokens], of)
    differences: dict[int, float] = {}
    start = 0
    for kind, tokens in prompt:
        if kind == "chunk":
            alone = check_layer(oracle, tokens, of, start)
            found = (whole[start : start + len(tokens)] - alone).square().sum((1, 2))
            differences |= {start + i: float(d) for i, d in enumerate(found)}
        start += len(tokens)
    largest = sorted(differences, key=lambda p: -differences[p])
    assert oracle.picked(prompt, Blend(0.2, of)) == set(largest[:11])
    assert oracle.picked(prompt, Blend(0, of)) == set()


def test_limits(oracle: Oracle, prompt: list[GivenSegment]) -> None:
    """All picked: full recompute. None picked: neither that nor naive."""
    every, none, wholly, bare = (
        oracle.logprobs(prompt, rule, [7, 8]) for rule in (Blend(1), Blend(0), full(), naive())
    )
    assert float((every - wholly).abs().max()) < TOLERANCE
    assert float((none - wholly).abs().max()) > APART
    assert float((none - bare).abs().max()) > APART


def test_replayed_picks_are_used(oracle: Oracle, prompt: list[GivenSegment]) -> None:
    blend = Blend(0.2)
    picked = oracle.picked(prompt, blend)
    own = oracle.logprobs(prompt, blend, [7])
    assert torch.equal(oracle.logprobs(prompt, replace(blend, picked=picked), [7]), own)
    others = set(range(9, 20))
    assert (
        float((oracle.logprobs(prompt, replace(blend, picked=others), [7]) - own).abs().max())
        > APART
    )


def test_no_row_is_without_a_key_in_any_layer(prompt: list[GivenSegment]) -> None:
    """A softmax over nothing would spread to other rows."""
    rows = BlendedRows.of(prompt, (), Blend(0.2))
    later = rows.later({10, 60})
    seen = {row.position for row in later if row.compiled is not None and row.reused}
    own = {row.position for row in later if row.compiled is None and row.reused}
    assert seen | own == set(range(75))
    assert not seen & own
    assert {10, 60} <= own

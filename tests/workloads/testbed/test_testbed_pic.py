"""What the arms of the testbed's own evaluation compute."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from picbench.workloads.testbed.judge import generate, with_chunks_of
from picbench.workloads.testbed.llama import Llama, LlamaShape
from picbench.workloads.testbed.pic import (
    ARMS,
    FULL,
    KVLINK,
    MEPIC,
    NAIVE,
    PromptTokens,
    ReuseArm,
    collate,
    expand,
    visible,
)

SHAPE = LlamaShape(50, width=32, layers=2, heads=2, kv_heads=1, head_size=16, inner=32)
TOKENS = PromptTokens([1, 2], [[3, 4, 5], [6, 7, 8, 9]], [10, 11])
LINKS = [40, 41, 42, 43, 44]


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(0)
    made = Llama(SHAPE)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return made.eval()


def last(model: Llama, tokens: PromptTokens, arm: ReuseArm) -> Tensor:
    """The logits after the prompt."""
    layout = collate([expand(tokens, arm, LINKS)])
    with torch.no_grad():
        hidden, _ = model(layout.ids, layout.positions, visible(layout, arm.anchored))
        return model.logits(hidden)[0, -1]


def plainly(model: Llama, tokens: PromptTokens) -> Tensor:
    ids = torch.tensor([[*tokens.head, *(t for c in tokens.chunks for t in c), *tokens.tail]])
    with torch.no_grad():
        return model.logits(model(ids, torch.arange(ids.shape[1])[None])[0])[0, -1]


def seen(arm: ReuseArm) -> dict[tuple[int, int], set[int]]:
    """For every slot, by token and place, the positions of the slots that it sees."""
    slots = expand(TOKENS, arm, LINKS)
    mask = visible(collate([slots]), arm.anchored)[0, 0]
    return {
        (token, number): {slots.positions[k] for k in mask[number].nonzero().flatten().tolist()}
        for number, token in enumerate(slots.ids)
    }


def test_full_is_plain_causal_attention(model: Llama) -> None:
    torch.testing.assert_close(last(model, TOKENS, FULL), plainly(model, TOKENS))


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_linking_whole_chunks_equals_full(model: Llama, data: st.DataObject) -> None:
    token = st.integers(0, 49)
    chunks = data.draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=4))
    tokens = PromptTokens([1, 2], chunks, [3, 4])
    every = ReuseArm("all", link=6)
    torch.testing.assert_close(
        last(model, tokens, every), plainly(model, tokens), rtol=1e-3, atol=1e-3
    )


def test_naive_chunks_see_only_themselves() -> None:
    found = seen(NAIVE)
    assert found[3, 2] == {2}
    assert found[5, 4] == {2, 3, 4}
    assert found[9, 8] == {5, 6, 7, 8}
    assert found[11, 10] == set(range(11))


def test_anchored_chunks_see_the_head_too() -> None:
    found = seen(ReuseArm("anchored", anchored=True))
    assert found[3, 2] == {0, 1, 2}
    assert found[6, 5] == {0, 1, 5}


def test_epic_links_the_first_tokens_of_all_chunks_but_the_first() -> None:
    slots = expand(TOKENS, ReuseArm("epic-2", link=2, spare_first=True))
    assert slots.ids == [1, 2, 3, 4, 5, 6, 7, 8, 9, 6, 7, 10, 11]
    assert slots.positions == [0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 9, 10]
    assert [i for i, hidden in enumerate(slots.hidden) if hidden] == [5, 6]
    assert seen(ReuseArm("epic-2", link=2, spare_first=True))[7, 10] == set(range(7))


def test_mepic_links_the_first_chunk_too() -> None:
    slots = expand(TOKENS, replace(MEPIC, link=1))
    assert [i for i, hidden in enumerate(slots.hidden) if hidden] == [2, 5]


def test_every_position_is_visible_once_behind_the_prompt() -> None:
    for arm in (*ARMS, KVLINK):
        slots = expand(TOKENS, arm, LINKS)
        mask = visible(collate([slots]), arm.anchored)[0, 0, -1]
        positions = [slots.positions[k] for k in mask.nonzero().flatten().tolist()]
        assert sorted(positions) == list(range(max(slots.positions) + 1)), arm.name


def test_link_tokens_follow_every_chunk_and_see_all_before() -> None:
    slots = expand(TOKENS, KVLINK, LINKS)
    assert [p for t, p in zip(slots.ids, slots.positions, strict=True) if t == 40] == [5, 14]
    assert seen(KVLINK)[41, slots.ids.index(41)] == set(range(7))
    # Canonical tokens of the next chunk do not see them.
    assert seen(KVLINK)[6, 5] == {10}


def test_arms_differ(model: Llama) -> None:
    found = [last(model, TOKENS, arm) for arm in (FULL, NAIVE, ReuseArm("epic", link=2), KVLINK)]
    for number, one in enumerate(found):
        for other in found[number + 1 :]:
            assert (one - other).abs().max() > 1e-3


def test_shuffled_chunks_keep_their_lengths() -> None:
    other = PromptTokens([1], [[20, 21]], [9])
    mixed = with_chunks_of(TOKENS, other)
    assert [len(chunk) for chunk in mixed.chunks] == [3, 4]
    assert {token for chunk in mixed.chunks for token in chunk} == {20, 21}
    assert mixed.tail == TOKENS.tail


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_decoding_with_a_cache_equals_reading_all_again(model: Llama, arm: ReuseArm) -> None:
    short = PromptTokens([1], [[3, 4], [5]], [6])
    layouts = collate([expand(short, arm), expand(TOKENS, arm)])
    said = generate(model, layouts, limit=4, stop=99, anchored=arm.anchored)
    for tokens, ids in zip((short, TOKENS), said, strict=True):
        grown = [tokens._replace(tail=[*tokens.tail, *ids[:end]]) for end in range(4)]
        assert ids == [int(last(model, one, arm).argmax()) for one in grown]


def test_decoding_stops_where_it_is_told_to(model: Llama) -> None:
    layout = collate([expand(TOKENS, FULL)])
    whole = generate(model, layout, limit=5, stop=99)[0]
    assert generate(model, layout, limit=5, stop=whole[2])[0] == whole[: whole.index(whole[2])]

"""Picking by deviation, and what it writes, with keys cached as on a GPU and as on a CPU."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.distributed.kv_transfer import kv_transfer_state as state

from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.policy import (
    ChunkPolicy,
    Deviation,
    DeviationSelection,
    LayoutConfig,
    QuestionSelection,
    Segment,
)
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.worker import token_picker
from picbench.engines.vllm.worker.model_pass import LayerKv
from picbench.engines.vllm.worker.slot_map import SlotMap
from picbench.engines.vllm.worker.token_picker import TokenPicker, pickable
from picbench.kernels.rope import RopeTable, rotate

HEADS, SIZE, BLOCKS = 2, 8, 12
PROMPT = [
    Segment(tuple(range(10, 15))),
    Segment(tuple(range(20, 40)), chunk=True),
    Segment(tuple(range(50, 55))),
    Segment(tuple(range(60, 70)), chunk=True),
    Segment(tuple(range(80, 83))),
]
BLOCK_IDS = [7, 2, 9, 4, 5]


class Layer:
    """A layer's attention: its cache [blocks, heads, 16, 2 * size], as on a GPU."""

    def __init__(self, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.kv_cache = torch.randn(BLOCKS, HEADS, 16, 2 * SIZE, generator=noise)
        self.impl = self

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None:
        assert layer is self
        kv_cache[slots // 16, :, slots % 16] = torch.cat([key, value], -1)


class FirstTwo:
    """Stands in for a forward pass: keys without RoPE and values of every position."""

    def __init__(self, rope: RopeTable, *, bare: bool) -> None:
        self.attentions = [Layer(1), Layer(2)]
        noise = torch.Generator().manual_seed(3)
        self.kv = [torch.randn(2, 40, HEADS, SIZE, generator=noise) for _ in self.attentions]
        self._rope, self._bare = rope, bare
        self.prompts: list[list[int]] = []

    def run(self, prompt: Tensor) -> list[LayerKv]:
        self.prompts.append(prompt.tolist())
        positions = torch.arange(len(prompt))
        return [
            LayerKv(k if self._bare else self.rotated(k, positions), v)
            for k, v in (kv[:, : len(prompt)] for kv in self.kv)
        ]

    def rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        return rotate(keys, self._rope.shift_rows(positions), is_neox=True)


@pytest.fixture
def rope() -> RopeTable:
    angles = torch.arange(64).unsqueeze(1) / 100 ** (torch.arange(SIZE // 2) / (SIZE // 2))
    return RopeTable(torch.cat([angles.cos(), angles.sin()], dim=-1), SIZE)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    found = Faults()
    monkeypatch.setattr(
        state, "_KV_CONNECTOR_AGENT", SimpleNamespace(tier_client=SimpleNamespace(faults=found))
    )
    monkeypatch.setattr(token_picker, "tensor_model_parallel_all_reduce", lambda x: x)
    yield found


def read(kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = kv_cache[slots // 16, :, slots % 16].chunk(2, dim=-1)
    return keys, values


def planned(share: float, deviation: Deviation = Deviation.VALUES) -> tuple[Any, SlotMap]:
    selection = DeviationSelection(share, deviation)
    plan = lay_out(
        PROMPT, lambda *_: ChunkPolicy(private=True, selection=selection), LayoutConfig()
    )
    return plan, SlotMap.of(plan)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("deviation", list(Deviation))
def test_the_largest_deviations_are_picked_and_first_layers_replaced(
    rope: RopeTable, faults: Faults, deviation: Deviation, bare: bool
) -> None:
    plan, slot_map = planned(0.3, deviation)
    model = FirstTwo(rope, bare=bare)
    # Chunks begin at 5 and 30, were compiled at 0 and are in the first three blocks.
    places = {5 + i: (7 if i < 16 else 2, i % 16, i) for i in range(20)}
    places |= {30 + i: (9, i, i) for i in range(10)}
    # What every token should have, in the form in which keys are cached.
    expected: dict[int, list[Tensor]] = {}
    for position, (_, _, compiled_at) in places.items():
        at = torch.tensor([0 if bare else compiled_at])
        expected[position] = [
            torch.cat([model.rotated(kv[0, position][None], at)[0], kv[1, position]], -1)
            for kv in model.kv
        ]
    # The check layer's cache is off by so much, in each half by another order.
    off = torch.Generator().manual_seed(4)
    sizes = {p: torch.rand(2, generator=off) + 0.1 for p in places}
    for position, (block, offset, _) in places.items():
        change = sizes[position].repeat_interleave(SIZE)
        model.attentions[1].kv_cache[block, :, offset] = expected[position][1] + change
    picker = TokenPicker(model, None, read, rope, bare=bare)  # type: ignore[arg-type]
    picker.noted = {}
    unpicked = pickable(["a", "b"], {"a": slot_map, "b": None}, [48, 48])
    assert list(unpicked) == ["a"]
    [(name, arrangement)] = picker.pick(unpicked, lambda _: (plan.tokens, BLOCK_IDS))
    half = 0 if deviation is Deviation.KEYS else 1
    largest = sorted(places, key=lambda p: -sizes[p][half])[:9]
    assert name == "a"
    assert picker.noted == {"a": tuple(sorted(largest))}
    text = [*range(5), *range(25, 30), *range(40, 43)]
    assert arrangement.positions[48:].tolist() == sorted([*largest, *text])
    # The forward pass stops after the last token that can be picked.
    assert model.prompts == [[t for s in PROMPT[:4] for t in s.tokens]]
    for position, (block, offset, _) in places.items():
        for layer, kv in zip(model.attentions, expected[position], strict=True):
            torch.testing.assert_close(layer.kv_cache[block, :, offset], kv)
    # Nothing else is written.
    fresh = FirstTwo(rope, bare=bare)
    for layer, before in zip(model.attentions, fresh.attentions, strict=True):
        for block in set(range(BLOCKS)) - {7, 2, 9}:
            assert torch.equal(layer.kv_cache[block], before.kv_cache[block])


def test_all_tokens_are_picked_without_a_forward_pass(rope: RopeTable, faults: Faults) -> None:
    plan, slot_map = planned(1.0)
    model = FirstTwo(rope, bare=True)
    picker = TokenPicker(model, None, read, rope, bare=True)  # type: ignore[arg-type]
    [(_, arrangement)] = picker.pick({"a": slot_map}, lambda _: (plan.tokens, BLOCK_IDS))
    assert arrangement.positions[48:].tolist() == list(range(43))
    assert model.prompts == []


class Asked:
    """Stands in for a pass: what each of 30 chunk tokens gets of the question's attention."""

    def __init__(self, mass: list[float]) -> None:
        self.mass = torch.tensor(mass)
        self.given: list[Any] = []

    def run(self, tokens: Tensor, positions: Tensor, cached: Any, question: int) -> Tensor:
        self.given = [tokens.tolist(), positions.tolist(), cached, question]
        return self.mass


def test_blocks_are_linked_in_the_order_of_their_mean_attention(
    rope: RopeTable, faults: Faults
) -> None:
    """The second chunk's only block, the first one's short block, and the rest of the budget."""
    plan = lay_out(PROMPT, lambda *_: ChunkPolicy(selection=QuestionSelection(8)), LayoutConfig())
    model, asked = FirstTwo(rope, bare=False), Asked([1.0] * 16 + [1.5] * 4 + [0, 20] * 5)
    before = [layer.kv_cache.clone() for layer in model.attentions]
    picker = TokenPicker(model, asked, read, rope, bare=False)  # type: ignore[arg-type]
    picker.noted = {}
    [(_, arrangement)] = picker.pick({"a": SlotMap.of(plan)}, lambda _: (plan.tokens, BLOCK_IDS))
    assert picker.noted == {"a": (5, 6, *range(21, 25), *range(30, 40))}
    assert arrangement.positions[48:].tolist() == sorted([*range(7), *range(21, 43)])
    text = [*range(5), *range(25, 30), *range(40, 43)]
    tokens, positions, cached, question = asked.given
    assert (positions, question) == (text, 40)
    flat = [t for segment in PROMPT for t in segment.tokens]
    assert tokens == [flat[p] for p in text]
    assert cached.slots[:2].tolist() == [7 * 16, 7 * 16 + 1]
    assert cached.positions.tolist() == [*range(5, 25), *range(30, 40)]
    assert cached.cached_at.tolist() == [*range(20), *range(10)]
    assert model.prompts == []
    for layer, kv_cache in zip(model.attentions, before, strict=True):
        assert torch.equal(layer.kv_cache, kv_cache)


def test_of_equal_deviations_the_first_are_picked(rope: RopeTable, faults: Faults) -> None:
    plan, slot_map = planned(0.1)
    model = FirstTwo(rope, bare=True)
    model.kv[1].zero_()
    model.attentions[1].kv_cache.zero_()
    picker = TokenPicker(model, None, read, rope, bare=True)  # type: ignore[arg-type]
    picker.noted = {}
    list(picker.pick({"a": slot_map}, lambda _: (plan.tokens, BLOCK_IDS)))
    assert picker.noted == {"a": (5, 6, 7)}


def test_a_failure_ends_the_request_and_no_other(rope: RopeTable, faults: Faults) -> None:
    plan, slot_map = planned(0.5)
    picker = TokenPicker(
        FirstTwo(rope, bare=True),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        read,
        rope,
        bare=True,
    )

    def find(request_id: str) -> tuple[list[int], list[int]]:
        return (plan.tokens[:-1] if request_id == "bad" else plan.tokens), BLOCK_IDS

    found = dict(picker.pick({"bad": slot_map, "good": slot_map}, find))
    assert list(found) == ["good"]
    assert "picbench failed to pick tokens" in faults.take()["bad"]


def test_requests_are_picked_for_in_their_first_step_only() -> None:
    _, slot_map = planned(0.5)
    static = SlotMap.plain(20)
    slot_maps = {"a": slot_map, "b": static}
    assert slot_map.first_computed == 48
    assert pickable(["a", "b", "c"], slot_maps, [48, 0, 3]) == {"a": slot_map}
    assert pickable(["a", "b"], slot_maps, [64, 0]) == {}
    assert np.array_equal(slot_map.cached_at()[:20], [*range(16), *range(16, 20)])

"""Keys that are cached at one position and read at another: as the model rotates them there.

Expected is attention over keys that the model's own table rotates at the second position, factor
included; the kernels get keys that it rotated at the first, and the table of unit length.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from picbench.experiments.scenes import Scene, Slots, draw, rope_table
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.float64_attention import attention_reference
from picbench.kernels.paging import BLOCK_SIZE, GAP, flat_slots
from picbench.kernels.rope import RopeTable, rotate, unit_length
from picbench.kernels.shape import HeadShape


class Kind(NamedTuple):
    """A model's rotary embedding: its factor, its dimensions of 64, and their pairing."""

    factor: float
    rotary_dim: int
    is_neox: bool


EVERY_KIND = {
    "yarn": Kind(1.4, 64, True),
    "partial": Kind(1.0, 32, True),
    "interleaved": Kind(1.0, 64, False),
    "all three": Kind(1.4, 48, False),
}
#: Runs a test with each kind.
KINDS = pytest.mark.parametrize("kind", list(EVERY_KIND.values()), ids=list(EVERY_KIND))


def model_table(kind: Kind, device: str) -> RopeTable:
    """The table as the model has it."""
    plain = rope_table(kind.rotary_dim, 300, device, is_neox=kind.is_neox)
    return RopeTable(kind.factor * plain.cos_sin_cache, plain.rotary_dim, plain.is_neox)


def shifted_scene(slots: Slots, kind: Kind, shape: HeadShape, device: str) -> tuple[Scene, Tensor]:
    """A request whose keys the model cached before they are shifted, and its keys afterwards."""
    model = model_table(kind, device)
    unit = RopeTable(unit_length(model.cos_sin_cache)[0], model.rotary_dim, model.is_neox)
    scene = draw([slots], shape, unit, device=device, poison=True)
    kpos, shift = slots.kpos.to(device), slots.rope_shift.to(device)
    at = flat_slots(scene.table[0], torch.arange(len(kpos), device=device))
    key_cache, _ = key_value(scene.kv_cache)
    real = (kpos != GAP).nonzero().flatten()
    key = key_cache[at[real] // BLOCK_SIZE, at[real] % BLOCK_SIZE].float()
    before = rotate(key, model.rows((kpos - shift)[real]), is_neox=model.is_neox)
    key_cache[at[real] // BLOCK_SIZE, at[real] % BLOCK_SIZE] = before.to(shape.dtype)
    return scene, rotate(key, model.rows(kpos[real]), is_neox=model.is_neox)


def attention_at(scene: Scene, after: Tensor, query: Tensor, qpos: Tensor) -> Tensor:
    """Attention over the model's keys at their logical positions."""
    kpos = scene.requests[0].kpos.to(after.device)
    real = (kpos != GAP).nonzero().flatten()
    at = flat_slots(scene.table[0], real)
    value = key_value(scene.kv_cache)[1][at // BLOCK_SIZE, at % BLOCK_SIZE]
    still = torch.zeros_like(kpos[real])
    return attention_reference(
        query, after, value, kpos[real], still, qpos, scene.rope, scene.scale
    )

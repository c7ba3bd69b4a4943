"""Rotary embedding (RoPE) of keys when attention reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from picbench.errors import EngineError
from picbench.kernels.paging import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class RopeTable:
    """A model's own rotary parameters, as vLLM's rotary modules hold them.

    `cos_sin_cache` is [max_position, rotary_dim], cosines in the first half of each row and sines
    in the second; scaling (llama3, yarn) is already in it. The first `rotary_dim` dimensions of a
    head are rotated and the others pass through. Only the neox pairing (i, i + rotary_dim / 2) is
    supported; the other one raises EngineError.
    """

    cos_sin_cache: Tensor
    rotary_dim: int
    is_neox: bool = True

    def __post_init__(self) -> None:
        if not self.is_neox:
            raise EngineError(
                "interleaved (GPT-J style) rotary embedding is not supported",
                hint="use a model with neox style rotary embedding",
            )
        if self.cos_sin_cache.shape[-1] != self.rotary_dim or self.rotary_dim % 2:
            raise EngineError(
                f"cos_sin_cache {tuple(self.cos_sin_cache.shape)} does not fit "
                f"rotary_dim {self.rotary_dim}",
                hint="pass the rotary module's cos_sin_cache and rotary_dim unchanged",
            )

    def rows(self, positions: Tensor) -> Tensor:
        """Cosines and sines [n, rotary_dim] of `positions` [n]; -1 rotates nothing."""
        rows = self.cos_sin_cache.index_select(0, positions.clamp(min=0).long())
        if bool((positions < 0).any()):
            rows[positions < 0] = self._identity()
        return rows

    def pages(self, positions: Tensor) -> Tensor:
        """`rows` of whole blocks in tile order: [n / 16, rotary_dim * 16], 16 slots a dimension."""
        rows = self.rows(positions).view(-1, BLOCK_SIZE, self.rotary_dim)
        return rows.transpose(1, 2).flatten(1)

    def shift_rows(self, rope_shift: Tensor) -> Tensor:
        """Cosines and sines [n, rotary_dim] of RoPE shifts [n], which may be negative."""
        cos, sin = self.cos_sin_cache[rope_shift.abs().long()].chunk(2, dim=-1)
        return torch.cat([cos, torch.where(rope_shift.unsqueeze(1) < 0, -sin, sin)], dim=-1)

    def _identity(self) -> Tensor:
        row = torch.zeros_like(self.cos_sin_cache[0])
        row[: self.rotary_dim // 2] = 1
        return row


def rotate(keys: Tensor, rows: Tensor) -> Tensor:
    """Rotates `keys` [n, heads, head_size] by `rows` [n, rotary_dim] of a RopeTable.

    Computes in float32 and returns the type of `keys`. Su et al., RoFormer, section 3.2.2, in the
    half-split pairing of GPT-NeoX.
    """
    half = rows.shape[-1] // 2
    cos, sin = rows.float().unsqueeze(1).chunk(2, dim=-1)
    first, second, passed = keys.float().tensor_split((half, 2 * half), dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, passed)
    return torch.cat(rotated, dim=-1).to(keys.dtype)

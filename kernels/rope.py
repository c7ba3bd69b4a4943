"""The rotation that attention applies to keys when it reads them."""

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
    head are rotated and the rest pass through. Only the neox pairing (i, i + rotary_dim / 2) is
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

    def rows(self, turns: Tensor) -> Tensor:
        """Cosines and sines [n, rotary_dim] of the positions `turns` [n]; -1 rotates nothing."""
        rows = self.cos_sin_cache.index_select(0, turns.clamp(min=0).long())
        if bool((turns < 0).any()):
            rows[turns < 0] = self._identity()
        return rows

    def pages(self, turns: Tensor) -> Tensor:
        """`rows` of whole blocks in tile order: [n / 16, rotary_dim * 16], 16 slots a dimension."""
        rows = self.rows(turns).view(-1, BLOCK_SIZE, self.rotary_dim)
        return rows.transpose(1, 2).flatten(1)

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
    first, second, rest = keys.float().tensor_split((half, 2 * half), dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(turned, dim=-1).to(keys.dtype)

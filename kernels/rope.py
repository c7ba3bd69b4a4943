"""Rotary embedding (RoPE) of keys when attention reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from picbench.errors import ConfigError, EngineError
from picbench.kernels.paging import BLOCK_SIZE

# Largest error of a cosine or sine in float32.
_LENGTH_ERROR = 1e-5
_HINT = "picbench re-rotates keys; use a model with another rotary embedding"


@dataclass(frozen=True, slots=True)
class RopeTable:
    """How far a model rotates keys, by position.

    `cos_sin_cache` is [max_position, rotary_dim], cosines in the first half of each row and sines
    in the second, as vLLM's rotary modules hold them; scaled frequencies (llama3, yarn) are already
    in it. Its rotations are of unit length, because the factor that yarn applies to queries and
    keys is in cached keys once and must not be applied again (`unit_length`).

    The first `rotary_dim` dimensions of a head are rotated and the others pass through. Column i
    rotates dimensions i and i + rotary_dim / 2 (`is_neox`), or else 2i and 2i + 1: interleaved, as
    in GPT-J. After the model's own rows come those of `temperatures` (`tempered`).
    Raises EngineError if width and `rotary_dim` differ.
    """

    cos_sin_cache: Tensor
    rotary_dim: int
    is_neox: bool = True
    temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.cos_sin_cache.shape[-1] != self.rotary_dim or self.rotary_dim % 2:
            raise EngineError(
                f"cos_sin_cache {tuple(self.cos_sin_cache.shape)} does not fit "
                f"rotary_dim {self.rotary_dim}",
                hint="pass the rotary module's cos_sin_cache and rotary_dim unchanged",
            )

    def tempered(self, temperatures: Sequence[float], head_size: int) -> "RopeTable":
        """The table with rows that rotate keys and divide them by each of `temperatures`.

        The scores of such keys are divided, too. There is a row for each shift from -(n - 1) to
        n - 1, n being the model's rows, so that no kernel has to know of temperatures. Raises
        ConfigError if dimensions of a head are not rotated.
        """
        if temperatures and self.rotary_dim != head_size:
            raise ConfigError(
                f"a temperature needs heads that are rotated as a whole, not {self.rotary_dim} of "
                f"{head_size} dimensions",
                hint="leave `temperature` out",
            )
        count = len(self.cos_sin_cache)
        shifts = torch.arange(1 - count, count, device=self.cos_sin_cache.device)
        turned = self.shift_rows(shifts)
        tables = [self.cos_sin_cache, *(turned / number for number in temperatures)]
        return replace(self, cos_sin_cache=torch.cat(tables), temperatures=tuple(temperatures))

    @property
    def positions(self) -> int:
        """How many positions the model has."""
        # Each temperature has one row less than two for each of them.
        others = len(self.temperatures)
        return (len(self.cos_sin_cache) + others) // (2 * others + 1)

    def row_of(self, temperature: float) -> int:
        """The row of position 0 at a temperature: what is added to positions and to shifts."""
        if temperature == 1:
            return 0
        return (1 + self.temperatures.index(temperature)) * (2 * self.positions - 1)

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


def rotate(keys: Tensor, rows: Tensor, *, is_neox: bool) -> Tensor:
    """Rotates `keys` [n, heads, head_size] by `rows` [n, rotary_dim] of a RopeTable.

    Computes in float32 and returns the type of `keys`. Su et al., RoFormer, section 3.2.2, in the
    half-split pairing of GPT-NeoX or the interleaved one of GPT-J.
    """
    rotary_dim = rows.shape[-1]
    cos, sin = rows.float().unsqueeze(1).chunk(2, dim=-1)
    turned, passed = keys.float().tensor_split((rotary_dim,), dim=-1)
    if is_neox:
        first, second = turned.chunk(2, dim=-1)
    else:
        first, second = turned.reshape(*turned.shape[:-1], -1, 2).unbind(-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.cat(pair, dim=-1) if is_neox else torch.stack(pair, dim=-1).flatten(-2)
    return torch.cat((rotated, passed), dim=-1).to(keys.dtype)


def unit_length(cos_sin_cache: Tensor) -> tuple[Tensor, float]:
    """The rotations [positions, rotary_dim] of a model's table, and the factor that was in it.

    `cos_sin_cache` is the model's own in float32. Yarn and longrope multiply theirs by one number,
    which scales every query and every key that the model rotates. Raises EngineError if what
    remains are not rotations by position times frequency: a key that is re-rotated by them would
    not be the key that the model has at the other position.
    """
    factor = float(cos_sin_cache[0, 0])
    table = cos_sin_cache if factor == 1 else cos_sin_cache / factor
    turns = torch.complex(*table.chunk(2, dim=-1))
    errors = (turns.abs() - 1).abs()
    length = float(errors.max())
    if not length <= _LENGTH_ERROR:
        row, column = divmod(int(errors.argmax()), errors.shape[1])
        raise EngineError(
            f"its rotations are not of one length (off by {length:.2g} at position {row}, "
            f"column {column})",
            hint=_HINT,
        )
    # Angles are products in float32, which are off by 2^-24 of themselves.
    allowed = _LENGTH_ERROR + 2.5e-7 * len(turns)
    start = float((turns[0] - 1).abs().max())
    steps = (turns[:-1] * turns[1:2] - turns[1:]).abs()
    if not start <= _LENGTH_ERROR or (steps.numel() and not float(steps.max()) <= allowed):
        raise EngineError("its angles are not positions times frequencies", hint=_HINT)
    return table, factor

"""Which dimensions of a head RoPE rotates together (Triton)."""

import triton
import triton.language as tl


@triton.jit
def pair_of(
    dim: tl.tensor, ROTARY: tl.constexpr, NEOX: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """For each dimension: its partner, the column of its angle, and whether it is the first.

    Dimensions from ROTARY on are their own partners, and their column means nothing.
    """
    if NEOX:
        half: tl.constexpr = ROTARY // 2
        first = dim < half
        partner = tl.where(first, dim + half, dim - half)
        column = dim % half
    else:
        first = dim % 2 == 0
        partner = dim ^ 1
        column = dim // 2
    return tl.where(dim < ROTARY, partner, dim), column, first


@triton.jit
def pairs(
    HEAD: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The pairs [HEAD / 2] of a head, and the first and the second dimension of each.

    Pair i of the first ROTARY / 2 is rotated by column i. The others are dimensions that pass
    through, each in one pair.
    """
    pair = tl.arange(0, HEAD // 2)
    if NEOX:
        half: tl.constexpr = ROTARY // 2
        low = tl.where(pair < half, pair, pair + half)
        high = tl.where(pair < half, pair + half, pair + HEAD // 2)
    else:
        low = 2 * pair
        high = low + 1
    return pair, low, high

"""The size of a query tile, which prefill kernels and the choice between them share."""

import triton

#: Query rows (tokens times packed heads) of a tile.
ROWS = 128


def tokens_of(group: int) -> int:
    """Queries of a tile where `group` query heads share a KV head."""
    return max(1, ROWS // int(triton.next_power_of_2(group)))

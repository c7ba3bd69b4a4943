"""Query tiles cover every key that each query sees, once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from picbench.kernels.cuda.prefill.tiled import split_work, tile_work


@given(
    seen=st.lists(st.integers(0, 40_000), min_size=1, max_size=200),
    kv_heads=st.integers(1, 8),
    tokens=st.sampled_from([1, 16, 32]),
)
def test_splits_cover_the_keys_of_a_tile(seen: list[int], kv_heads: int, tokens: int) -> None:
    counts = np.sort(np.array(seen, np.int32))
    work, splits = split_work(tile_work(counts, 7, 3, tokens), kv_heads)
    assert (work[:, 2] == 3).all()
    assert work[:, 6].max() == splits - 1
    for start in range(0, len(counts), tokens):
        mine = work[work[:, 0] == start + 7]
        some = counts[start : start + tokens]
        assert (mine[:, 1] == len(some)).all()
        assert mine[:, 6].tolist() == list(range(len(mine)))
        assert mine[0, 3] == 0 and mine[-1, 5] == some.max()
        assert (mine[1:, 3] == mine[:-1, 5]).all()
        assert (mine[:, 3] <= mine[:, 4]).all()
        assert (mine[:, 4] <= np.maximum(some.min(), mine[:, 3])).all()
        assert (mine[:, 4] <= np.maximum(mine[:, 5], mine[:, 3])).all()

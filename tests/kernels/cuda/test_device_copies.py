"""Copies to a device carry what they are given, and nothing of what was there."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from picbench.kernels.cuda.device import overwrite_all, upload_all

CPU = torch.device("cpu")

rows = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), min_size=1, max_size=5)


@given(rows, st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_rows_are_overwritten_as_a_whole(values: list[list[int]], spare: list[int]) -> None:
    tables = [
        torch.full((3, len(own) + more), 7, dtype=torch.int32)
        for own, more in zip(values, spare, strict=False)
    ]
    overwrite_all([table[1] for table in tables], [np.array(own, np.int32) for own in values])
    for own, table in zip(values, tables, strict=True):
        rest = [0] * (table.shape[1] - len(own))
        assert table[1].tolist() == own + rest
        assert (table[[0, 2]] == 7).all()


@given(rows)
def test_arrays_of_any_length_travel_together(values: list[list[int]]) -> None:
    arrays = [np.array(own, np.int32) for own in values]
    assert [there.tolist() for there in upload_all(arrays, CPU)] == values

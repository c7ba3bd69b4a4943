"""Copies to a device carry what they are given, and nothing of what was there."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from picbench.kernels.cuda.device import upload_all, write_rows

CPU = torch.device("cpu")

values = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)


def ints(own: list[int]) -> NDArray[np.int32]:
    return np.array(own, np.int32)


@given(st.dictionaries(st.integers(0, 7), st.tuples(values, values), min_size=1), st.integers(0, 3))
def test_rows_are_written_as_far_as_the_longest(
    rows: dict[int, tuple[list[int], list[int]]], spare: int
) -> None:
    longest = [max(len(own[n]) for own in rows.values()) for n in range(2)]
    tables = [torch.full((8, width + spare), 7, dtype=torch.int32) for width in longest]
    write_rows(tables, {row: [ints(part) for part in own] for row, own in rows.items()})
    for n, (table, width) in enumerate(zip(tables, longest, strict=True)):
        for row in range(8):
            own = rows[row][n] if row in rows else [7] * width
            assert table[row].tolist() == own + [0] * (width - len(own)) + [7] * spare


@given(st.lists(values, min_size=1, max_size=5))
def test_arrays_of_any_length_travel_together(arrays: list[list[int]]) -> None:
    assert [there.tolist() for there in upload_all(list(map(ints, arrays)), CPU)] == arrays

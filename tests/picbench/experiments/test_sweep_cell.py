import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from picbench.experiments.sweep import cell_name

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 10**9),
    st.text(max_size=150),
    st.from_regex(r"[a-c:,+_=-]{0,5}", fullmatch=True),
)
SETTINGS = st.dictionaries(st.sampled_from(["algo", "seed", "data"]), VALUES, min_size=1)
CELLS = st.tuples(SETTINGS, st.integers(1, 3))


def same(one: Any, other: Any) -> bool:
    """Equality in which True is not 1."""
    return repr(one) == repr(other)


@given(CELLS, CELLS)
def test_different_cells_have_different_names(
    one: tuple[dict[str, Any], int], other: tuple[dict[str, Any], int]
) -> None:
    equal = same((sorted(one[0].items()), one[1]), (sorted(other[0].items()), other[1]))
    if one[0].keys() == other[0].keys():
        assert (cell_name(*one) == cell_name(*other)) == equal


@given(CELLS)
def test_names_are_names_of_folders(cell: tuple[dict[str, Any], int]) -> None:
    name = cell_name(*cell)
    assert re.fullmatch(r"[A-Za-z0-9.,+=_-]{1,140}", name)
    assert not name.startswith(".")

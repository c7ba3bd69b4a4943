import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.errors import ConfigError
from picbench.workloads.datasets.grid import EPIC, Grid, parse_grid


def test_epics_grid_is_the_default_form() -> None:
    assert parse_grid("1000-11000:20x10") == EPIC
    assert len(EPIC.sizes(20_000)) * len(EPIC.depth_shares) == 200


@pytest.mark.parametrize(
    "text", ["", "1000", "1000-900:2x2", "0-9:1x1", "1-2:0x1", "1-2:1x0", "1-2:1x1 ", "-1-2:1x1"]
)
def test_a_wrong_grid_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"`grid` .*1000-11000:20x10"):
        parse_grid(text)


def test_one_length_and_one_depth() -> None:
    grid = Grid(100, 500, 1, 1)
    assert (grid.sizes(1_000), grid.depth_shares) == ([500], [0.5])


@given(
    st.integers(1, 500),
    st.integers(0, 500),
    st.integers(2, 30),
    st.integers(2, 30),
    st.integers(0, 900),
)
def test_ends_are_included_and_bounds_kept(
    shortest: int, more: int, lengths: int, depths: int, spare: int
) -> None:
    grid = Grid(shortest, shortest + more, lengths, depths)
    available = shortest + spare
    sizes = grid.sizes(available)
    assert (sizes[0], sizes[-1]) == (shortest, min(grid.longest, available))
    assert sizes == sorted(set(sizes))
    shares = grid.depth_shares
    assert (shares[0], shares[-1], len(shares)) == (0.0, 1.0, depths)

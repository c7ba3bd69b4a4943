"""Hints for misspelled names."""

import pytest

from picbench.errors import closest


@pytest.mark.parametrize(
    ("wrong", "known", "hint"),
    [
        ("mepik", ("epic", "mepic"), "did you mean 'mepic'?"),
        ("xyz", ("epic", "mepic"), "there are: epic, mepic"),
        ("xyz", (), "there are: none"),
    ],
)
def test_the_nearest_name_or_all_of_them(wrong: str, known: tuple[str, ...], hint: str) -> None:
    assert closest(wrong, known) == hint


def test_a_prefix_is_part_of_each_name() -> None:
    assert closest("tinny", ("tiny",), "shape:") == "did you mean 'shape:tiny'?"
    assert closest("a", ("bc", "de"), "shape:") == "there are: shape:bc, shape:de"

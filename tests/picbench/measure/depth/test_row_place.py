"""Where bundled rows have their answers: read back from the texts."""

import pytest

from picbench.errors import DataError
from picbench.experiments.depth import bundled_places, check_same, find_needle
from picbench.workloads.sources.row import DatasetRow

TEXT = """Section 1: Ann Lee
1.1 Much is known. The password here is Abc. It rained.
Section 2: Ann Lee Roe
2.1 Nothing. Remember that the password is Xyz.
2.2 And the room number is 123. The end."""


def needle(question: str, answer: str) -> DatasetRow:
    return DatasetRow("n", "needle", question, TEXT, (answer,), "file:1")


@pytest.mark.parametrize(
    ("question", "answer", "remark", "heading"),
    [
        ("What is the password of Ann Lee Roe?", "Xyz", " Remember that", "Section 2"),
        ("What is Ann Lee Roe's room number?", "123", "2 And the room", "Section 2"),
        ("What is Ann Lee's password?", "Abc", " The password here", "Section 1"),
    ],
)
def test_a_needle_is_in_the_section_of_its_person(
    question: str, answer: str, remark: str, heading: str
) -> None:
    found = find_needle(needle(question, answer))
    assert TEXT[found.remark :].startswith(remark)
    assert TEXT[found.heading :].startswith(heading)


def test_a_needle_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DataError, match="0 remarks about 'password' of Ann Lee, not 1"):
        find_needle(needle("What is Ann Lee's password?", "Xyz"))
    with pytest.raises(DataError, match="no section about the person"):
        find_needle(needle("What is Bob's password?", "Xyz"))


def test_bundled_needles_lie_where_their_grid_says() -> None:
    places = bundled_places("needle", "testbed", 40)
    for number, place in enumerate(places):
        assert place.depth == pytest.approx(number % 5 / 4, abs=0.18)
    lengths = [places[row].length or 0 for row in range(0, 40, 5)]
    assert lengths == sorted(lengths)
    assert {place.heading_apart for place in places} == {0, 1, 2}


def test_bundled_questions_say_what_they_need() -> None:
    places = bundled_places("musique", "testbed", 40)
    assert {place.hops for place in places} == {2, 3, 4}
    for place in places:
        assert place.chunks_apart is not None
        assert (place.tokens_apart == 0) == (place.chunks_apart == 1)
    check_same(places, [place.prompt for place in places], "scores")
    with pytest.raises(DataError, match="scores: measured on other rows"):
        check_same(places, [place.prompt + 1 for place in places], "scores")

"""Rows told apart by where the answer lies, and the page of the committed scores."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from picbench.errors import DataError
from picbench.figures import canvas as paper_canvas
from picbench.papers import depth
from picbench.papers.depth import (
    CUTS,
    RowPlace,
    bins_of,
    bundled_places,
    check_same,
    find_needle,
    heat_map,
    mean_of,
)
from picbench.workloads.sources.row import DatasetRow

RESULTS = Path(__file__).parents[3] / "results" / "testbed"


def test_a_section_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them, and one format: all take half a minute."""
    monkeypatch.setattr(depth, "CUTS", CUTS[-1:])
    monkeypatch.setattr(paper_canvas, "FORMATS", ("svg",))
    page = depth.write(RESULTS / "algorithms", tmp_path)
    [section] = [f"## {text}" for text in page.split("## ") if text.startswith(CUTS[-1].title)]
    assert section in (RESULTS / "depth.md").read_text(), "picbench measure algorithms depth"
    found = json.loads((tmp_path / "depth.json").read_text())
    committed = json.loads((RESULTS / "depth.json").read_text())
    assert found["cuts"] == {name: committed["cuts"][name] for name in found["cuts"]}
    assert found["needle"] == committed["needle"]
    for name in ("depth-needle", "depth-needle-heading"):
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000


def test_every_row_is_in_a_bin() -> None:
    found = json.loads((RESULTS / "depth.json").read_text())["cuts"]
    whole = {name: sum(one["rows"] for one in cut["bins"]) for name, cut in found.items()}
    assert list(whole) == [cut.name for cut in CUTS]
    assert list(whole.values()) == [200, 600, 600, 600, 200, 200]


def test_scores_without_an_arm_are_refused(tmp_path: Path) -> None:
    part = json.loads((RESULTS / "algorithms" / "testbed-needle.json").read_text())
    del part["arms"]["mepic"]
    (tmp_path / "testbed-needle.json").write_text(json.dumps(part))
    with pytest.raises(DataError, match="testbed-needle: no scores of mepic"):
        depth.write(tmp_path, tmp_path)


CUT_OF = {cut.name: cut for cut in CUTS}


def place(**known: float | int) -> RowPlace:
    return replace(RowPlace(100), **known)  # type: ignore[arg-type]


def test_every_cut_has_a_label_for_each_of_its_edges() -> None:
    for cut in CUTS:
        assert len(cut.labels) == len(cut.edges) == len(set(cut.edges))
        assert list(cut.edges) == sorted(cut.edges)


def test_bins_end_where_the_next_one_begins() -> None:
    cut = CUT_OF["needle-chunk"]
    assert cut.label(place(into_chunk=15)) == "0-15"
    assert cut.label(place(into_chunk=16)) == "16-127"
    assert cut.label(place(into_chunk=9999)) == "384 on"
    assert cut.label(place(hops=2)) is None


def test_arms_are_averaged_on_the_same_rows() -> None:
    rows = [(place(hops=hops), {"a": score, "b": 1.0}) for hops, score in [(2, 1.0), (2, 0.0)]]
    rows.append((place(hops=4), {"a": 0.5, "b": 1.0}))
    two, four = bins_of(CUT_OF["hops"], rows, ("a", "b"))
    assert (two.label, two.rows, two.scores["a"].value) == ("2", 2, 0.5)
    assert two.scores["a"].low < 0.5 < two.scores["a"].high
    assert (two.scores["b"].low, two.scores["b"].high) == (1.0, 1.0)
    # One row tells nothing about others.
    assert (four.scores["a"].value, four.scores["a"].low, four.scores["a"].high) == (0.5, 0, 1)
    assert mean_of([0.25]).value == 0.25


def test_a_heat_map_has_depth_downwards_and_length_to_the_right() -> None:
    rows = [
        (place(depth=depth, length=length), {"a": depth + length})
        for depth in (0.0, 1.0)
        for length in (10, 30, 20)
    ]
    assert heat_map(rows, "a", (2, 3)) == [[10.0, 20.0, 30.0], [11.0, 21.0, 31.0]]
    empty = heat_map(rows[:1], "a", (1, 2))
    assert empty[0][0] == 10.0
    assert empty[0][1] != pytest.approx(10.0)


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

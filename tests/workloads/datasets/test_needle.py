from collections.abc import Sequence
from pathlib import Path

import pytest

from picbench.errors import ConfigError, DataError
from picbench.workloads.datasets import Reading
from picbench.workloads.datasets.grid import Grid
from picbench.workloads.datasets.needle import Haystack, Needle
from picbench.workloads.sources.row import BadRows, DatasetRow
from picbench.workloads.sources.source import RowSource

SENTENCE = "The grass of this field is dry and of no use to anyone. "


def count_words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(3):
        file = tmp_path / "needle" / "deep" / f"{index}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"Text {index} begins here. " + SENTENCE * 400, encoding="utf-8")
    return tmp_path


def rows(
    data: Path, seed: int = 0, room: int | None = None, grid: Grid | None = None
) -> list[DatasetRow]:
    return list(Needle().rows(RowSource(data), Reading(count_words, seed, room, grid=grid)))


def test_the_grid_has_twenty_lengths_and_ten_depths(folder: Path) -> None:
    made = rows(folder)
    assert len({row.id for row in made}) == 200
    sizes = sorted(len(row.context.split()) for row in made)
    assert 1_000 <= sizes[0] <= 1_050
    assert 11_000 <= sizes[-1] <= 11_050


def test_the_remark_answers_the_question_and_occurs_once(folder: Path) -> None:
    for row in rows(folder)[:20]:
        (answer,) = row.answers
        hotel = row.input.split("porter of ")[1].split(" leave")[0]
        assert row.context.count(f"porter of {hotel} leaves the spare key {answer}. ") == 1
        assert answer not in row.input


def test_depth_is_the_position_of_the_remark(folder: Path) -> None:
    for row in rows(folder)[:40]:
        depth = int(row.id.rsplit("-", 1)[1]) / 100
        before = row.context.split("The night porter")[0]
        assert len(before.split()) / len(row.context.split()) == pytest.approx(depth, abs=0.03)


def test_haystacks_share_their_text(folder: Path) -> None:
    shallow, deep = (
        row
        for row in rows(folder)
        if row.id.startswith("needle-0-1000-") and row.id.endswith(("-0", "-100"))
    )
    remark = f"The night porter{shallow.context.split('The night porter')[1].split('. ')[0]}. "
    without = shallow.context.replace(remark, "")
    assert deep.context.startswith(without) or without.startswith(deep.context.split("The n")[0])


def test_the_seed_decides(folder: Path) -> None:
    assert rows(folder, seed=1) == rows(folder, seed=1)
    assert [row.id for row in rows(folder, seed=1)] != [row.id for row in rows(folder, seed=2)]


def test_a_few_rows_spread_over_the_grid(folder: Path) -> None:
    sizes = [len(row.context.split()) for row in rows(folder)[:10]]
    assert max(sizes) > 2 * min(sizes)


def test_haystacks_are_bounded_by_the_context_and_the_text(folder: Path, tmp_path: Path) -> None:
    assert max(len(row.context.split()) for row in rows(folder, room=2_000)) <= 2_050
    small = tmp_path / "small.txt"
    small.write_text(SENTENCE * 100, encoding="utf-8")
    assert max(len(row.context.split()) for row in rows(small)) <= 1_350


def test_too_little_room_or_text_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`context`"):
        rows(folder, room=500)
    small = tmp_path / "small.txt"
    small.write_text(SENTENCE, encoding="utf-8")
    with pytest.raises(DataError, match="13 tokens"):
        rows(small)


def test_text_that_is_not_utf8_is_named_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"Good.\nGood.\nNot \xff good.\n")
    with pytest.raises(DataError, match=r"bad\.txt:3: not UTF-8"):
        rows(tmp_path)


def test_text_that_is_not_utf8_can_be_skipped(folder: Path) -> None:
    (folder / "needle" / "bad.txt").write_bytes(b"\xff")
    bad = BadRows(skip=True)
    made = list(Needle().rows(RowSource(folder), Reading(count_words, bad=bad)))
    assert len(made) == 200
    assert [message.split(": ")[0] for message in bad.skipped] == [f"{folder}/needle/bad.txt:1"]


def test_another_grid(folder: Path) -> None:
    made = rows(folder, grid=Grid(1_500, 2_500, 2, 3))
    cells = sorted(tuple(map(int, row.id.split("-")[2:])) for row in made)
    assert cells == [(size, depth) for size in (1_500, 2_500) for depth in (0, 50, 100)]


def test_a_grid_is_bounded_by_the_context(folder: Path) -> None:
    sizes = {int(row.id.split("-")[2]) for row in rows(folder, room=2_000)}
    assert (min(sizes), max(sizes)) == (1_000, 2_000)
    with pytest.raises(ConfigError, match="5000 tokens"):
        rows(folder, room=2_000, grid=Grid(5_000, 6_000, 2, 2))


def test_a_folder_without_text_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needle/\*\*/\*\.txt"):
        rows(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="0 tokens of text"):
        rows(tmp_path)


def test_ready_made_rows_go_first(folder: Path) -> None:
    line = '{"input": "q", "context": "c", "answers": ["x"], "_id": "made"}\n'
    (folder / "needle" / "rows.jsonl").write_text(line, encoding="utf-8")
    assert [row.id for row in rows(folder)] == ["made"]


def test_a_haystack_ends_with_a_sentence() -> None:
    hay = Haystack(("A b. ", "C d. ", "E f. "), (2, 4, 6), "x:1")
    assert hay.hide("N!", 3, 0.0) == "N! A b. C d. "
    assert hay.hide("N!", 3, 0.5) == "A b. N! C d. "
    assert hay.hide("N!", 6, 1.0) == "A b. C d. E f. N! "

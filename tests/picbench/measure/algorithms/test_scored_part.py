"""Parts of a measurement: written, read, and continued only with the same settings."""

from dataclasses import replace
from pathlib import Path

import pytest

from picbench.errors import ConfigError, DataError
from picbench.experiments.arm_scores import ArmRows, Case, ScoredPart, read_parts

FACTS = {"gpu": "G", "driver": "D", "commit": "C"}


def part(rows: int = 2, arms: tuple[str, ...] = ("full", "mepic")) -> ScoredPart:
    found = ScoredPart.begin(Case("testbed", "musique"), 200, FACTS, arms)
    for row in range(rows):
        found.prompt.append(100 + row)
        found.chunk.append(80)
        for number, arm in enumerate(arms):
            found.arms[arm].score.append(number / 2)
            found.arms[arm].linked.append(16)
            found.arms[arm].computed.append(36)
    return found


def test_a_part_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = part()
    written.write(tmp_path / "new")
    read = ScoredPart.read(tmp_path / "new" / "testbed-musique.json")
    assert read == written
    assert (read.rows, read.arms["mepic"]) == (2, ArmRows([0.5, 0.5], [16, 16], [36, 36]))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case("testbed:block", "needle"), "testbed-block-needle"),
        (Case("testbed", "musique", drop=True), "testbed-musique-drop"),
        (Case("testbed", "musique", first=130), "testbed-musique-from-130"),
    ],
)
def test_every_case_has_a_file_of_its_own(case: Case, name: str, tmp_path: Path) -> None:
    part().write(tmp_path)
    replace(part(), case=case).write(tmp_path)
    assert (tmp_path / f"{name}.json").exists()
    assert {found.case for found in read_parts(tmp_path)} == {case, Case("testbed", "musique")}


def test_a_part_goes_on_where_it_was_left_also_on_another_gpu() -> None:
    elsewhere = replace(part(0), facts=FACTS | {"gpu": "H", "driver": "E"})
    part().check_continues(elsewhere)


@pytest.mark.parametrize(
    "other",
    [
        replace(part(0), wanted=100),
        replace(part(0), facts=FACTS | {"commit": "other"}),
        part(0, arms=("full", "naive")),
    ],
)
def test_a_part_of_other_settings_is_not_continued(other: ScoredPart) -> None:
    with pytest.raises(ConfigError, match=r"`output`: testbed-musique\.json was measured"):
        part().check_continues(other)


@pytest.mark.parametrize("text", ["{}", "[]", '{"schema": 1}', '{"schema": 9}', "no json"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(DataError, match=r"other\.json: "):
        read_parts(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no scores of algorithms"):
        read_parts(tmp_path)

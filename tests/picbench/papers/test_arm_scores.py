"""Which arms are compared, what they link, parts of a measurement, and intervals over rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from picbench.engines.algorithms import Registry, names, parse
from picbench.errors import ConfigError, DataError
from picbench.papers.arm_scores import (
    ARMS_OF,
    DROP_ARMS,
    MEPIC,
    OWN,
    ArmRows,
    Case,
    RowInterval,
    ScoredPart,
    arms_of,
    difference_of,
    planned_links,
    ratio_of,
    read_parts,
)
from picbench.workloads.sample import Sample, SampleSegment

FACTS = {"gpu": "G", "driver": "D", "commit": "C"}


def part(rows: int = 2, arms: tuple[str, ...] = ("full", "mepic")) -> ScoredPart:
    found = {arm: ArmRows([n / 2] * rows, [16] * rows, [36] * rows) for n, arm in enumerate(arms)}
    case, prompts = Case("testbed", "musique"), [100 + row for row in range(rows)]
    return ScoredPart(case, 200, FACTS, found, prompts, [80] * rows)


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


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 1}', '{"schema": 9}', "no json"])
def test_another_file_or_none_is_refused(tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "other.json").write_text(text)
    with pytest.raises(DataError, match=r"other\.json: " if text else "no scores of algorithms"):
        read_parts(tmp_path)


def test_every_algorithm_is_compared_that_serves_prompts_as_they_are() -> None:
    compared = {arm.partition(":")[0] for arm in arms_of("testbed")}
    assert compared == set(names()) - {"reorder"}


@pytest.mark.parametrize("model", ARMS_OF)
def test_the_first_arm_is_full_recompute_and_none_is_twice(model: str) -> None:
    arms = arms_of(model)
    assert arms[0] == "full"
    assert len(arms) == len(set(arms)) == len(ARMS_OF[model])
    assert MEPIC in arms


def test_chosen_arms_are_beside_full_recompute() -> None:
    assert arms_of("testbed", only=("mepic", "mepic:blocks=1")) == ("full", "mepic")
    with pytest.raises(ConfigError, match="mepik"):
        arms_of("testbed", only=("mepik",))
    with pytest.raises(ConfigError, match="`model` testbed:blok: not a testbed") as error:
        arms_of("testbed:blok")
    assert "testbed:block" in error.value.hint


def test_arms_are_canonical_and_ours_are_among_them() -> None:
    registry = Registry()
    arms = {*DROP_ARMS, *(arm for model in ARMS_OF for arm in arms_of(model))}
    assert {registry.parse(arm).spec for arm in arms} == arms
    assert set(OWN) <= set(arms_of("testbed"))


def sample(*lengths: int) -> Sample:
    """A prompt of 20 tokens of text, chunks of these lengths, and a question of 10."""
    text = SampleSegment("text", "t", tuple(range(20)))
    chunks = [
        SampleSegment("chunk", "c", tuple(range(100 * n, 100 * n + length)))
        for n, length in enumerate(lengths, 1)
    ]
    question = SampleSegment("text", "q", tuple(range(10)))
    return Sample("s", "d", (text, *chunks, question), ("a",), max_tokens=4)


@pytest.mark.parametrize(
    ("spec", "linked"),
    [
        ("full", 80),
        ("naive", 0),
        ("epic:k=8", 8),
        ("epic:k=0", 0),
        ("epic:k=8:bos=chunk", 8),
        ("cacheblend:r=0.15", 12),
        ("cacheblend:r=0.5:select=first", 40),
        ("mepic", 32),
        ("mepic:blocks=2", 64),
        ("mepic:select=question", 32),
        ("mepic:anchored=on", 32),
        ("kvlink:n=5", 10),
        ("block-attention", 0),
        # 12 pads after the text; each chunk of 40 has 8 pads before it, in its first block.
        ("mepic:pad=paper", 12 + 32),
    ],
)
def test_two_chunks_of_forty(spec: str, linked: int) -> None:
    assert planned_links(sample(40, 40), parse(spec)) == linked


def test_a_short_chunk_is_linked_as_a_whole_and_documents_make_no_difference() -> None:
    assert planned_links(sample(40, 5), parse("mepic")) == 21
    first, *rest = sample(40, 40).segments
    before = SampleSegment("text", "b", tuple(range(500, 540)))
    chunks = [
        SampleSegment(s.kind, s.text, s.tokens, before if s.kind == "chunk" else None) for s in rest
    ]
    found = Sample("s", "d", (first, *chunks), (), max_tokens=4)
    assert planned_links(found, parse("mepic:context=document")) == 32


def test_rows_are_paired() -> None:
    hard = np.linspace(0.0, 1.0, 200)
    found = difference_of(hard * 0.9 + 0.1, hard * 0.9)
    assert (found.low, found.high) == (pytest.approx(0.1), pytest.approx(0.1))


def test_a_ratio_to_full_marks_is_the_mean() -> None:
    first = [0.5] * 100 + [1.0] * 100
    found = ratio_of(first, [1.0] * 200)
    same = difference_of(first, [0.0] * 200)
    assert found is not None
    assert found.value == pytest.approx(0.75)
    assert found.low == pytest.approx(same.low, abs=0.005)
    assert found.high == pytest.approx(same.high, abs=0.005)


def test_a_ratio_of_equal_arms_is_one_however_hard_rows_are() -> None:
    scores = [0.0, 1.0, 0.3, 0.7] * 5
    assert ratio_of(scores, scores) == RowInterval(1.0, 1.0, 1.0)
    assert difference_of(scores, scores) == RowInterval(0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="one row"):
        difference_of([1.0], [0.5])
    # One of four rows has something to divide by: a resample may have none.
    assert ratio_of([0.5] * 4, [1.0, 0.0, 0.0, 0.0]) is None


def test_ratios_cover_what_they_claim_where_few_rows_lose_much() -> None:
    """Percentiles of resamples cover 89 % here (400 trials), and 83 % of 20 rows."""
    draw = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        full = (draw.random(50) < 0.7) * draw.choice([0.5, 1.0], 50)
        one = np.where(draw.random(50) < 0.2, full * draw.random(50), full)
        found = ratio_of(list(one), list(full))
        assert found is not None
        covered += found.low <= 0.9 <= found.high
    assert covered / 300 >= 0.92

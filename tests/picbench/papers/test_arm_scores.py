"""Which arms are compared, what they link, files of scores, intervals over rows, and their page."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness_fakes import GPU_FACTS
from printed_figure import check_printed

from picbench.engines.algorithms import Registry, names, parse
from picbench.errors import ConfigError, DataError
from picbench.papers.arm_scores import (
    ARMS_OF,
    DROP_ARMS,
    MEPIC,
    ORDERS,
    OWN,
    ArmRows,
    Case,
    ScoredPart,
    arms_of,
    difference_of,
    judge_order,
    model_and_arm,
    planned_links,
    ratio_of,
    read_parts,
    scored_page,
)
from picbench.run.measurements import ScoredPage
from picbench.workloads.sample import Sample, SampleSegment

BEST = "mepic:anchor=head:context=document"
COSTLY = "mepic:anchor=head"
FACTS = GPU_FACTS | {"dtype": "bfloat16", "eager": False, "seed": 0}


def part(
    dataset: str = "musique", own: float = 0.9, *, model: str = "testbed", drop: bool = False
) -> ScoredPart:
    """100 rows: full is right, naive half the time, ours as often as said."""
    shares = {"full": (1.0, 80), "naive": (0.5, 0), "mepic": (0.6, 32), BEST: (own, 32)}
    shares |= {COSTLY: (1.0, 33), "epic:k=16": (0.7, 16)}
    arms = {
        arm: ArmRows([1.0] * round(100 * s) + [0.0] * round(100 - 100 * s), [n] * 100, [50] * 100)
        for arm, (s, n) in shares.items()
    }
    return ScoredPart(Case(model, dataset, drop), 100, FACTS, arms, [110] * 100, [80] * 100)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case("testbed:block", "needle"), "testbed-block-needle"),
        (Case("testbed", "musique", drop=True), "testbed-musique-drop"),
        (Case("testbed", "musique", first=130), "testbed-musique-from-130"),
    ],
)
def test_every_case_has_a_file_of_its_own(case: Case, name: str, tmp_path: Path) -> None:
    found = replace(part(), case=case)
    part().write(tmp_path)
    found.write(tmp_path)
    assert ScoredPart.read(tmp_path / f"{name}.json") == found
    assert read_parts(tmp_path) == {case: found, part().case: part()}


def test_a_part_goes_on_with_its_own_settings_also_on_another_gpu() -> None:
    part().check_continues(replace(part(), provenance=FACTS | {"gpu": "H", "driver": "E"}))
    fewer = {arm: rows for arm, rows in part().arms.items() if arm != "naive"}
    others = ({"wanted": 90}, {"provenance": FACTS | {"commit": "other"}}, {"arms": fewer})
    for changes in others:
        with pytest.raises(ConfigError, match=r"`output`: testbed-musique\.json was measured"):
            part().check_continues(replace(part(), **changes))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 1}', '{"schema": 9}', "no json"])
def test_another_file_or_none_is_refused(tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "other.json").write_text(text)
    with pytest.raises(DataError, match=r"other\.json: " if text else "no scores of algorithms"):
        read_parts(tmp_path)


def test_every_algorithm_is_compared_that_serves_prompts_as_they_are() -> None:
    assert {arm.partition(":")[0] for arm in arms_of("testbed")} == set(names()) - {"reorder"}
    assert set(OWN) <= set(arms_of("testbed"))
    registry = Registry()
    arms = {*DROP_ARMS, *(arm for model in ARMS_OF for arm in arms_of(model))}
    assert {registry.parse(arm).spec for arm in arms} == arms
    for model, own in ARMS_OF.items():
        assert own[0] == "full" and MEPIC in own
        assert len(own) == len({*own}), model


def test_chosen_arms_are_beside_full_recompute() -> None:
    assert arms_of("testbed", only=("mepic", "mepic:blocks=1")) == ("full", "mepic")
    with pytest.raises(ConfigError, match="mepik"):
        arms_of("testbed", only=("mepik",))
    with pytest.raises(ConfigError, match="`model` testbed:blok: not a testbed") as error:
        arms_of("testbed:blok")
    assert "testbed:block" in error.value.hint


def sample(*lengths: int, before: SampleSegment | None = None) -> Sample:
    """A prompt of 20 tokens of text, chunks of these lengths, and a question of 10."""
    text = SampleSegment("text", "t", tuple(range(20)))
    chunks = [
        SampleSegment("chunk", "c", tuple(range(100 * n, 100 * n + length)), before)
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
        ("mepic:anchor=head", 32),
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
    documents = sample(40, 40, before=SampleSegment("text", "b", tuple(range(500, 540))))
    assert planned_links(documents, parse("mepic:context=document")) == 32


def test_rows_are_paired_and_ratios_need_something_to_divide_by() -> None:
    hard = np.linspace(0.0, 1.0, 200)
    found = difference_of(hard * 0.9 + 0.1, hard * 0.9)
    # One more row may have lost or won a whole score.
    assert found == pytest.approx((0.1, 0.08, 0.116), abs=0.002)
    with pytest.raises(ValueError, match="one row"):
        difference_of([1.0], [0.5])
    first = [0.5] * 100 + [1.0] * 100
    assert ratio_of(first, [1.0] * 200) == pytest.approx((0.75, 0.71, 0.785), abs=0.01)
    assert ratio_of(first, first) == pytest.approx((1.0, 0.976, 1.024), abs=0.003)
    assert ratio_of([0.5] * 4, [0.0] * 4) is None


def test_gains_in_nats_have_no_limits() -> None:
    gained, whole = [2.0, 3.0, 1.5, 2.5] * 25, [2.5, 3.5, 2.0, 3.0] * 25
    less = difference_of([nats - 4.0 for nats in gained], whole, nats=True)
    assert less == pytest.approx((-4.5, -4.5, -4.5))
    kept = ratio_of(gained, whole, nats=True)
    assert kept == pytest.approx((2.25 / 2.75, 0.811, 0.825), abs=0.002)
    assert ratio_of(gained, [-1.0, 1.0] * 50, nats=True) is None


def written(folder: Path, parts: Sequence[ScoredPart]) -> list[str]:
    for found in parts:
        found.write(folder / "parts")
    page = scored_page(ScoredPage(parts=folder / "parts", output=folder / "out")).page
    assert (folder / "out" / "algorithms.md").read_text() == page
    return page.splitlines()


def test_rows_that_nothing_can_be_compared_with_are_refused(tmp_path: Path) -> None:
    wrong = part()
    wrong.arms["full"].score = [0.0] * 100
    with pytest.raises(DataError, match="testbed-musique: full recompute answers none of 100 rows"):
        written(tmp_path, [wrong])


def test_the_page_has_tables_orders_and_the_frontier(tmp_path: Path) -> None:
    tuned = part("musique", 0.9, model="testbed:block")
    tuned.arms["block-attention"] = tuned.arms[BEST]
    lines = written(tmp_path, [part("needle", 0.98), part("musique", 1.0), tuned])
    assert "| arm | musique | needle |" in lines
    assert "| `naive` | 0.500 (0) | 0.500 (0) |" in lines
    [row] = [line for line in lines if line.startswith(f"| `{BEST}` | yes")]
    assert "0.980 [0.9" in row and row.endswith("(needle) | 0 of 2 | none | none |")
    [costly] = [line for line in lines if line.startswith(f"| `{COSTLY}` | no | 1.000 ")]
    assert costly.endswith("| 0 of 2 | none | musique, needle |")
    assert lines.index(row) < lines.index(costly)
    [order] = [line for line in lines if line.startswith("| mepic >= epic:k=16 |")]
    assert "fails -0.100 [" in order
    assert "## testbed:block" in lines
    assert "G, driver D, vLLM V" in lines[2]
    assert "100 rows, of tuned models 100." in (tmp_path / "out" / "algorithms.svg").read_text()
    check_printed(tmp_path / "out" / "algorithms")
    noted = json.loads((tmp_path / "out" / "algorithms.json").read_text())
    naive = noted["workloads"]["testbed"]["musique"]["naive"]
    assert (naive["score"], naive["rows"], naive["linked"], naive["share"]) == (0.5, 100, 0, 0.0)
    assert naive["kept"] == pytest.approx([0.5, 0.4, 0.6], abs=0.03)
    assert naive["difference"] == pytest.approx([-0.5, -0.6, -0.4], abs=0.03)
    [pairs] = [o["pairs"] for o in noted["orders"] if o["claim"] == "mepic >= epic:k=16"]
    assert [pair["verdict"] for pair in pairs] == ["fails", "fails"]
    assert pairs[0]["better"] == ["testbed", "mepic"]
    assert pairs[0]["difference"]["value"] == pytest.approx(-0.1)


def test_other_prompts_and_other_rows_are_workloads_of_their_own(tmp_path: Path) -> None:
    rest = replace(part("musique", 0.7), case=Case("testbed", "musique", first=100))
    others = [part("needle", 0.96), part("musique", 0.5, drop=True), rest]
    lines = written(tmp_path, [part("musique", 0.99), *others])
    # The frontier is reached on every data set or not at all.
    [row] = [line for line in lines if line.startswith(f"| `{BEST}` | no | 0.960 ")]
    assert row.endswith("(needle) | 0 of 2 | needle | none |")
    assert "## testbed, rows from 100 on" in lines
    at = lines.index("## testbed, lead passages left out")
    assert f"| `{BEST}` | 0.500 (32) |" in lines[at:]
    assert f"| `{BEST}` | 0.990 (32) | 0.960 (32) |" in lines[:at]


def rows_of(model: str = "testbed", **scores: Sequence[float]) -> ScoredPart:
    arms = {arm: ArmRows([*found], [], []) for arm, found in scores.items()}
    return ScoredPart(Case(model, "musique"), 100, {}, arms)


HALF = [1.0, 0.0] * 50


def test_orders_hold_fail_or_are_undecided() -> None:
    ones, mixed = [1.0] * 100, [*HALF[:98], 0.0, 1.0]
    pairs = {(0, 1): "holds", (1, 1): "undecided", (1, 0): "fails", (1, 2): "undecided"}
    for (first, second), verdict in pairs.items():
        scores = (ones, HALF, mixed)
        found = rows_of(full=scores[first], naive=scores[second])
        [step] = judge_order(("full", "naive"), {found.case: found})
        assert step.verdict == verdict


def test_a_tuned_model_is_compared_with_the_untuned_one() -> None:
    tuned, plain = rows_of("testbed:link", naive=[1.0] * 20), rows_of(naive=[0.5] * 20)
    order = ("testbed:link/naive", "naive")
    [step] = judge_order(order, {tuned.case: tuned, plain.case: plain})
    assert (step.better, step.worse) == (("testbed:link", "naive"), ("testbed", "naive"))
    assert (step.difference.value, step.verdict) == (pytest.approx(0.5), "holds")
    assert judge_order(order, {plain.case: plain}) == []


def test_every_arm_of_an_order_is_measured() -> None:
    for _, order in ORDERS:
        for model, arm in map(model_and_arm, order):
            assert arm in arms_of(model)

"""The ablation's page: ratios within repeats, paired scores, and what it calls negligible."""

from math import sqrt
from typing import Any

import pytest
from harness_fakes import GPU_FACTS

from picbench.experiments.rope_pad import PairedScores, paired_scores, ratios, render

SETTINGS = {"model": "M", "device": "cuda", "dtype": "bfloat16", "chunks": 64}
FACTS = GPU_FACTS | {
    "settings": SETTINGS | {"repeats": 3, "rows": 2, "eager": False},
    "block_bytes": 2 << 20,
    "cores": 16,
    "load": [1.0, 2.0, 3.25],
    "chunk": 504,
    "question": 80,
    "plain": 8064,
    "reply": 64,
}


def figures(factor: float) -> dict[str, list[float]]:
    """Three repeats, each twice as long as the one before; the paper's pads take 1.5 times."""
    found = {f"masked {name}": [100.0, 200.0, 400.0] for name in ("ttft_ms", "tpot_ms")}
    found |= {name: [10.0, 20.0, 40.0] for name in ("ttft_ms", "tpot_ms")}
    found = {name: [value * factor for value in values] for name, values in found.items()}
    found |= {
        f"paper {name}": [1.5 * value for value in found[f"masked {name}"]]
        for name in ("ttft_ms", "tpot_ms")
    }
    for pad, held in {"masked": 70.0, "paper": 74.0}.items():
        found |= {f"{pad} blocks": [held] * 3, f"{pad} own_blocks": [held - 62] * 3}
        found[f"{pad} linked"] = [held / 2] * 3
    return found | {"workspace_mib": [5.0, 9.0, 9.0]}


def timed(factor: float) -> dict[str, dict[str, list[float]]]:
    return {"default": figures(1.0), "fused": figures(factor)}


def scored(fused_paper: float = 1.0) -> dict[str, dict[str, list[float]]]:
    """Two rows of two sets: all right, but for the paper's pads on one row."""
    rows = [f"{name} {n}" for name in ("musique", "needle") for n in range(2)]
    right = {f"{pad} {row}": [1.0] for pad in ("masked", "paper") for row in rows}
    return {
        "default": right | {"paper needle 1": [0.0]},
        "fused": right | {"paper musique 0": [fused_paper]},
    }


def page(factor: float, **facts: Any) -> str:
    return render(timed(factor), scored(), FACTS | facts)


def test_ratios_are_taken_within_repeats() -> None:
    """Over all repeats one value is four times another; within each they are 1.25 apart."""
    found = ratios(timed(1.25), "fused", "masked ttft_ms", "masked ttft_ms")
    assert (found.q25, found.median, found.q75, found.n) == (1.25, 1.25, 1.25, 3)
    assert ratios(timed(1.25), "default", "paper ttft_ms", "masked ttft_ms").median == 1.5


def test_scores_are_compared_row_by_row() -> None:
    found = paired_scores(scored(), "default", "paper")
    assert (found.mean, found.difference, found.changed, found.n) == (0.75, -0.25, 1, 4)
    assert found.error == pytest.approx(0.5 / sqrt(4))
    assert paired_scores(scored(), "default", "paper", "musique ").difference == 0
    assert paired_scores(scored(0.5), "fused", "paper", "musique ").mean == 0.75


def test_differences_that_cancel_each_other_are_still_seen() -> None:
    found = PairedScores.of([1.0, 0.0], [0.0, 1.0])
    assert (found.difference, found.changed) == (0.0, 2)
    assert found.error == pytest.approx(1.0)


def test_each_cell_has_a_row_and_the_first_is_what_others_are_compared_with() -> None:
    rows = [line for line in page(1.25).splitlines() if line.startswith("| with")]
    assert len(rows) == 10
    first = "| with RoPE, re-rotated by the shift | masked | 200.0 (150.0 - 300.0) "
    assert rows[0].startswith(first + "| 1.000 (1.000 - 1.000) |")
    assert rows[0].endswith("| 70 | 8 | 140.0 | 35 |")
    assert "| paper | 300.0 (225.0 - 450.0) | 1.500 (1.500 - 1.500) |" in rows[1]
    assert rows[1].endswith("| 74 | 12 | 148.0 | 37 |")
    assert "| 1.250 (1.250 - 1.250) |" in rows[2]
    assert rows[7].endswith("| 1.000 | 0.500 | 0.750 | -0.250 ± 0.250 | 1 of 4 |")


@pytest.mark.parametrize(
    ("factor", "word"),
    [(1.015, "negligible"), (0.985, "negligible"), (1.25, "more"), (0.9, "less")],
)
def test_what_is_negligible_is_said_by_the_numbers(factor: float, word: str) -> None:
    told = page(factor)
    ratio = f"{factor:.3f} ({factor:.3f} - {factor:.3f}) of the default's, {word};"
    assert f"- time per token without chunks: {ratio}" in told
    assert f"- time to the first token after cached chunks, every key without RoPE: {ratio}" in told
    assert "- score: -0.250 ± 0.250 with the paper's pads, +0.000 ± 0.000 with every key" in told


def test_a_spread_over_both_sides_of_1_decides_nothing() -> None:
    found = timed(1.0)
    found["fused"]["tpot_ms"] = [9.0, 20.0, 44.0]
    told = render(found, scored(), FACTS)
    ratio = "1.000 (0.950 - 1.050) of the default's"
    assert f"- time per token without chunks: {ratio}, not to be told from 1 in this spread" in told


def test_the_page_says_what_the_device_does_with_keys() -> None:
    settings = FACTS["settings"] | {"device": "cpu", "eager": True}
    told = page(1.0, settings=settings, block_bytes=0)
    assert "| chunks' without RoPE, others with it | masked |" in told
    load = "16 cores, load average 3.2 over the last 15 minutes"
    assert f"bfloat16, eager; {load}. Times and blocks: M, 64 cached chunks of 504" in told
    assert "| 70 | 8 | - | 35 |" in told

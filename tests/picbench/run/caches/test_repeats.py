"""Runs that measure everything several times, each time from caches as at the first."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import Harness, PicEngine, make_reusing_samples, run_fakes

from picbench.store.reader import read_run

ARMS = ("full", "prefix", "mepic")


def harness(**settings: Any) -> Harness:
    engines = {name: PicEngine(name, capacity=9) for name in ARMS}
    return Harness(make_reusing_samples(5), engines=engines, **settings)


TIMES = (0.0, 0.1, 0.2, 0.3, 0.4)


@pytest.mark.parametrize(
    ("state", "arrivals"),
    [(None, None), ("cold", None), ("warm", None), (None, TIMES), ("warm", TIMES)],
)
def test_repeats_begin_alike(
    state: str | None, arrivals: tuple[float, ...] | None, tmp_path: Path
) -> None:
    run_fakes(harness(arrivals=arrivals), tmp_path, *ARMS, cache=state, repeats=3, concurrency=1)
    rows = read_run(tmp_path).rows
    for arm in ARMS:
        own = [row for row in rows if row.arm == arm]
        assert [row.repeat for row in own] == [0] * 5 + [1] * 5 + [2] * 5
        assert sorted({row.round for row in own}) == list(range(3 if arrivals else 15))
        counts = [(row.sample, row.tokens, row.expected_reuse) for row in own]
        assert counts[:5] == counts[5:10] == counts[10:]
    summary = json.loads((tmp_path / "summary.json").read_text())["arms"]["mepic"]
    assert summary["requests"] == 15
    assert summary["ttft_vs_full"]["pairs"] == 15


def test_arms_begin_in_turn_in_open_loops_too(tmp_path: Path) -> None:
    found = harness(arrivals=(0.0,) * 5)
    run_fakes(found, tmp_path, *ARMS, repeats=3)
    served = [entry for entry in found.order if entry in ARMS]
    assert len({tuple(served[start : start + 3]) for start in (0, 3, 6)}) == 3
    assert all({*served[start : start + 3]} == {*ARMS} for start in (0, 3, 6))


def test_prompts_are_reordered_anew_in_each_repeat(tmp_path: Path) -> None:
    samples = make_reusing_samples(12)
    run_fakes(Harness(samples), tmp_path, "prefix", "reorder", repeats=2, concurrency=1)
    sent = [row.prompt_sha256 for row in read_run(tmp_path).rows if row.arm == "reorder"]
    assert sent[:12] == sent[12:]

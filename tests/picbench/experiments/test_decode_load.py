"""Decoding under load: scenes, figures of waves, pages; and waves in a real engine."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from harness_fakes import GPU_FACTS
from printed_figure import check_printed

from picbench.engines.engine import Engine
from picbench.engines.request import Hits, Result, Timings, TokenCounts
from picbench.errors import InvalidRun
from picbench.experiments.decode_load import (
    AUTO,
    COMMON,
    DECODE_LOAD,
    DECODE_SHARING,
    DECODE_SIZES,
    OFF,
    PREFIX,
    load_plan,
    render_load,
    sharing_plan,
)
from picbench.experiments.waves import (
    DecodeScene,
    WaveTimes,
    brief_wave,
    decode_figures,
    decode_wave,
)
from picbench.run.measurements import DecodeUnderLoad
from picbench.run.runner import RoundsRecord
from picbench.tables.page import update_summary

SCENE = DecodeScene(4, 2, 4, 40, 9, 12)


def result(ttft: float, e2e: float) -> Result:
    return Result("", (1,) * 6, (), Timings(ttft, 0.0, None, e2e), TokenCounts(), Hits())


def test_figures_are_of_the_time_in_which_all_decode() -> None:
    steps = [10.0, 11.0, 12.0, 12.5, 13.0, 13.5, 14.0, 20.0]
    sent = [(9.0, 9.1), (9.2, 9.4)]
    # The last request to start has its five later tokens from 11.9 to 14.3: in five steps.
    times = WaveTimes(9.0, steps, sent, [result(1.0, 9.0), result(2.5, 4.9)])
    found = decode_figures(times, 6)
    # From 9.4 + 2.5 to 9.2 + 4.9: steps at 12, 12.5, ... 14.
    assert (found["steps"], found["in_flight"]) == (4, 2)
    assert found["decode_tokens_s"] == pytest.approx(2 * 4 / 2.0)
    assert found["tpot_ms"] == pytest.approx(500.0)
    assert found["tokens_s"] == pytest.approx(12 / 11.0)
    twice = sorted([*steps, *(step + 0.25 for step in steps[2:-1])])
    empty = decode_figures(replace(times, steps=twice), 6)
    assert empty["tokens_a_step"] == pytest.approx(0.5)
    assert empty["decode_tokens_s"] == pytest.approx(found["decode_tokens_s"])
    assert empty["tpot_ms"] == pytest.approx(found["tpot_ms"])
    with pytest.raises(InvalidRun, match="decoded together for 0 steps"):
        decode_figures(replace(times, results=[result(1.0, 2.0), result(2.5, 4.9)]), 6)


@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16, 32, 64])
def test_each_chunk_has_as_many_readers_as_the_degree_and_all_fit(degree: int) -> None:
    load = DECODE_SIZES["cuda"]
    scene = replace(load.at(degree), length=3)
    assert load.at(degree).blocks <= load.sharing_pool
    drawn = scene.draw("a", scene.requests, "mepic")
    readers = Counter(segment.tokens for r in drawn for segment in r.segments[:-1])
    assert set(readers.values()) == {degree}
    assert all(len(set(r.segments[:-1])) == scene.chunks for r in drawn)
    assert drawn != scene.draw("b", scene.requests, "mepic")


def test_the_load_is_that_of_the_page() -> None:
    settings = DecodeUnderLoad(model="shape:tiny", commit="c")
    plan = load_plan(settings.model_copy(update={"reply": 100}))
    scene = DECODE_SIZES["cuda"].scene
    assert (scene.prompt, scene.requests, scene.sharing) == (32_336, 64, 32.0)
    assert scene.blocks <= plan.engines[OFF].kv_blocks == plan.engines["stock"].kv_blocks
    assert plan.engines[AUTO] == replace(plan.engines[OFF], shared_decode="auto")
    assert plan.engines["stock"].stock
    assert (plan.facts["scene"]["reply"], scene.reply) == (100, 512)
    assert scene.plain_fit(12_000) == 5
    assert scene.common_fit(12_000) == 64
    assert len(sharing_plan(settings).cells) == 7


def found(
    path: Path, cells: dict[str, dict[str, dict[str, list[float]]]], **facts: object
) -> RoundsRecord:
    known = GPU_FACTS | {"model": "M", "dtype": "bfloat16", "pool": 99} | facts
    seconds = {cell: [1.0, 1.0] for cell in cells}
    return RoundsRecord(path, known, cells, seconds, {OFF: [], AUTO: ["k"]})


def figures(rate: float) -> dict[str, list[float]]:
    values = [rate, rate * 1.1]
    names = ("tokens_s", "decode_tokens_s", "tpot_ms", "tpot_p99_ms", "ttft_ms", "in_flight")
    counts = {"preemptions": [0, 2], "compiled_tokens": [7, 0], "tokens_a_step": [1.0, 0.97]}
    return dict.fromkeys(names, values) | counts


def test_the_load_s_page_and_figures(tmp_path: Path) -> None:
    rates = {OFF: 10.0, AUTO: 40.0, PREFIX: 20.0, COMMON: 80.0}
    scene = {"requests": 64, "chunks": 64, "corpus": 128, "length": 504, "question": 80, "reply": 9}
    made = found(
        tmp_path / "decode-load.json",
        {"load": {arm: figures(r) for arm, r in rates.items()}},
        scene=scene,
        prompt=32336,
    )
    update_summary(tmp_path, {"shared_decode": {"layer_ms": 0.3}})
    page = DECODE_LOAD.write(made)
    assert page == render_load(made) == (tmp_path / "decode-load.md").read_text()
    assert "as at 198d84a) | 10 | 10 (10 - 11)" in page
    assert "| stock vLLM, one common prefix | 0.500 (0.500 - 0.500, n=2) |" in page
    assert "compiled while measured: 28; requests that lost their blocks: 8" in page
    assert "A step gives a request 0.97 tokens or more." in page
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["shared_decode"] == pytest.approx(
        {
            "layer_ms": 0.3,
            "engine_throughput_vs_198d84a": 4.0,
            "engine_throughput_vs_prefix": 2.0,
            "tpot_ms": 42.0,
        }
    )


def test_nothing_measured_has_no_page(tmp_path: Path) -> None:
    for experiment in (DECODE_LOAD, DECODE_SHARING):
        assert experiment.write(found(tmp_path / "none.json", {})) == ""
    assert list(tmp_path.iterdir()) == []


def test_the_page_and_the_figure_of_sharing(tmp_path: Path) -> None:
    scene = {"requests": 4, "chunks": 2, "corpus": 8, "length": 504, "question": 80}
    cells = {d: {OFF: figures(8.0), AUTO: figures(8.0 * int(d))} for d in ("2", "1", "16")}
    made = found(tmp_path / "decode-sharing.json", cells, scenes=dict.fromkeys(cells, scene))
    page = DECODE_SHARING.write(made)
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    assert rows[2:] == ["| 1", "| 2", "| 16"]
    assert "| 8.40 (8.00 - 8.80) | 134.40 (128.00 - 140.80) | 16.000" in page
    assert ">time per token, ms<" in check_printed(tmp_path / "decode-sharing")


@pytest.mark.engine
def test_waves_in_an_engine(small_engine: Engine) -> None:
    for common in (False, True):
        assert brief_wave(small_engine, "0", scene=replace(SCENE, reply=2), common=common) == {}
        found = decode_wave(small_engine, "1", scene=SCENE, common=common)
        assert found["in_flight"] == 4
        assert (found["compiled_tokens"], found["preemptions"]) == (0, 0)
        assert found["steps"] <= SCENE.reply
        assert found["decode_tokens_s"] > 0

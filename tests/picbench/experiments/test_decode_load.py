"""Decoding under load and on several GPUs: scenes, figures, pages; and waves in a real engine."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import GPU_FACTS
from printed_figure import check_printed

from picbench.engines.engine import Engine
from picbench.engines.request import Hits, Result, Timings, TokenCounts
from picbench.errors import InvalidRun
from picbench.experiments.decode_load import (
    AUTO,
    DECODE_LOAD,
    DECODE_SHARING,
    OFF,
    SCALING,
    SCENES,
    load_plan,
    reply_sums,
    scaling_plan,
    shared,
    sharing_plan,
)
from picbench.experiments.waves import DecodeScene, decode_figures, decode_wave
from picbench.run.measurements import DecodeUnderLoad, Scaling
from picbench.run.runner import ExperimentPlan, RoundsRecord
from picbench.tables.page import update_summary


def result(ttft: float, e2e: float) -> Result:
    return Result("", (1,) * 6, (), Timings(ttft, 0.0, None, e2e), TokenCounts(), Hits())


def test_figures_are_of_the_time_in_which_all_decode() -> None:
    steps = [9.0, 10.0, 11.0, 12.0, 12.5, 13.0, 13.5, 14.0, 20.0]
    # The last request to start has its five later tokens from 11.9 to 14.3: in five steps.
    last = (9.2, 9.4, result(2.5, 4.9))
    served = [(9.0, 9.1, result(1.0, 9.0)), last]
    found = decode_figures(steps, served, 6)
    # From 9.4 + 2.5 to 9.2 + 4.9: steps at 12, 12.5, ... 14.
    assert (found["steps"], found["in_flight"]) == (4, 2)
    assert found["decode_tokens_s"] == pytest.approx(2 * 4 / 2.0)
    assert found["tpot_ms"] == pytest.approx(500.0)
    assert found["tokens_s"] == pytest.approx(12 / 11.0)
    twice = sorted([*steps, *(step + 0.25 for step in steps[3:-1])])
    empty = decode_figures(twice, served, 6)
    assert empty["tokens_a_step"] == pytest.approx(0.5)
    assert empty["decode_tokens_s"] == pytest.approx(found["decode_tokens_s"])
    assert empty["tpot_ms"] == pytest.approx(found["tpot_ms"])
    with pytest.raises(InvalidRun, match="decoded together for 0 steps"):
        decode_figures(steps, [(9.0, 9.1, result(1.0, 2.0)), last], 6)


@pytest.mark.parametrize("degree", [1, 8, 64])
def test_each_chunk_has_as_many_readers_as_the_degree_and_all_fit(degree: int) -> None:
    found = shared(replace(SCENES["cuda"], even=True), degree, 22_000)
    assert found.blocks <= 22_000
    scene = replace(found, length=3)
    drawn = scene.draw("a", "mepic")
    readers = Counter(segment.tokens for r in drawn for segment in r.segments[:-1])
    assert set(readers.values()) == {degree}
    assert all(len(set(r.segments[:-1])) == scene.chunks for r in drawn)
    assert drawn != scene.draw("b", "mepic")


def test_the_load_is_that_of_the_page() -> None:
    settings = DecodeUnderLoad(model="shape:tiny", commit="c")
    plan = load_plan(settings.model_copy(update={"reply": 100}))
    scene = SCENES["cuda"]
    assert (scene.prompt, scene.requests) == (32_336, 64)
    assert scene.blocks <= plan.engines[OFF].kv_blocks == plan.engines["stock"].kv_blocks
    assert plan.engines[AUTO] == replace(plan.engines[OFF], shared_decode="auto")
    assert plan.engines["stock"].stock
    assert (plan.facts["scene"]["reply"], scene.reply) == (100, 512)
    counts = {
        arm: served.measure.keywords["scene"].requests  # type: ignore[attr-defined]
        for arm, served in plan.cells[0].arms.items()
    }
    assert counts == {OFF: 64, AUTO: 64, "prefix": 5, "common": 64, "own-common": 64}
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
    rates = {OFF: 10.0, AUTO: 40.0, "prefix": 20.0, "common": 80.0}
    scene = {"requests": 64, "chunks": 64, "corpus": 128, "length": 504, "question": 80, "reply": 9}
    cells = {"load": {arm: figures(rate) for arm, rate in rates.items()}}
    made = found(tmp_path / "decode-load.json", cells, scene=scene, prompt=32336)
    update_summary(tmp_path, {"shared_decode": {"layer_ms": 0.3}})
    page = DECODE_LOAD.write(made)
    assert page == (tmp_path / "decode-load.md").read_text()
    assert "as at 198d84a) | 10 | 10 (10 - 11)" in page
    assert "| stock vLLM, one common prefix | 0.500 (0.500 - 0.500, n=2) |" in page
    assert "compiled while measured: 28; requests that lost their blocks: 8" in page
    assert "A step gives a request 0.97 tokens or more." in page
    assert json.loads((tmp_path / "summary.json").read_text())["shared_decode"] == pytest.approx(
        {
            "layer_ms": 0.3,
            "engine_throughput_vs_198d84a": 4.0,
            "engine_throughput_vs_prefix": 2.0,
            "tpot_ms": 42.0,
        }
    )


def test_the_page_and_the_figure_of_sharing(tmp_path: Path) -> None:
    scene = {"requests": 4, "chunks": 2, "corpus": 8, "length": 504, "question": 80}
    cells = {d: {OFF: figures(8.0), AUTO: figures(8.0 * int(d))} for d in ("2", "1", "16")}
    made = found(tmp_path / "decode-sharing.json", cells, scenes=dict.fromkeys(cells, scene))
    page = DECODE_SHARING.write(made)
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    assert rows[2:] == ["| 1", "| 2", "| 16"]
    assert "| 8.40 (8.00 - 8.80) | 134.40 (128.00 - 140.80) | 16.000" in page
    assert ">time per token, ms<" in check_printed(tmp_path / "decode-sharing")


def test_nothing_measured_has_no_page(tmp_path: Path) -> None:
    for experiment in (DECODE_LOAD, DECODE_SHARING, SCALING):
        assert experiment.write(found(tmp_path / "none.json", {}, workers=2)) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine
def test_waves_in_an_engine(small_engine: Engine) -> None:
    scene = DecodeScene(4, 2, 4, 40, 9, 12)
    for common in (False, True):
        assert decode_wave(small_engine, "0", scene=scene, common=common, brief=True) == {}
        made = decode_wave(small_engine, "1", scene=scene, common=common)
        assert made["in_flight"] == 4
        assert (made["compiled_tokens"], made["preemptions"]) == (0, 0)
        assert made["steps"] <= scene.reply
        assert made["decode_tokens_s"] > 0


def scaled(**settings: Any) -> ExperimentPlan:
    return scaling_plan(Scaling(**{"model": "shape:tiny", "commit": "c"} | settings))


def test_engines_differ_in_nothing_but_their_gpus(tmp_path: Path) -> None:
    plan = scaled()
    engines = plan.engines
    assert [cell.name for cell in plan.cells] == ["8144", "16208", "32336", "replies"]
    for who in ("mepic", "stock", "replies"):
        one, two = engines[f"{who} x1"], engines[f"{who} x2"]
        assert (one.tensor_parallel, two.tensor_parallel) == (1, 2)
        assert replace(two, tensor_parallel=1) == one
    stock = replace(engines["mepic x1"], stock=True, algorithm="prefix", shared_decode="off")
    assert engines["stock x1"] == stock
    assert not any(config.eager for config in engines.values())
    assert engines["replies x2"].dtype == "float32"
    assert set(plan.cells[0].arms) == {"mepic x1", "mepic x2", "stock x1", "stock x2"}
    assert engines["replies x2"].model != scaled(workers=4).engines["replies x4"].model
    asked = Scaling(model="shape:tiny", estimate=True, output=tmp_path)
    assert SCALING.measure(asked).page.startswith("0 of 10 cells measured; left: about ")


def test_flags_of_the_engine_are_for_our_engines_alone() -> None:
    plain, without, larger = scaled(), scaled(shared_decode="off"), scaled(graph_tokens=4096)
    for name, config in plain.engines.items():
        assert replace(config, shared_decode="off") == without.engines[name]
        tokens = 4096 if name.startswith("mepic") else None
        assert larger.engines[name] == replace(config, graph_tokens=tokens)
    assert plain.engines["mepic x2"].shared_decode == "auto"
    assert "graph_tokens" not in plain.facts
    assert larger.facts["graph_tokens"] == 4096


@pytest.mark.parametrize("device", SCENES)
def test_all_requests_fit_the_pools(device: str) -> None:
    plan = scaled(device=device)
    for cell in plan.cells:
        for arm, served in cell.arms.items():
            scene = served.measure.keywords["scene"]  # type: ignore[attr-defined]
            assert scene.blocks <= plan.engines[arm].kv_blocks


def test_the_page_and_the_summary_of_several_gpus(tmp_path: Path) -> None:
    scene = {"requests": 64, "length": 504, "question": 80, "reply": 128}
    made = found(tmp_path / "scaling-2.json", {}, workers=2, shared_decode="auto")
    made.facts = made.facts | {"scenes": {"9000": scene, "800": scene}, "graph_tokens": 4096}
    made.facts |= {"replies": {"model": "R", "dtype": "float32", "reply": 8}}
    # Two GPUs over one: 1.5 and 1.2 of ours, 1.6 and 1.0 of stock vLLM's.
    for length, ours, stock in (("9000", 1.5, 1.6), ("800", 1.2, 1.0)):
        rates = {"mepic x1": 10.0, "mepic x2": 10 * ours, "stock x1": 5.0, "stock x2": 5 * stock}
        for factor in (1.0, 2.0):
            values = {arm: {"tokens_s": rate * factor} for arm, rate in rates.items()}
            made.add(length, {a: v | {"tpot_ms": 9.0, "ttft_ms": 8} for a, v in values.items()}, 1)
    made.add("replies", {"replies x1": {"0": 5, "1": 6}, "replies x2": {"0": 5, "1": 7}}, 1)
    page = SCALING.write(made)
    assert page == (tmp_path / "scaling-2.md").read_text()
    assert "| 800 | mepic x2 | 2 | 18 (12 - 24) | 9.00" in page
    assert page.index("| 800 | stock x2 |") < page.index("| 9,000 | mepic x1 |")
    assert "| 9,000 | 1.500 (1.500 - 1.500, n=2) | 1.600" in page
    assert "| 0.937 (0.937 - 0.937, n=2) |" in page
    assert "R in float32, on 2 GPUs and on one: 1 of 2 replies of 8" in page
    assert "(shared decode: auto, CUDA graphs: 4,096 tokens)" in page
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "tp2_scaling": pytest.approx(1.5),
        "tp2_vs_stock_tp2": pytest.approx(1.5 / 1.6),
    }
    del made.cells["9000"], made.cells["replies"]
    assert SCALING.figures(made)["tp2_vs_stock_tp2"] == pytest.approx(1.2)
    assert "replies of 8" not in SCALING.render(made)


@pytest.mark.engine
def test_replies_of_an_engine_have_the_same_sums_again(small_engine: Engine) -> None:
    scene = DecodeScene(2, 2, 4, 20, 9, 6)
    sums = reply_sums(small_engine, "a", scene=scene)
    assert list(sums) == ["0", "1"]
    assert reply_sums(small_engine, "a", scene=scene) == sums
    assert reply_sums(small_engine, "b", scene=scene) != sums

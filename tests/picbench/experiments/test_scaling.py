"""Several GPUs against one, and stock vLLM: the engines, the page, and replies of a real one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import GPU_FACTS

from picbench.engines.engine import Engine
from picbench.experiments.decode_load import (
    SCALING,
    SCALING_SIZES,
    render_scaling,
    reply_sums,
    scaling_figures,
    scaling_plan,
)
from picbench.experiments.waves import DecodeScene
from picbench.run.measurements import Scaling
from picbench.run.runner import ExperimentPlan, RoundsRecord


def plan_of(**settings: Any) -> ExperimentPlan:
    return scaling_plan(Scaling(**{"model": "shape:tiny", "commit": "c"} | settings))


def test_engines_differ_in_nothing_but_their_gpus(tmp_path: Path) -> None:
    plan = plan_of()
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
    assert engines["replies x2"].model != plan_of(workers=4).engines["replies x4"].model
    asked = Scaling(model="shape:tiny", estimate=True, output=tmp_path)
    assert SCALING.measure(asked).page.startswith("0 of 10 cells measured; left: about ")


def test_shared_decode_can_be_left_out() -> None:
    known, without = (plan_of(shared_decode=mode).engines for mode in ("auto", "off"))
    for name, config in known.items():
        assert replace(config, shared_decode="off") == without[name]
    assert known["mepic x2"].shared_decode == "auto"


def test_graphs_are_those_of_picbenchs_engines() -> None:
    plain, larger = (plan_of(graph_tokens=tokens) for tokens in (None, 4096))
    for name, config in larger.engines.items():
        tokens = 4096 if name.startswith("mepic") else None
        assert config == replace(plain.engines[name], graph_tokens=tokens)
    assert "graph_tokens" not in plain.facts
    assert larger.facts["graph_tokens"] == 4096
    page = render_scaling(replace(found(), facts=found().facts | {"graph_tokens": 4096}))
    assert (
        "`mepic` is an engine of picbench (shared decode: auto, CUDA graphs of up to 4,096" in page
    )
    assert "CUDA graphs" not in render_scaling(found())


def test_all_requests_fit_the_pools() -> None:
    for sizes in SCALING_SIZES.values():
        for chunks in sizes.lengths:
            scene = sizes.at(chunks)
            assert scene.blocks <= sizes.pool
            assert scene.common_fit(sizes.pool) == scene.requests
        assert sizes.replies.blocks <= sizes.replies_pool


def found(folder: Path = Path()) -> RoundsRecord:
    scene = {"requests": 64, "length": 504, "question": 80, "reply": 128}
    facts = GPU_FACTS | {"model": "M", "dtype": "bfloat16", "pool": 99, "workers": 2}
    facts["shared_decode"] = "auto"
    facts |= {"scenes": {"9000": scene, "800": scene}}
    facts["replies"] = {"model": "R", "dtype": "float32", "reply": 8}
    made = RoundsRecord(folder / "scaling-2.json", facts)
    # Two GPUs over one: 1.5 and 1.2 of ours, 1.6 and 1.0 of stock vLLM's.
    for length, ours, stock in (("9000", 1.5, 1.6), ("800", 1.2, 1.0)):
        rates = {"mepic x1": 10.0, "mepic x2": 10 * ours, "stock x1": 5.0, "stock x2": 5 * stock}
        for factor in (1.0, 2.0):
            figures = {
                arm: {"tokens_s": rate * factor, "tpot_ms": 9.0, "ttft_ms": 8.0}
                for arm, rate in rates.items()
            }
            made.add(length, figures, 1.0)
    made.add("replies", {"replies x1": {"0": 5, "1": 6}, "replies x2": {"0": 5, "1": 7}}, 1)
    return made


def test_the_page_and_the_summary(tmp_path: Path) -> None:
    page = SCALING.write(found(tmp_path))
    assert page == render_scaling(found()) == (tmp_path / "scaling-2.md").read_text()
    assert "| 800 | mepic x2 | 2 | 18 (12 - 24) | 9.00" in page
    assert page.index("| 800 | stock x2 |") < page.index("| 9,000 | mepic x1 |")
    assert "| 9,000 | 1.500 (1.500 - 1.500, n=2) | 1.600" in page
    assert "| 0.937 (0.937 - 0.937, n=2) |" in page
    assert "R in float32, as it is served, on 2 GPUs and on one: 1 of 2 replies of 8" in page
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "tp2_scaling": pytest.approx(1.5),
        "tp2_vs_stock_tp2": pytest.approx(1.5 / 1.6),
    }


def test_what_is_measured_of_some_lengths_has_a_page() -> None:
    some = found()
    del some.cells["9000"], some.cells["replies"]
    assert scaling_figures(some)["tp2_vs_stock_tp2"] == pytest.approx(1.2)
    assert "replies of 8" not in render_scaling(some)


@pytest.mark.engine
def test_replies_of_an_engine_have_the_same_sums_again(small_engine: Engine) -> None:
    scene = DecodeScene(2, 2, 4, 20, 9, 6)
    sums = reply_sums(small_engine, "a", scene=scene)
    assert list(sums) == ["0", "1"]
    assert reply_sums(small_engine, "a", scene=scene) == sums
    assert reply_sums(small_engine, "b", scene=scene) != sums

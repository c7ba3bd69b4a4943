"""Loads: cells and their requests, the page, and figures of a real engine."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import GPU_FACTS

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk
from picbench.errors import ConfigError, InvalidRun
from picbench.experiments.load_report import (
    GROUPS,
    LOAD_REPORT,
    NEW,
    LoadTraffic,
    load_figures,
    load_plan,
    mixed_figures,
)
from picbench.experiments.waves import BesideScene
from picbench.run.measurements import LoadReport
from picbench.run.runner import ExperimentPlan, RoundsRecord

TRAFFIC = LoadTraffic(4, 2, 4, 20, reply=4, running=2)


def plan_of(device: str, *only: str, shared_decode: Any = "off") -> ExperimentPlan:
    return load_plan(
        LoadReport(
            model="shape:tiny", device=device, only=only, shared_decode=shared_decode, commit="c"
        )
    )


def test_cells_are_those_of_the_groups_that_are_asked_for() -> None:
    plan = plan_of("cpu")
    groups = Counter(cell.name.split(" ")[0] for cell in plan.cells)
    assert dict(groups) == {
        "share-nothing": 1,
        "2wiki": 1,
        "mixed": 1,
        "cold": 1,
        "closed": 4,
        "rate": 3,
    }
    assert all(cell.seconds > 0 for cell in plan.cells)
    [fast] = (cell for cell in plan.cells if cell.name == "rate 80")
    assert list(fast.arms) == ["mepic"]
    some = plan_of("cuda", "cold", "share-nothing")
    assert [(cell.name, cell.rank) for cell in some.cells] == [
        ("share-nothing 170", 0),
        ("share-nothing 500", 0),
        ("cold", 3),
    ]
    assert some.engines["prefix"] == replace(some.engines["mepic"], stock=True, algorithm="prefix")
    sharing = plan_of("cuda", "cold", shared_decode="auto")
    assert [config.shared_decode for config in sharing.engines.values()] == ["auto", "off"]
    with pytest.raises(ConfigError, match="`only` rates: no such group"):
        plan_of("cpu", "rates")


def test_the_stream_is_drawn_once_and_the_same_for_both_arms() -> None:
    [cell] = plan_of("cpu", "2wiki").cells
    requests, arrivals = cell.arms["mepic"].measure.keywords["stream"]  # type: ignore[attr-defined]
    assert len(requests) == len(arrivals) == 6
    assert cell.most == 3
    assert sum(isinstance(s, Chunk) for s in requests[0].segments) == 8


def chunks_of(traffic: LoadTraffic, name: str) -> list[Chunk]:
    drawn = traffic.draw(name, "mepic")
    return [s for request in drawn for s in request.segments if isinstance(s, Chunk)]


def test_chunks_are_of_the_corpus_or_of_one_request_only() -> None:
    assert set(chunks_of(TRAFFIC, "a")) <= set(TRAFFIC.known())
    alone = [chunk for name in "ab" for chunk in chunks_of(replace(TRAFFIC, corpus=0), name)]
    assert len(set(alone)) == len(alone) == 2 * 4 * 2


def test_arrivals_are_in_order_and_at_the_rate() -> None:
    assert TRAFFIC.arrivals("a") is None
    traffic = replace(TRAFFIC, rate=10.0, requests=2000)
    arrivals = traffic.arrivals("a") or []
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(200.0, rel=0.1)
    assert arrivals != traffic.arrivals("b")


def found(folder: Path = Path()) -> RoundsRecord:
    facts = GPU_FACTS | {"model": "M", "dtype": "bfloat16", "pool": 99}
    facts |= {"running": 256, "block_tokens": 16, "shared_decode": "off"}
    made = RoundsRecord(folder / "load-report.json", facts)
    names = {name for _, columns in GROUPS.values() for name in columns}
    for cell, value in {"share-nothing 170": 9.0, "2wiki": 90.0, "rate 8": 8.0}.items():
        figures = {"mepic": dict.fromkeys(names, value), "prefix": dict.fromkeys(names, 6.0)}
        for _ in range(2):
            made.add(cell, figures, 1.0)
    made.add("2wiki", {"mepic": {"requests_s": 99.0}, "prefix": {"requests_s": 5.0}}, 1)
    arms = ("mepic", NEW, "prefix")
    made.add("mixed", {arm: dict.fromkeys(names, 2.0) for arm in arms}, 1)
    made.add("rate 64", {"mepic": dict.fromkeys(names, 40.0)}, 1)
    made.failures = {"rate 96": "arm mepic: gone\nits log"}
    made.compiled = {"mepic": ["k"], "prefix": []}
    return made


def test_the_page_and_the_summary(tmp_path: Path) -> None:
    page = LOAD_REPORT.write(found(tmp_path))
    assert page == (tmp_path / "load-report.md").read_text()
    assert "| share-nothing 170 | 2 | mepic | 9.00 (9.00 - 9.00) |" in page
    assert "| 1.500 (1.500 - 1.500, n=2) |" in page
    assert f"| mixed | 1 | {NEW} | 2.0 (2.0 - 2.0)" in page
    assert "is served, requests/s: mepic 8, prefix below 8." in page
    assert "compiled after engines were ready: mepic: 1, prefix: 0." in page
    served = found()
    del served.cells["rate 64"]
    assert "requests/s: mepic at least 8, prefix below 8." in LOAD_REPORT.render(served)
    assert "| rate 64 | 1 | mepic | 40.00 (40.00 - 40.00)" in page
    assert page.endswith("rate 96 failed: arm mepic: gone\n")
    assert "Closed loop" not in page
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "share_nothing": {"chunk_170": pytest.approx(1.5)},
        "load": {"mepic_rps": 90.0, "prefix_rps": 6.0, "spread": pytest.approx(0.1)},
        "jit_after_ready": 1,
    }


@pytest.mark.engine
def test_loads_in_an_engine(small_engine: Engine) -> None:
    for traffic in (TRAFFIC, replace(TRAFFIC, corpus=0), replace(TRAFFIC, running=0, rate=50.0)):
        figures = load_figures(small_engine, "a", traffic=traffic)
        assert 0 < figures["referenced"] <= figures["resident"] <= 80
        assert figures["requests_s"] > 0
        assert 0 < figures["ttft_ms"] <= figures["ttft_p95_ms"]
    requests = TRAFFIC.draw("b", "mepic")
    empty = replace(TRAFFIC, corpus=0)
    stream = load_figures(small_engine, "b", traffic=empty, stream=(requests, [0.0] * 4))
    assert set(stream) == set(figures)


@pytest.mark.engine
def test_plain_requests_beside_long_prompts(small_engine: Engine) -> None:
    scene = BesideScene(2, 20, 32, 2, 16, 2, 4, 30)
    for new in (False, True):
        found = mixed_figures(small_engine, "a", scene=scene, new=new)
        assert found["itl_ms"] <= found["itl_p99_ms"] <= found["itl_most_ms"]
    with pytest.raises(InvalidRun, match="2 prompts did not arrive"):
        mixed_figures(small_engine, "b", scene=replace(scene, gap=40), new=True)
    assert small_engine.drained

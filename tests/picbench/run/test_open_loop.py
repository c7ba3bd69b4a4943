"""Runs whose requests arrive on their own, and runs that begin with a warm cache."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from harness_fakes import DeafEngine, FakeEngine, FakeServer, Harness, make_sample

from picbench.cli import main
from picbench.engines.config import EngineConfig
from picbench.errors import InvalidRun
from picbench.run.schedule import preload, schedule, serve
from picbench.store.reader import read_run
from picbench.store.records import ArmBatch, Failure

SAMPLES = [make_sample(n) for n in range(4)]
TIMES = (0.0, 0.5, 0.75, 2.0)


def run(harness: Harness, output: Path, *arguments: str) -> Result:
    flags = ("--dataset", "fake", "--algo", "full,mepic", "--output", str(output))
    return CliRunner().invoke(main, ("run", *flags, *arguments), obj=harness.services())


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def servers(order: list[str], **dies: int) -> dict[str, FakeServer]:
    return {
        name: FakeServer(name, EngineConfig("m"), order, FakeEngine(name), dies.get(name))
        for name in ("a", "b", "c")
    }


def replay(
    found: dict[str, FakeServer], *, first: int = 0, repeats: int = 1, done: int = 0, **lost: str
) -> list[ArmBatch]:
    """Every arm serves everything, one after another; the first `done` are left out."""
    planned = list(schedule(SAMPLES, "abc", len(SAMPLES), repeats, first))[done:]
    return list(serve(found, planned, None, arrivals=TIMES, lost=lost))


@pytest.mark.parametrize(("first", "order"), [(0, "abc"), (1, "bca"), (5, "cab")])
def test_arms_serve_everything_one_after_another(first: int, order: str) -> None:
    seen: list[str] = []
    batches = replay(servers(seen), first=first)
    assert seen == list(order)
    assert all(batch.samples == SAMPLES and batch.arrivals == TIMES for batch in batches)


def test_a_dead_arm_loses_its_own_requests_only() -> None:
    batches = replay(servers([], b=0))
    lost = {batch.arm: isinstance(batch.result.outcomes[0], Failure) for batch in batches}
    assert lost == {"a": False, "b": True, "c": False}


def test_an_arm_that_was_lost_stays_lost() -> None:
    """In later repeats, and where a run was stopped after it was lost."""
    whole = replay(servers([], b=0), repeats=3)
    assert [batch.lost is not None for batch in whole if batch.arm == "b"] == [True] * 3
    reason = next(batch.lost for batch in whole if batch.lost)
    seen: list[str] = []
    rest = replay(servers(seen), repeats=3, done=3, b=reason)
    assert "b" not in seen
    assert [batch.lost for batch in rest] == [batch.lost for batch in whole[3:]]


def test_an_open_loop_reports_makespan_and_goodput(tmp_path: Path) -> None:
    harness = Harness(SAMPLES, arrivals=TIMES)
    result = run(harness, tmp_path / "run", "--slo", "ttft=200", "--max-running", "9")
    assert result.exit_code == 0, result.stderr
    assert "makespan" in result.stdout
    assert "Each arm served all requests before the next one did" in result.stdout
    arms = read(tmp_path / "run" / "summary.json")["arms"]
    # Every request takes 0.5 s, and the last one arrives at 2.0 s; full's first token takes 0.4 s.
    assert arms["mepic"]["makespan_s"] == pytest.approx(2.5)
    assert arms["mepic"]["goodput_req_s"] == pytest.approx(4 / 2.5)
    assert arms["full"]["goodput_req_s"] == 0
    assert arms["mepic"]["late_ms"]["p99"] == 0
    rows = [row for row in read_run(tmp_path / "run").rows if row.arm == "mepic"]
    assert [row.arrival_ms for row in rows] == [1e3 * time for time in TIMES]
    manifest = read(tmp_path / "run" / "manifest.json")
    assert manifest["workload"]["arrivals"] == {"requests": 4, "last_s": 2.0}
    assert manifest["arms"]["mepic"]["settings"]["max_requests"] == 9
    assert harness.servers["mepic"].engine.calls.count("generate 4 from 0.0 s") == 1


def test_goodput_is_that_of_a_repeat(tmp_path: Path) -> None:
    for repeats in ("1", "3"):
        flags = ("--slo", "ttft=200", "--repeats", repeats)
        run(Harness(SAMPLES, arrivals=TIMES), tmp_path / repeats, *flags)
    once, thrice = (
        read(tmp_path / repeats / "summary.json")["arms"]["mepic"] for repeats in ("1", "3")
    )
    assert thrice["requests"] == 3 * once["requests"]
    for name in ("makespan_s", "goodput_req_s"):
        assert thrice[name] == pytest.approx(once[name])


def test_a_closed_loop_has_neither(tmp_path: Path) -> None:
    run(Harness(SAMPLES), tmp_path / "run")
    arm = read(tmp_path / "run" / "summary.json")["arms"]["mepic"]
    assert (arm["makespan_s"], arm["late_ms"], arm["goodput_req_s"]) == (None, None, None)
    assert {row.arrival_ms for row in read_run(tmp_path / "run").rows} == {None}


def test_arrivals_are_part_of_what_a_run_is_known_by(tmp_path: Path) -> None:
    prints = []
    for number, times in enumerate((None, TIMES, (0.0, 0.5, 0.75, 2.5))):
        run(Harness(SAMPLES, arrivals=times), tmp_path / f"{number}")
        prints.append(read(tmp_path / f"{number}" / "manifest.json")["fingerprint"])
    assert len(set(prints)) == 3


def test_chunks_are_preloaded_before_anything_is_measured(tmp_path: Path) -> None:
    harness = Harness(SAMPLES, preload=[make_sample(90), make_sample(91)])
    result = run(harness, tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    calls = harness.servers["mepic"].engine.calls
    assert next(call for call in calls if call.startswith("generate")) == "generate 2 at 4"
    samples = {row.sample for row in read_run(tmp_path / "run").rows}
    assert samples == {"s0", "s1", "s2", "s3"}
    manifest = read(tmp_path / "run" / "manifest.json")
    assert manifest["cache"].startswith("warm at start")
    assert manifest["workload"]["preloaded_chunks"] == 2


def test_a_warm_run_that_does_not_hit_is_invalid(tmp_path: Path) -> None:
    cold = {"mepic": FakeEngine("mepic", reused=0)}
    result = run(Harness(SAMPLES, preload=[make_sample(90)], engines=cold), tmp_path / "run")
    assert result.exit_code == 3
    assert "chunks were preloaded, and round 0 reused none" in result.stderr


def test_a_chunk_that_cannot_be_preloaded_is_named() -> None:
    refused = make_sample(1, first=666)
    with pytest.raises(InvalidRun, match="arm a: s1 could not be preloaded: a chunk is too long"):
        preload(servers([]), [make_sample(0), refused], 2)


def test_other_tokens_are_noticed_in_an_open_loop(tmp_path: Path) -> None:
    harness = Harness(SAMPLES, arrivals=TIMES, engines={"mepic": DeafEngine("mepic")})
    assert run(harness, tmp_path / "run").exit_code == 3

"""Arrival times in a real engine."""

from pathlib import Path

import pytest
from small_engine import small_config

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Text


def _config(model: Path, algorithm: str = "mepic", stock: bool = False) -> EngineConfig:
    return small_config(model, 200, 512, algorithm=algorithm, stock=stock)


def _requests(count: int) -> list[Request]:
    chunk = Chunk(tokens=tuple(range(20, 60)))
    return [
        Request([Text(tokens=(1, 5)), chunk, Text(tokens=(7, 8, 9 + n))], max_tokens=4)
        for n in range(count)
    ]


@pytest.mark.parametrize(("algorithm", "stock"), [("mepic", False), ("prefix", True)])
def test_requests_wait_for_their_time_and_answer_the_same(
    llama: Path, algorithm: str, stock: bool
) -> None:
    arrivals = [0.6, 0.0, 0.3]
    with Engine(_config(llama, algorithm, stock)) as engine:
        closed = engine.generate(_requests(3), ignore_eos=True)
        engine.measure()
        opened = engine.generate(_requests(3), ignore_eos=True, arrivals=arrivals)
        last = engine.memory[-1].time
    assert [r.tokens for r in opened] == [r.tokens for r in closed]
    assert last >= max(arrivals)
    for result in opened:
        assert 0 <= result.timings.late <= result.timings.ttft <= result.timings.e2e
    assert all(result.timings.late == 0 for result in closed)


def test_latency_includes_the_time_a_request_was_late(llama: Path) -> None:
    with Engine(_config(llama)) as engine:
        results = engine.generate(
            _requests(3), ignore_eos=True, concurrency=1, arrivals=[0.0, 0.0, 0.0]
        )
    lates = [result.timings.late for result in results]
    assert lates == sorted(lates)
    assert lates[2] >= results[0].timings.e2e
    assert results[2].timings.ttft > results[0].timings.e2e


def test_an_idle_engine_holds_nothing_in_its_ledger(llama: Path) -> None:
    with Engine(_config(llama)) as engine:
        engine.warm_up()
        engine.generate(_requests(2), ignore_eos=True, arrivals=[0.0, 1.0])
        ledger = engine.memory
    idle = [snapshot for snapshot in ledger if snapshot.referenced == 0]
    assert idle
    after = next(s for s in ledger if s.time > idle[-1].time)
    assert after.time >= 1.0
    assert idle[-1].resident > 0


def told(engine: Engine, requests: list[Request], patch: pytest.MonkeyPatch) -> list[str]:
    """What an engine with steps of 100 tokens does in turn: submits requests, and steps."""
    calls: list[str] = []
    running = engine._running.engine
    with patch.context() as changed:
        changed.setattr(running.vllm_config.scheduler_config, "max_num_batched_tokens", 100)
        for name, owner in {"_submit": engine, "step": running}.items():
            call = getattr(owner, name)
            changed.setattr(
                owner, name, lambda *a, name=name, call=call: [calls.append(name), call(*a)][1]
            )
        found = engine.generate(requests, ignore_eos=True)
    assert calls.count("_submit") == len(requests)
    engine.reset()
    expected = engine.generate(requests, ignore_eos=True, concurrency=1)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    return calls


def test_the_first_of_many_long_prompts_start_while_others_are_planned(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request([Text(tokens=tuple(range(n, n + 150)))], max_tokens=2) for n in range(12)]
    with Engine(_config(llama)) as engine:
        calls = told(engine, requests, monkeypatch)
    assert calls[:8] == ["_submit"] * 3 + ["step"] + ["_submit"] * 3 + ["step"]


def test_a_prompt_whose_chunks_are_missing_starts_before_others_are_planned(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [Chunk(tokens=tuple(range(n, n + 120))) for n in range(4)]
    requests = [Request([chunk, Text(tokens=(7, 8, 9))], "naive", 2) for chunk in chunks]
    with Engine(_config(llama)) as engine:
        cold = told(engine, requests, monkeypatch)
        warm = told(engine, requests, monkeypatch)
    assert cold[:4] == ["_submit", "step", "_submit", "step"]
    assert warm[:5] == ["_submit"] * 4 + ["step"]

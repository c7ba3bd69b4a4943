"""Two workers that share a model and a pool: the same plans, the same tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_engine import small_config

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.oracle import Asked, Blend, epic, full, mepic, naive
from picbench.engines.request import Chunk, Request, Text
from picbench.engines.vllm import device
from picbench.errors import ConfigError

RULES = {
    "naive": naive(),
    "epic:k=16:copy=shared": epic(16),
    "epic:k=16:copy=private": epic(16),
    "cacheblend:r=0.15": Blend(0.15),
    "mepic:select=question": Asked(),
    "prophetkv:r=0.2": Asked(share=0.2),
    "mepic": mepic(),
    "naive:temperature=0.5": replace(naive(), temperature=0.5),
    "full": full(),
}


def test_two_workers_agree_with_the_oracle(
    llama: Path, chunks: list[Chunk], question: Text, draw: Any, oracle: Any, deviation: Any
) -> None:
    config = small_config(llama, 400, 2048, tensor_parallel=2, temperatures=(0.5,))
    head = Text(tokens=draw(21, 1))
    orders = [[head, *chunks, question], [head, *reversed(chunks), question]]
    requests = [Request(order, algorithm) for algorithm in RULES for order in orders]
    with Engine(config) as engine:
        cold = engine.generate(requests, max_tokens=4, logprobs=8, ignore_eos=True, concurrency=1)
        warm = engine.generate(requests, max_tokens=4, logprobs=8, ignore_eos=True)
        assert engine.moved == {}
        with pytest.raises(ConfigError, match="several workers"):
            _ = engine.cache
    for request, *results in zip(requests, cold, warm, strict=True):
        rule = RULES[str(request.algorithm)]
        for result in results:
            assert deviation(oracle, rule, request, result) < 1e-3
    assert all(result.counts.compile_work == 0 for result in warm)


def test_more_workers_than_cores_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: {0, 1, 2})
    with pytest.raises(ConfigError, match="`tensor_parallel` is 4, and there are 3 cores"):
        Engine(EngineConfig(str(llama), tensor_parallel=4))


def test_memory_that_a_worker_lacks_is_named(llama: Path) -> None:
    with pytest.raises(ConfigError, match="too little free memory"):
        Engine(EngineConfig(str(llama), tensor_parallel=2, kv_blocks=1 << 40))


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: {0, 1, 2})
    (cores,) = device.environment(device.CPU, 2).values()
    assert cores == "0,2|1"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "5|7")
    assert set(device.environment(device.CPU, 2).values()) == {"5|7"}
    assert device.environment(device.CPU, 1) == {}

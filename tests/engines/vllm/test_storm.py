"""An eviction storm: many requests over many chunks, in a pool that holds few of them."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from ahead_engine import Start, engine_ahead
from small_engine import small_config
from storm_mix import TEMPERATURES, draw_mix, sampling
from tiny_llama import write_model

from picbench.engines.engine import Engine
from picbench.engines.pace import Submission
from picbench.engines.request import Chunk, Request, Text

ALGORITHMS = ["mepic", "naive", "epic:k=16", "epic:k=4:copy=shared", "cacheblend:r=0.15"]
HOST = "4MiB"
REDIS = "64MiB"


#: Answers by the number of the request; most requests have one.
Tokens = dict[int, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True)
class Storm:
    """Its size; chunks have 17 to 48 tokens, two or three blocks."""

    requests: int
    chunks: int

    @property
    def pool(self) -> int:
        """Blocks that hold a twentieth of the chunks, and room for a few requests."""
        return int(0.05 * self.chunks * 2.5) + 42

    @property
    def running(self) -> int:
        """Requests that run at a time: more than the pool can finish without preemption."""
        return max(16, self.chunks // 20)


@pytest.fixture(scope="module")
def storm(request: pytest.FixtureRequest) -> Storm:
    count = request.config.getoption("--storm")
    return Storm(count, max(50, count // 10))


@pytest.fixture(scope="module")
def requests(storm: Storm, draw: Any) -> list[Request]:
    dice = random.Random(11)
    chunks = [Chunk(tokens=draw(dice.randint(17, 48), 5000 + i)) for i in range(storm.chunks)]
    return [
        Request(
            [*dice.choices(chunks, k=dice.randint(1, 4)), Text(tokens=draw(5, 100_000 + index))],
            algorithm=dice.choice(ALGORITHMS),
            max_tokens=dice.choice([2, 3, 4, 40]),
        )
        for index in range(storm.requests)
    ]


@dataclass(slots=True)
class Driver:
    """Keeps an engine busy; at random aborts requests and has vLLM drop the cache, if told to."""

    engine: Engine
    abort_share: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(13))
    sampling: Callable[[int], Mapping[str, Any]] = lambda index: {}
    reset_share: float = 0.0
    tokens: Tokens = field(default_factory=dict)

    def run(self, requests: list[Request], flying: int) -> None:
        running = self.engine._running.engine
        queue, alive = iter(enumerate(requests)), dict[str, int]()
        self._fill(queue, alive, flying)
        while alive:
            for output in running.step():
                index = alive.pop(output.request_id)
                answers = sorted(output.outputs, key=attrgetter("index"))
                self.tokens[index] = tuple(tuple(answer.token_ids) for answer in answers)
                self.engine._report(output.request_id)
            if alive and self.dice.random() < self.abort_share:
                victim = self.dice.choice(sorted(alive))
                running.abort_request([victim])
                self.engine._report(victim)
                del alive[victim]
            if self.dice.random() < self.reset_share:
                self._drop_cache()
            self._fill(queue, alive, flying)
        self.engine.drain()

    def _drop_cache(self) -> None:
        """Have all requests start over, and the tiers cleared; vLLM refuses while one loads."""
        with suppress(RuntimeError):
            self.engine._running.engine.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )

    def _fill(self, queue: Iterator[Any], alive: dict[str, int], flying: int) -> None:
        while len(alive) < flying and (entry := next(queue, None)) is not None:
            index, request = entry
            prepared = self.engine._prepare(request, 3, None, True)
            for name, value in self.sampling(index).items():
                setattr(prepared.sampling_params, name, value)
            self.engine._submit(Submission(prepared, time.time(), 0.0))
            alive[prepared.tag] = index


def engine_of(
    model: Path,
    storm: Storm,
    blocks: int,
    tiers: str,
    *,
    context: int = 256,
    batch_tokens: int = 512,
    start: Start = Engine,
) -> Engine:
    return start(
        small_config(
            model,
            blocks,
            context,
            batch_tokens=batch_tokens,
            max_requests=storm.running,
            tiers=tiers,
            forced_replies=True,
            temperatures=TEMPERATURES,
        )
    )


@pytest.fixture(scope="module")
def expected(pebble: Path, storm: Storm, requests: list[Request]) -> Tokens:
    with engine_of(pebble, storm, storm.chunks * 3 + 4000, "") as engine:
        driver = Driver(engine)
        driver.run(requests, flying=2 * storm.running)
        assert engine.preemptions == 0
    return driver.tokens


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_a_storm_changes_no_output_and_leaks_nothing(
    pebble: Path,
    storm: Storm,
    requests: list[Request],
    expected: Tokens,
    redis_process: Any,
    start: Start,
    ahead: bool,
) -> None:
    tiers, own = f"host:{HOST},{redis_process.address}:{REDIS}", engine_ahead if ahead else start
    with engine_of(pebble, storm, storm.pool, tiers, start=own) as engine:
        driver = Driver(engine, abort_share=0.05)
        driver.run(requests, flying=2 * storm.running)
        assert 0 < len(driver.tokens) < storm.requests
        assert all(expected[index] == tokens for index, tokens in driver.tokens.items())
        assert engine.preemptions > 0
        assert all(sum(s.blocks.values()) == s.pool for s in engine.memory)
        scheduler = engine._running.scheduler
        assert scheduler.linker.idle
        assert not scheduler.requests
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == engine._running.pool
        host, redis = engine.cache.tiers.values()
        assert engine._tier_client._chunks.arena.held_bytes <= 4 << 20
        with redis_process.client() as client:
            assert sum(client.strlen(key) for key in client.keys("picbench:v:*")) <= 64 << 20
        assert host.hits + redis.hits > 0
        assert host.failures + redis.failures == 0


#: Requests that use pages which others link, others, and some that reuse nothing.
MIXED = [
    *["epic:k=16", "naive"] * 2,
    *ALGORITHMS,
    "mepic:pad=paper",
    "mepic:blocks=2",
    "epic:k=4:bos=chunk",
    "block-attention",
    "prompt-cache",
    "kvlink:n=5:first=500",
    "prefix",
]
#: Blocks and tiers: no tier, one that takes hardly a chunk, one that loses most, one that has room.
STARVED_OF_ALL = [(120, ""), (120, "host:30KiB,disk:{}:2MiB"), (200, "host:60KiB")]
STARVED = [(90, "host:20KiB"), (90, "host:60KiB"), (140, ""), (220, "disk:{}:4MiB")]


def mixed(draw: Any, seed: int) -> list[Request]:
    dice = random.Random(seed)
    chunks = [Chunk(tokens=draw(dice.randint(33, 64), 9000 + i)) for i in range(30)]
    return [
        Request(
            [*dice.sample(chunks, dice.randint(4, 8)), Text(tokens=draw(5, 100_000 + index))],
            algorithm=dice.choice(MIXED),
            max_tokens=dice.choice([2, 4, 16]),
        )
        for index in range(60)
    ]


@pytest.mark.parametrize(("seed", "ahead"), [(1, False), (2, True)], ids=["in step", "ahead"])
def test_small_storms_end_no_engine(
    pebble: Path, tmp_path: Path, draw: Any, seed: int, start: Start, ahead: bool
) -> None:
    """Requests as large as the pool: their chunks are evicted page by page, and lost by tiers.

    Now and then all of them lose their blocks, and the tiers what they have.
    """
    requests = mixed(draw, seed)
    expected: Tokens = {}
    for blocks, tiers in [(2000, ""), *STARVED]:
        storm, place = Storm(len(requests), 320), tiers.format(tmp_path)
        own = (engine_ahead if ahead else start) if expected else Engine
        with engine_of(
            pebble, storm, blocks, place, context=1024, batch_tokens=128, start=own
        ) as engine:
            driver = Driver(engine)
            if expected:
                driver = Driver(engine, 0.05, random.Random(seed), reset_share=0.02)
            expected = survive(driver, requests, expected)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers: in one, a token's KV is right whatever was in view when it was computed."""
    return write_model(
        "llama",
        tmp_path_factory.mktemp("layers"),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )


def test_small_storms_of_all_kinds_of_requests(
    layers: Path, tmp_path: Path, draw: Any, start: Start
) -> None:
    """All options, awkward lengths, tenants, several answers a request, and two tiers at once.

    Most starved engines schedule ahead.
    """
    requests = draw_mix(draw, 3, 32)
    expected: Tokens = {}
    engines = [Engine, engine_ahead, start, engine_ahead]
    for (blocks, tiers), own in zip([(2000, ""), *STARVED_OF_ALL], engines, strict=True):
        storm, place = Storm(len(requests), 320), tiers.format(tmp_path)
        with engine_of(
            layers, storm, blocks, place, context=1024, batch_tokens=256, start=own
        ) as engine:
            driver = Driver(engine, 0.03 if expected else 0.0, random.Random(3), sampling)
            expected = survive(driver, requests, expected)


def survive(driver: Driver, requests: list[Request], expected: Tokens) -> Tokens:
    """Drive an engine, compare its answers with those expected, if any, and return these."""
    driver.run(requests, flying=32)
    expected = expected or driver.tokens
    assert len(driver.tokens) > len(requests) // 3
    assert all(expected[index] == tokens for index, tokens in driver.tokens.items())
    given = {i: request.reply for i, request in enumerate(requests) if request.reply}
    assert all({*driver.tokens[i]} == {given[i]} for i in driver.tokens.keys() & given.keys())
    engine = driver.engine
    assert all(sum(s.blocks.values()) == s.pool for s in engine.memory)
    assert engine.drained
    return expected


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_blocks_of_loads_that_fail_are_counted(
    pebble: Path, draw: Any, start: Start, ahead: bool
) -> None:
    """A tier that holds few chunks loses many before they are loaded: requests start over."""
    dice = random.Random(11)
    chunks = [Chunk(tokens=draw(dice.randint(17, 48), 5000 + i)) for i in range(120)]
    requests = [
        Request(
            [*dice.choices(chunks, k=dice.randint(1, 4)), Text(tokens=draw(5, 100_000 + index))],
            algorithm="epic:k=16",
        )
        for index in range(200)
    ]
    own = engine_ahead if ahead else start
    with engine_of(pebble, Storm(200, 320), 900, "host:300KiB", start=own) as engine:
        driver = Driver(engine)
        driver.run(requests, flying=64)
        assert len(driver.tokens) == len(requests)
        assert all(sum(s.blocks.values()) == s.pool for s in engine.memory)
        (host,) = engine.cache.tiers.values()
        assert host.misses > 0

"""One small engine for the tests of a file, and a look inside it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_engine import small_config

from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Text

if TYPE_CHECKING:
    from ahead_engine import Start

POOL = 300


@pytest.fixture(scope="session")
def start(request: pytest.FixtureRequest) -> "Start":
    """How engines are started; with `--ahead` they schedule ahead of the model."""
    if not request.config.getoption("--ahead"):
        return Engine
    from ahead_engine import engine_ahead

    return engine_ahead


@pytest.fixture(scope="module")
def engine(llama: Path, start: "Start") -> Iterator[Engine]:
    with start(small_config(llama, POOL, 2048, tiers="", batch_tokens=128)) as engine:
        yield engine


@pytest.fixture(scope="module")
def starved(llama: Path, start: "Start") -> Iterator[Engine]:
    """An engine for short prompts, with blocks for a few of them."""
    with start(small_config(llama, 90, 512, batch_tokens=64, max_requests=8)) as engine:
        yield engine


@pytest.fixture(scope="session")
def pebble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small layers: the storm is about blocks, not about numbers."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=1024,
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("pebble")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


@pytest.fixture
def chunks(draw: Any) -> list[Chunk]:
    return [Chunk(tokens=draw(length, 700 + length)) for length in (150, 35, 81, 64)]


@pytest.fixture
def question(draw: Any) -> Text:
    return Text(tokens=draw(19, 800))


@pytest.fixture
def tokens(draw: Any, request: pytest.FixtureRequest) -> Any:
    """(count, key) -> tokens that no other test has cached."""
    seed = crc32(request.node.nodeid.encode())
    return lambda count, key=0: draw(count, hash((seed, key)))


@pytest.fixture
def inside(engine: Engine) -> "Inside":
    engine.reset()
    engine.measure()
    return Inside(engine)


class Inside:
    """What only a test may touch: scheduler, pool and KV of an engine in this process."""

    def __init__(self, engine: Engine) -> None:
        core: Any = engine._running.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.linker = core.scheduler.linker
        self.store = core.scheduler.chunk_store
        self.pool = core.scheduler.kv_cache_manager.block_pool
        self.runner = core.model_executor.driver_worker.worker.model_runner

    @property
    def free(self) -> int:
        return self.pool.get_num_free_blocks()

    def block_of(self, key: bytes) -> int:
        """The id of the block that caches a key."""
        (block,) = self.pool.get_cached_block(key, [0])
        return block.block_id

    def content(self, key: bytes) -> list[Any]:
        """Copies of a block's KV, layer by layer."""
        return [cache[self.block_of(key)].clone() for cache in self.runner.kv_caches]

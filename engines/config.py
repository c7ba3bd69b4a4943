"""How an engine is set up."""

from dataclasses import dataclass

#: vLLM's page in slots, and MEPIC's unit of recomputation.
BLOCK_SIZE = 16

#: Where chunk KV goes when the pool is full, or when requests copy it.
DEFAULT_TIERS = "host:1GiB"

#: What happens to a request that needs more blocks than are free or can be evicted.
PRESSURE = ("wait", "reject")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    `algorithm` is the default of requests that name none (``"mepic"``, ``"epic:k=16"``).
    `stock` starts vLLM without any part of picbench in it: what a user has today; only the
    algorithms `full` and `prefix` run there. `kv_blocks` fixes the pool in blocks of 16 tokens
    (stock CPU vLLM pages by 32 and gets half as many, so that the pools are equal in bytes).
    `context` is the longest prompt plus output in tokens (None: the model's own limit).
    `device` is auto, cpu or cuda; on CUDA models are compiled and captured into graphs unless
    `eager`, steps are scheduled ahead of the GPU if `asynchronous`, and `tensor_parallel` GPUs
    share one engine.
    `batch_tokens` is the token budget of one scheduler step. `keys_without_rope` keeps every key
    unrotated at rest, not only those of chunks: the papers' form, for comparison.
    `tiers` lists what lies behind the pool, nearest first (``"host:4GiB,redis://localhost:6379"``;
    "" for nothing). `on_pressure` says whether a request that needs more blocks than are free or
    can be evicted waits, or is rejected before anything is allocated for it.
    """

    model: str
    algorithm: str = "mepic"
    stock: bool = False
    dtype: str = "auto"
    kv_blocks: int | None = None
    context: int | None = None
    batch_tokens: int | None = None
    max_requests: int = 64
    seed: int = 0
    keys_without_rope: bool = False
    device: str = "auto"
    eager: bool = False
    asynchronous: bool = True
    tensor_parallel: int = 1
    tiers: str = DEFAULT_TIERS
    on_pressure: str = "wait"

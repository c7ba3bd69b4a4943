"""The settings of an engine."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from picbench.errors import ConfigError, check_counts

#: Slots of a KV block, and MEPIC's unit of recomputation.
BLOCK_SIZE = 16

#: Where chunk KV is kept outside the KV pool, by device: evicted chunks, and sources of private
#: copies. On a GPU there is no tier by default, because storing and loading stand in the way of
#: steps there: with a host tier 64 new chunks take 3.9-8.3 s instead of 0.85 s (H200, 8B shape).
DEFAULT_TIERS: Mapping[str, str] = MappingProxyType({"cpu": "host:1GiB", "cuda": ""})

OnPressure = Literal["wait", "reject"]
CompileOrder = Literal["head", "batch", "isps"]
SharedDecode = Literal["off", "auto", "always"]
#: Bounds of settings, which are checked where an engine reads them (`PicSettings.check`).
Temperature = Annotated[float, Gt(0)]
Natural = Annotated[int, Ge(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSettings:
    """Settings that the processes of a PIC engine get as they are given.

    `algorithm` is the default of requests that name none (``"mepic"``, ``"epic:k=16"``).
    `keys_without_rope` caches every key without RoPE, not only those of chunks: the papers' form,
    for comparison (results/cpu/attention.md has what it saves).

    `tiers` lists the tiers of the chunk cache, nearest first
    (``"host:4GiB,redis://localhost:6379"``; "" for none, None for `DEFAULT_TIERS`). `on_pressure`
    says whether a request that needs more blocks than are free or can be evicted waits ("wait"), or
    is rejected before anything is allocated for it ("reject").

    `compile_order` says when missing chunks are compiled: right ahead of the first request that
    needs them ("head"), all those of waiting requests before any of these runs ("batch"), or in
    the order of arrival, as requests like any other, so that requests whose chunks are there go
    first ("isps"). The last two are MiniPIC's batch mode and interleaved span prefill (arXiv
    2606.13126). Answers are the same.

    `shared_decode` (CUDA) says whether a decoding step reads the blocks of a chunk, or of a prefix
    that plain requests have in common, once for all requests that see them: never ("off"), where
    that is expected to be faster ("auto"), or wherever two requests see the same ones ("always",
    for checks).

    `anchors` are token ids of anchors' texts by name, for ``anchor=NAME``. Engines with a tokenizer
    add the built-in passage, and the file that their `algorithm` names. `temperatures` are those
    that requests may name besides that of the `algorithm` (``temperature=T``).
    """

    algorithm: str = "mepic"
    keys_without_rope: bool = False
    tiers: str | None = None
    on_pressure: OnPressure = "wait"
    compile_order: CompileOrder = "head"
    shared_decode: SharedDecode = "auto"
    anchors: Mapping[str, Sequence[Natural]] = field(default_factory=dict, hash=False)
    temperatures: Sequence[Temperature] = ()


@dataclass(frozen=True, slots=True)
class EngineConfig(ChunkSettings):
    """Settings of one engine.

    `model` is a folder. `stock` starts vLLM without any part of picbench in it, as users have it
    today; only the algorithms `full` and `prefix` run there. `kv_blocks` fixes the pool in blocks
    of 16 tokens (stock CPU vLLM has blocks of 32 and gets half as many, so that the pools are equal
    in bytes). `context` is the longest prompt plus output in tokens (None: the model's own limit),
    `batch_tokens` the token budget of one scheduler step.

    `dtype` is the type of weights and KV; auto is the model's own, or float32 on a CPU that has no
    instructions for 16-bit types.

    `device` is auto, cpu or cuda. On CUDA models are compiled and captured into graphs unless
    `eager`, steps are scheduled ahead of the GPU if `asynchronous`, and `tensor_parallel` GPUs
    share one engine. Graphs serve steps of up to `graph_tokens` tokens; the host starts the kernels
    of larger steps one by one. None: 1,024, which a chunk of 512 tokens and those that link others
    fit in, and in a stock engine 512, as with the defaults of `vllm serve`.

    With `forced_replies` requests may bring the tokens of their replies (`Request.reply`).

    With `self_check` the engine compares ways to the same answers before it serves any, and does
    not start if they differ (`Engine.self_check`).
    """

    model: str
    stock: bool = False
    dtype: str = "auto"
    kv_blocks: int | None = None
    context: int | None = None
    batch_tokens: int | None = None
    max_requests: int = 64
    seed: int = 0
    device: str = "auto"
    eager: bool = False
    graph_tokens: int | None = None
    asynchronous: bool = True
    tensor_parallel: int = 1
    self_check: bool = False
    forced_replies: bool = False

    def __post_init__(self) -> None:
        check_counts(
            context=self.context,
            batch_tokens=self.batch_tokens,
            max_requests=self.max_requests,
            tensor_parallel=self.tensor_parallel,
        )


def batch_tokens(config: EngineConfig, context: int) -> int:
    """The token budget of a step, for a context of so many tokens."""
    return config.batch_tokens or max(2048, min(context, 8192))


def planned_capacity(context: int) -> int:
    """KV slots that a planned request of `context` tokens may take.

    Pads and linked tokens take slots of their own. The built-in algorithms' worst case is a chunk
    of 17 tokens in two blocks with 4 linked, 36 slots; prompts that need more are refused.
    """
    return 2 * context + 1024


def physical_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def secret(name: str) -> str:
    """The value of the variable ``PICBENCH_name``, or what is in the file of that with ``_FILE``.

    Empty without both: others see command lines and settings, in lists of processes and in logs.
    Raises ConfigError for a file that cannot be read or is empty.
    """
    variable = f"PICBENCH_{name}"
    if not (path := os.environ.get(f"{variable}_FILE")):
        return os.environ.get(variable, "")
    try:
        if found := Path(path).read_text(encoding="utf-8").strip():
            return found
    except (OSError, ValueError):
        pass
    raise ConfigError(
        f"the file of {variable}_FILE has no secret", hint="one line that we can read"
    )

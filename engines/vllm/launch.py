"""Starts vLLM, with picbench in it or without; its engine core in this process or in its own."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from picbench.engines.algorithms import Reuse, parse
from picbench.engines.config import (
    BLOCK_SIZE,
    DEFAULT_TIERS,
    ChunkSettings,
    EngineConfig,
    batch_tokens,
    planned_capacity,
)
from picbench.engines.model_config import load_format, read_model_config, slot_bytes
from picbench.engines.vllm.compat import check_plug_in, check_version
from picbench.engines.vllm.device import CPU, Device, environment, find, slow_short_types
from picbench.engines.vllm.scheduler.block_ledger import BlockLedger
from picbench.engines.vllm.settings import PicSettings, engine_arguments
from picbench.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_LOG = logging.getLogger(__name__)

#: A plan may have more slots than the model has positions, although no logical position exceeds
#: them.
_ENVIRONMENT = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

#: Tokens of the largest step that graphs serve. On an H200, chunks of 480 tokens, a step of 560
#: tokens has its first token after 0.67 of the time that it takes without a graph, one of 688 after
#: 0.58, and one of 1,056, which has none in either, after 0.99 (results/gpu/small-steps.md).
_GRAPH_TOKENS = 1024

#: Up to so many tokens graphs are of the sizes that vLLM has by itself.
_FINE_GRAPHS = 1024

#: What `vllm serve` has with its defaults.
_STOCK_GRAPH_TOKENS = 512

#: Eager engines must not compile the one function of vLLM's sampler that is compiled on first use
#: (20 s and a C++ compiler for the first request with logprobs).
_EAGER = {"TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True, slots=True)
class Launched:
    """A running vLLM engine whose core is in this process.

    `config` has what picbench chose where nothing was given, and `notes` says why, a choice that
    changes numbers a line. `context` is the longest prompt plus output in logical tokens,
    `capacity` in KV slots, `pool` the KV pool in blocks of 16.
    """

    engine: "LLMEngine"
    context: int
    capacity: int
    pool: int
    config: EngineConfig
    notes: tuple[str, ...]
    ledger: BlockLedger

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler."""
        return self.engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]


def launch(config: EngineConfig) -> Launched:
    """Start an engine. Raises ConfigError if it cannot start with these settings."""
    if not config.stock:
        check_version()
        check_plug_in()
    device = find(config.device)
    model = read_model_config(config.model)
    config, notes = _choose(config, device, model)
    for note in notes:
        _LOG.warning("%s", note)
    context = _context(config, model)
    arguments = _common_arguments(config, device)
    alone = config.stock and parse(config.algorithm).reuse is Reuse.NOTHING
    if config.stock:
        from picbench.engines.vllm.frontend.patches import extend_frontend

        # vLLM would serve requests with chunks as ordinary ones.
        extend_frontend()
        # A prompt that comes again with a reply finds its KV: on a CPU it would take seconds more.
        caching = not alone or (config.forced_replies and device is CPU)
        arguments |= {"block_size": device.stock_block_size, "enable_prefix_caching": caching}
        capacity = context
    else:
        arguments |= engine_arguments(
            _settings(config, model, context), device.name, asynchronous=config.asynchronous
        )
        capacity = planned_capacity(context)
    pool = _pool(config, model, capacity, device)
    capacity = min(capacity, pool * BLOCK_SIZE)
    ratio = arguments["block_size"] // BLOCK_SIZE
    arguments |= {"max_model_len": capacity, "num_gpu_blocks_override": pool // ratio + 1}
    arguments["max_num_batched_tokens"] = batch_tokens(config, context)
    engine = _start(arguments, environment(device, config.tensor_parallel))
    scheduler = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    ledger = BlockLedger(scheduler, keeps=not alone)
    return Launched(engine, context, capacity, pool, config, notes, ledger)


def _choose(
    config: EngineConfig, device: Device, model: Mapping[str, Any]
) -> tuple[EngineConfig, tuple[str, ...]]:
    """The settings with the device's tiers and type where none are given, and what to say of it."""
    if config.tiers is None:
        config = replace(config, tiers=DEFAULT_TIERS[device.name])
    # The kernels of quantised weights come with types of their own.
    if config.dtype != "auto" or device is not CPU or model.get("quantization_config"):
        return config, ()
    reason = slow_short_types()
    if reason is None:
        return config, ()
    return replace(config, dtype="float32"), (f"the model is served in float32: {reason}",)


def _start(arguments: Mapping[str, Any], variables: Mapping[str, str]) -> "LLMEngine":
    eager = _EAGER if arguments["enforce_eager"] else {}
    with _environment({**_ENVIRONMENT, **eager, **variables}):
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            return LLMEngine.from_engine_args(EngineArgs(**arguments))
        except torch.OutOfMemoryError as error:
            raise _short_of_memory("the GPU") from error
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"vLLM refused to start: {_line(error)}") from error
        except Exception as error:
            if "can't allocate memory" in str(error):
                raise _short_of_memory("this machine") from error
            # Errors in worker processes arrive as a plain Exception
            # (vllm/v1/executor/multiproc_executor.py).
            if "Worker" not in str(error):
                raise
            raise EngineError(
                f"a worker of the engine could not start: {_line(error)}",
                hint="if memory is short, lower `kv_blocks` or `context`, or use more GPUs",
            ) from error


def _short_of_memory(what: str) -> ConfigError:
    return ConfigError(
        f"{what} has too little free memory for the model and its KV pool",
        hint="lower `kv_blocks` or `context`, or use a smaller model",
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _common_arguments(config: EngineConfig, device: Device) -> dict[str, Any]:
    eager = config.eager or not device.graphs
    graphs = {} if eager else _graphs(config)
    return {
        "model": config.model,
        "dtype": config.dtype,
        "seed": config.seed,
        "load_format": load_format(config.model),
        # Text is decoded by the engine's own tokenizer, so that one engine serves token ids too.
        "skip_tokenizer_init": True,
        # Requests here have no images, whatever the model knows.
        "language_model_only": True,
        "enforce_eager": eager,
        "tensor_parallel_size": config.tensor_parallel,
        "max_num_seqs": config.max_requests,
        "disable_log_stats": False,
        "kv_cache_memory_bytes": device.pool_bytes,
        **graphs,
        **device.arguments,
        **(device.forcing if config.forced_replies else {}),
    }


def _graphs(config: EngineConfig) -> dict[str, Any]:
    tokens = config.graph_tokens
    if tokens is None:
        tokens = _STOCK_GRAPH_TOKENS if config.stock else _GRAPH_TOKENS
    if tokens < 1:
        raise ConfigError(f"`graph_tokens` is {tokens}", hint="use at least 1, or `eager`")
    if tokens <= _FINE_GRAPHS:
        return {"compilation_config": {"max_cudagraph_capture_size": tokens}}
    return {"compilation_config": {"cudagraph_capture_sizes": list(_capture_sizes(tokens))}}


def _capture_sizes(most: int) -> Iterator[int]:
    """vLLM's sizes up to `_FINE_GRAPHS` tokens (vllm/config/vllm.py, `_set_cudagraph_sizes`).

    Beyond, they are at most a sixteenth apart: one for every 16 tokens up to 4,096 would be 275.
    """
    size = _FINE_GRAPHS
    yield from (1, 2, 4, *range(8, 256, 8), *range(256, size + 1, 16))
    while size < most:
        size = min(most, size + (1 << (size.bit_length() - 1)) // 16)
        yield size


def _settings(config: EngineConfig, model: Mapping[str, Any], context: int) -> PicSettings:
    given = {field.name: getattr(config, field.name) for field in fields(ChunkSettings)}
    return PicSettings.of_model(model, **given, positions=context)


def _context(config: EngineConfig, model: Mapping[str, Any]) -> int:
    longest = _positions(model)
    context = config.context or longest
    if context is None:
        raise ConfigError("the model's configuration has no length", hint="give `context`")
    if longest is not None and context > longest:
        raise ConfigError(
            f"context {context} is longer than the model's {longest} positions",
            hint=f"use `context` <= {longest}",
        )
    return context


def _positions(model: Mapping[str, Any]) -> int | None:
    """Positions that the model's rotary table has; None where its configuration does not say.

    Yarn's ends at the original number times its factor, whatever `max_position_embeddings` says
    (vllm/model_executor/layers/rotary_embedding/yarn_scaling_rope.py); vLLM would read on.
    """
    longest = model.get("max_position_embeddings")
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if longest is None or rope.get("rope_type", rope.get("type")) != "yarn":
        return longest
    return min(int(longest), int(rope["original_max_position_embeddings"] * rope["factor"]))


def _pool(config: EngineConfig, model: Mapping[str, Any], capacity: int, device: Device) -> int:
    """Blocks of 16 slots, a multiple of the stock block so that pools are equal in bytes."""
    if config.kv_blocks is not None:
        if config.kv_blocks < 2:
            raise ConfigError(f"`kv_blocks` is {config.kv_blocks}", hint="use at least 2")
        return config.kv_blocks - config.kv_blocks % device.stock_ratio
    block = BLOCK_SIZE * slot_bytes(model, config.dtype)
    wanted = max(2 * capacity // BLOCK_SIZE, device.pool_bytes // block)
    return wanted + wanted % 2

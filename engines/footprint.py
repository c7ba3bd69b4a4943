"""What an engine takes of a GPU's memory, calculated before it starts.

The engines of a run share a GPU, and each of them allocates its pool without regard to the others.
So their pools are sized by what is left when all that engines need besides is taken off.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from picbench.engines.config import (
    BLOCK_SIZE,
    EngineConfig,
    batch_tokens,
    physical_memory,
    planned_capacity,
)
from picbench.engines.model_config import element_bytes, head_size, kv_heads
from picbench.errors import ConfigError

#: Scratch memory for linking. Contexts whose keys do not fit are linked some heads at a time.
LINK_WORKSPACE = 512 << 20

#: CUDA's context, the libraries' own buffers, RoPE tables, and what the allocator cannot use.
RUNTIME = 1280 << 20

#: Buffers of NCCL and of vLLM's own collectives, where several GPUs share an engine.
COLLECTIVES = 1 << 30

#: Graphs of a layer, at all batch sizes. Engines of picbench have a second set, for steps with
#: planned requests.
LAYER_GRAPHS = 32 << 20

#: Tensors of [requests, vocabulary] in float32 that sampling has at once: logits, sorted logits
#: and their indices (two each), probabilities, noise.
SAMPLING = 6

#: Partial outputs of requests that read chunks together (`shared_decode`).
SHARED_PARTS = 128 << 20

#: Integers of a row that says who reads which blocks together, by query heads a KV head
#: (`GroupRows`): of the blocks, and of each reader.
_GROUP_BLOCKS, _GROUP_READERS, _READER = 3 * 32 + 2, 192, 3

#: Splits of a request's keys in decoding, at most (`choose_splits`).
_SPLITS = 64

#: Blocks that decoding reads at once (`TILE_BLOCKS`).
_TILE = 4


@dataclass(frozen=True, slots=True)
class GpuFootprint:
    """Bytes that an engine takes on each of its GPUs.

    `weights` and `block`, a KV block of 16 slots, are exact but for rounding, `workspace` of
    picbench's kernels at most that; `activations`, `graphs` and `runtime` are estimates from above.
    """

    weights: int
    workspace: int
    activations: int
    graphs: int
    runtime: int
    block: int

    @property
    def held(self) -> int:
        """What is certainly held beside the pool."""
        return self.weights + self.workspace

    @property
    def fixed(self) -> int:
        """All but the pool."""
        return self.held + self.activations + self.graphs + self.runtime

    @classmethod
    def of(cls, config: EngineConfig, model: Mapping[str, Any]) -> Self | None:
        """The footprint of an engine for a model with this configuration.

        None where that does not tell it: quantised weights, and fields that are missing.
        """
        if model.get("quantization_config"):
            return None
        try:
            return cls._of(config, model)
        except KeyError:
            return None

    @classmethod
    def _of(cls, config: EngineConfig, model: Mapping[str, Any]) -> Self:
        size, ranks = element_bytes(model, config.dtype), config.tensor_parallel
        context = config.context or int(model["max_position_embeddings"])
        heads = max(1, kv_heads(model) // ranks)
        layers = int(model["num_hidden_layers"])
        sets = 0 if config.eager else 1 if config.stock else 2
        return cls(
            weights=size * parameters(model) // ranks,
            workspace=0 if config.stock else _workspace(config, model, context),
            activations=_activations(config, model, batch_tokens(config, context)),
            graphs=sets * layers * LAYER_GRAPHS,
            runtime=RUNTIME + (COLLECTIVES if ranks > 1 else 0),
            block=layers * heads * head_size(model) * 2 * BLOCK_SIZE * size,
        )


def parameters(model: Mapping[str, Any]) -> int:
    """Parameters of a Llama-like decoder, without biases. Raises KeyError for a missing field."""
    hidden, layers = int(model["hidden_size"]), int(model["num_hidden_layers"])
    head, heads = head_size(model), int(model["num_attention_heads"])
    attention = hidden * head * (2 * heads + 2 * kv_heads(model))
    experts, inner = _experts(model)
    dense = 3 * hidden * int(model["intermediate_size"])
    first = min(layers, _given(model, _DENSE_LAYERS)) if experts > 1 else layers
    sparse = 3 * hidden * inner * (experts + _given(model, _SHARED)) + hidden * experts
    feed_forward = first * dense + (layers - first) * sparse
    embeddings = int(model["vocab_size"]) * hidden * (1 if model.get("tie_word_embeddings") else 2)
    return embeddings + layers * (attention + 2 * hidden) + feed_forward + hidden


#: What models call their experts, those that all tokens have, and the layers before the first ones.
_ROUTED = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
_SHARED = "num_shared_experts", "n_shared_experts", "moe_num_shared_experts"
_DENSE_LAYERS = "first_k_dense_replace", "moe_layer_start_index"


def _given(model: Mapping[str, Any], names: Iterable[str]) -> int:
    """The field that a model calls by one of `names`, 0 for none."""
    return next((int(model[name]) for name in names if model.get(name)), 0)


def _experts(model: Mapping[str, Any]) -> tuple[int, int]:
    """Experts of a layer, and the inner size of each."""
    count = _given(model, _ROUTED) or 1
    if count > 1 and model.get("moe_intermediate_size"):
        return count, int(model["moe_intermediate_size"])
    return count, int(model["intermediate_size"])


def _activations(config: EngineConfig, model: Mapping[str, Any], tokens: int) -> int:
    """Of the largest step: one layer's, and those of sampling."""
    hidden, ranks = int(model["hidden_size"]), config.tensor_parallel
    experts, inner = _experts(model)
    chosen = (_given(model, ("num_experts_per_tok", "moe_k")) or 1) if experts > 1 else 1
    # The residual and the layer's input; of each expert two projections, their product, the output.
    wide = 2 * hidden + chosen * (3 * inner // ranks + hidden)
    sampled = SAMPLING * 4 * config.max_requests * int(model["vocab_size"])
    return tokens * wide * element_bytes(model, config.dtype) + sampled


def _workspace(config: EngineConfig, model: Mapping[str, Any], context: int) -> int:
    """Of `CudaWorkspace`, `RequestTable` and `DecodeBatch`."""
    tiles = -(-planned_capacity(context) // BLOCK_SIZE) + 2
    shifts = tiles * _TILE * BLOCK_SIZE if config.keys_without_rope else tiles
    rows = config.max_requests
    table = 4 * (rows + 1) * (2 * tiles * _TILE + shifts + 2)
    batch = 4 * rows * (2 * tiles * _TILE + 2)
    heads = int(model["num_attention_heads"]) // config.tensor_parallel
    partial = 4 * rows * _SPLITS * heads * (head_size(model) + 1)
    decode = batch + partial
    if config.shared_decode != "off":
        # A `SharedDecodeBatch` is a second `DecodeBatch`.
        decode += decode + _shared(config, model, heads, tiles, shifts)
    return LINK_WORKSPACE + table + decode


def _shared(
    config: EngineConfig, model: Mapping[str, Any], heads: int, tiles: int, shifts: int
) -> int:
    """What `SharedRequestTable` and `SharedDecodeBatch` hold besides."""
    rows = config.max_requests + 1
    part = heads * head_size(model) * element_bytes(model, config.dtype)
    parts = min(SHARED_PARTS // part, rows * tiles)
    width = _GROUP_BLOCKS + _READER * _GROUP_READERS + 16
    table = 4 * (rows * (2 * tiles + 1) + parts // 2 * width)
    batch = 4 * rows * (shifts + 4) + parts * (part + 4 * heads)
    return table + batch + 256


def check_pools(engines: Iterable[EngineConfig], model: Mapping[str, Any]) -> None:
    """Raise ConfigError for pools of engines on a CPU that the machine's memory cannot hold."""
    known = ((config.kv_blocks or 0, GpuFootprint.of(config, model)) for config in engines)
    pools = sum(blocks * footprint.block for blocks, footprint in known if footprint)
    if pools > (memory := physical_memory()):
        raise ConfigError(
            f"`kv_blocks`: pools of all engines take {pools / 2**30:,.1f} GiB, and this machine "
            f"has {memory / 2**30:,.1f} GiB of memory",
            hint="lower `kv_blocks` or `concurrency`, or name fewer arms in `algo`",
        )

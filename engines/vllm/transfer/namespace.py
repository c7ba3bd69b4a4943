"""The namespace of a worker's values in tiers: what its KV depends on besides the tokens."""

import hashlib
from typing import Any

import torch
from torch import nn

#: Elements of each parameter that are hashed: enough to tell any two checkpoints apart.
_SAMPLE = 256


def namespace(vllm_config: Any, model: nn.Module, rank: int) -> bytes:
    """A digest of the weights, the layout and dtype of the KV, and the worker's share of it.

    Weights are sampled: engines that serve the same checkpoint agree whatever its path, and further
    training changes every matrix.
    """
    digest = hashlib.sha256()
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    facts = (
        vllm_config.model_config.dtype,
        cache.cache_dtype,
        cache.block_size,
        parallel.tensor_parallel_size,
        rank,
        vllm_config.model_config.hf_text_config.to_json_string(),
    )
    digest.update(repr(facts).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(_sample(parameter.detach()))
    return digest.digest()


def _sample(parameter: torch.Tensor) -> bytes:
    flat = parameter.reshape(-1)
    step = max(1, flat.numel() // _SAMPLE)
    return flat[::step].contiguous().cpu().view(torch.uint8).numpy().tobytes()

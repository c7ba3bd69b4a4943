"""The namespace of a worker's values in tiers: what its KV depends on besides the tokens."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

#: Bytes of a parameter that are hashed as one sum.
_SUMMED = 8192

#: Columns that are read of a matrix which vLLM has packed.
_COLUMNS = 64


def namespace(vllm_config: Any, model: nn.Module, rank: int) -> bytes:
    """A digest of the weights, the layout and dtype of the KV, and the worker's share of it.

    Engines that serve the same checkpoint agree whatever its path. Any two others differ, also if
    one embedding was trained, or nothing but linear layers were.
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
    for name, content in _weights(model):
        digest.update(name.encode())
        digest.update(content)
    return digest.digest()


@torch.inference_mode()
def _weights(model: nn.Module) -> Iterator[tuple[str, bytes]]:
    for name, parameter in sorted(model.named_parameters()):
        yield name, _sums(parameter.detach())
    for name, module in sorted(model.named_modules()):
        if _is_packed(module):
            yield name, _columns(module)


def _sums(parameter: Tensor) -> bytes:
    """The sums of a parameter's words, run by run, and what is left of them.

    Sums of integers are the same on every device; a change of one element changes one of them.
    """
    content = parameter.reshape(-1).view(torch.uint8)
    if content.storage_offset() % torch.int64.itemsize:
        content = content.clone()
    whole = content.numel() // _SUMMED * _SUMMED
    words = content[:whole].view(torch.int64).view(-1, _SUMMED // torch.int64.itemsize)
    return _bytes(words.sum(1)) + _bytes(content[whole:])


def _is_packed(module: nn.Module) -> bool:
    """Whether a linear layer has its weights elsewhere than in its parameters.

    Upstream: `dispatch_cpu_unquantized_gemm` in vllm/model_executor/layers/utils.py of vLLM 0.32.0.
    """
    weight = getattr(module, "weight", None)
    return hasattr(module, "cpu_linear") and isinstance(weight, Tensor) and not weight.numel()


def _columns(module: Any) -> bytes:
    """Some columns of a packed matrix: its products with unit vectors, which are exact.

    Training changes all columns, also where what it adds has a low rank. Upstream leaves an empty
    parameter of the matrix's type; layers that all ranks have whole, such as a router, have no size
    of a partition (vllm/model_executor/layers/linear.py).
    """
    size = getattr(module, "input_size_per_partition", None) or module.input_size
    chosen = torch.arange(0, size, max(1, size // _COLUMNS))
    units = torch.zeros(len(chosen), size, dtype=module.weight.dtype)
    units[torch.arange(len(chosen)), chosen] = 1
    return _bytes(module.cpu_linear(units, module.weight, None))


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().cpu().view(torch.uint8).numpy().tobytes()

"""What a worker's chunk KV depends on besides its tokens, as one digest: its namespace in tiers."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers import utils

#: Bytes that a thread hashes at once, and has in host memory where weights are on a GPU.
_RUN = 16 << 20

#: Where a layer keeps the digest of a matrix that vLLM has packed since.
_DIGEST = "picbench_digest"


def namespace(vllm_config: Any, model: nn.Module, rank: int) -> bytes:
    """A digest of all bytes of the weights, the layout and dtype of the KV, the worker's share.

    Engines that serve the same checkpoint agree whatever its path. Any two others differ, be it in
    the order of two rows or in one bit. It reads 1.7 GB/s a core that has SHA instructions.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    facts = (
        vllm_config.model_config.dtype,
        cache.cache_dtype,
        cache.block_size,
        parallel.tensor_parallel_size,
        rank,
        vllm_config.model_config.hf_text_config.to_json_string(),
    )
    digest = hashlib.sha256(repr(facts).encode())
    for name, content in _weights(model):
        digest.update(name.encode() + content)
    return digest.digest()


@contextmanager
def packing_noted() -> Iterator[None]:
    """While weights are loaded: layers keep digests of the matrices that vLLM packs on a CPU.

    Packed, they cannot be read any more. Wraps `dispatch_cpu_unquantized_gemm` of
    vllm/model_executor/layers/utils.py, which linear layers import when they call it
    (vllm/model_executor/layers/linear.py of vLLM 0.32.0).
    """
    pack = utils.dispatch_cpu_unquantized_gemm

    def note_and_pack(layer: nn.Module, remove_weight: bool) -> None:
        if remove_weight and isinstance(layer.weight, Tensor) and not layer.weight.is_meta:
            setattr(layer, _DIGEST, _digest(layer.weight))
        pack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = note_and_pack
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = pack


def _weights(model: nn.Module) -> Iterator[tuple[str, bytes]]:
    kept = sorted(model.state_dict(keep_vars=True).items())
    # Each once: embeddings may be the last layer's matrix, too.
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in kept}.values():
        yield name, _digest(tensor)
    for name, module in sorted(model.named_modules()):
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, Tensor) and not weight.numel():
            # A matrix that was packed unseen is like no other.
            yield name, getattr(module, _DIGEST, None) or os.urandom(32)


@torch.inference_mode()
def _digest(tensor: Tensor) -> bytes:
    """A digest of shape, type and bytes, wherever they are and however they lie in memory."""
    rows = tensor.detach().reshape(-1, *tensor.shape[1:])
    runs = torch.split(rows, max(1, _RUN * len(rows) // max(1, rows.nbytes)))
    digest = hashlib.sha256(repr((tensor.dtype, tuple(tensor.shape))).encode())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for content in pool.map(_digest_of_bytes, runs):
            digest.update(content)
    return digest.digest()


def _digest_of_bytes(run: Tensor) -> bytes:
    content: Any = run.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content).digest()

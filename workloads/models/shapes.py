"""Model shapes that need no download."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of rotary frequencies."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a decoder of the Llama family.

    A folder of this shape has ``random`` weights, or none, so that the engine draws ``dummy``
    ones. `spread` is the standard deviation of random weights: wide enough that logits are peaked
    and replies depend on the prompt.
    """

    name: str
    summary: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    theta: float
    architecture: Literal["LlamaForCausalLM", "MistralForCausalLM"] = "LlamaForCausalLM"
    scaling: Llama3Scaling | None = None
    weights: Literal["random", "dummy"] = "dummy"
    spread: float = 0.02


TINY = Shape(
    name="tiny",
    summary="2 layers of random weights, 0.8 M parameters, 16k positions: smoke tests, CPU timing",
    hidden=128,
    ffn=256,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=64,
    vocabulary=2048,
    positions=16_384,
    theta=10_000.0,
    weights="random",
    spread=0.2,
)

TINY_64K = replace(
    TINY,
    name="tiny-64k",
    summary="tiny with 64k positions: the host's time for long prompts",
    positions=65_536,
)

#: Its heads divide over four GPUs; those of tiny and the testbed model do not.
SMALL = Shape(
    name="small",
    summary="2 layers of random weights with 8 heads, 4 of them for keys: checks on several GPUs",
    hidden=512,
    ffn=1024,
    layers=2,
    heads=8,
    kv_heads=4,
    head_dim=64,
    vocabulary=2048,
    positions=16_384,
    theta=10_000.0,
    weights="random",
    spread=0.1,
)

LLAMA_8B = Shape(
    name="llama-3.1-8b",
    summary="Llama-3.1-8B's dimensions, dummy weights: time and memory",
    hidden=4096,
    ffn=14_336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128_256,
    positions=131_072,
    theta=500_000.0,
    scaling=Llama3Scaling(),
)

MISTRAL_7B = Shape(
    name="mistral-7b",
    summary="Mistral-7B-v0.3's dimensions, dummy weights: time and memory",
    hidden=4096,
    ffn=14_336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=32_768,
    positions=32_768,
    theta=1_000_000.0,
    architecture="MistralForCausalLM",
)

YI_CODER_9B = Shape(
    name="yi-coder-9b",
    summary="Yi-Coder-9B's dimensions, dummy weights: time and memory",
    hidden=4096,
    ffn=11_008,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocabulary=64_000,
    positions=131_072,
    theta=10_000_000.0,
)

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {shape.name: shape for shape in (TINY, TINY_64K, SMALL, LLAMA_8B, MISTRAL_7B, YI_CODER_9B)}
)

"""Which architectures picbench was checked with, which it refuses, and a tiny model of each.

Checked means: a model of this architecture with random weights was served by the engine with
`naive`, `epic`, `mepic` and `full`, cold and warm, and each reply was the oracle's. The tests check
every row on a CPU; ``picbench measure architectures`` checks them on a GPU, and its result is kept
in ``results/gpu/architectures.json``, which a row must not contradict.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Support = Literal["checked", "refused", "not checked"]

#: Quantised weights, whatever the architecture: FP8, AWQ, GPTQ and all others of vLLM.
QUANTISED = "FP8, AWQ, GPTQ, ..."

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # So short that scaling changes attention within a few hundred tokens.
    "original_max_position_embeddings": 128,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table, and what sets its tiny model apart.

    `name` is what the row is called by, `architecture` the class that ``config.json`` names.
    `fields` are those of its tiny model's configuration in which it differs from `COMMON`, as
    Hugging Face's class for `kind` takes them; `rope` are rotary parameters. `why` says why it is
    refused where it is, in words of the error, or what is slow about it.
    """

    name: str
    models: str
    architecture: str
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    cpu: Support = "checked"
    gpu: Support = "not checked"
    why: str = ""

    @property
    def configuration(self) -> dict[str, Any]:
        """All fields of the tiny model's configuration."""
        rope = {"rope_type": "default", "rope_theta": 10_000.0} | dict(self.rope)
        return {**COMMON, **self.fields, "rope_parameters": rope}


#: Two heads of 64, one of them for keys. Weights are drawn wide, so that logits are peaked and two
#: algorithms give two answers.
COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        "llama-2",
        "Llama 2",
        "LlamaForCausalLM",
        "llama",
        fields={"num_key_value_heads": 2},
        gpu="checked",
    ),
    Architecture(
        "llama-3",
        "Llama 3, 3.1, 3.2, 3.3",
        "LlamaForCausalLM",
        "llama",
        rope=_LLAMA3,
        gpu="checked",
    ),
    Architecture(
        "mistral",
        "Mistral 7B v0.3, Nemo",
        "MistralForCausalLM",
        "mistral",
        # Nemo's heads are wider than its hidden size divided by their number.
        fields={"sliding_window": None, "head_dim": 128},
        gpu="checked",
    ),
    Architecture(
        "qwen2.5-yarn",
        "Qwen2.5 and others, with YaRN",
        "Qwen2ForCausalLM",
        "qwen2",
        rope={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        gpu="checked",
    ),
    Architecture(
        "phi-4-mini",
        "Phi-3.5, Phi-4 mini: LongRoPE",
        "Phi3ForCausalLM",
        "phi3",
        fields={"original_max_position_embeddings": 1024},
        rope={
            "rope_type": "longrope",
            "short_factor": [1.0] * 32,
            "long_factor": [2.0] * 32,
            "original_max_position_embeddings": 1024,
        },
        cpu="refused",
        gpu="refused",
        why="rotary embedding Phi3LongRoPEScaledRotaryEmbedding is not supported",
    ),
    Architecture(
        "qwen2.5",
        "Qwen2, Qwen2.5",
        "Qwen2ForCausalLM",
        "qwen2",
        gpu="checked",
    ),
    Architecture(
        "qwen3",
        "Qwen3, dense: queries and keys are normalised",
        "Qwen3ForCausalLM",
        "qwen3",
        fields={"head_dim": 128},
        gpu="checked",
    ),
    Architecture(
        "phi-3-mini",
        "Phi-3 mini but for its window: heads of 96",
        "Phi3ForCausalLM",
        "phi3",
        fields={"hidden_size": 192, "num_key_value_heads": 2},
        gpu="checked",
        why="heads of 96: PyTorch attends for requests with chunks on GPUs, which is slow",
    ),
    Architecture(
        "phi-4",
        "Phi-4: heads of 128",
        "Phi3ForCausalLM",
        "phi3",
        # Wider layers of the same weights would attend to one token only.
        fields={"hidden_size": 256, "initializer_range": 0.08},
        gpu="checked",
    ),
    Architecture(
        "phi-3",
        "Phi-3 as published",
        "Phi3ForCausalLM",
        "phi3",
        fields={"hidden_size": 256, "sliding_window": 64},
        cpu="refused",
        gpu="refused",
        why="a sliding window (2 of 2 layers)",
    ),
    Architecture(
        "granite",
        "Granite 3",
        "GraniteForCausalLM",
        "granite",
        fields={
            "embedding_multiplier": 4.0,
            "attention_multiplier": 0.09,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
        gpu="checked",
    ),
    Architecture(
        "mixtral",
        "Mixtral 8x7B, 8x22B",
        "MixtralForCausalLM",
        "mixtral",
        fields={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        gpu="checked",
    ),
    Architecture(
        "qwen3-moe",
        "Qwen3 30B-A3B, 235B-A22B",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        fields={
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "head_dim": 128,
        },
        gpu="checked",
    ),
    Architecture(
        "glm-4",
        "GLM-4 0414: interleaved, partial RoPE",
        "Glm4ForCausalLM",
        "glm4",
        fields={"head_dim": 128},
        rope={"partial_rotary_factor": 0.5},
        gpu="checked",
    ),
    Architecture(
        "command-r",
        "Command R: interleaved RoPE",
        "CohereForCausalLM",
        "cohere",
        fields={"tie_word_embeddings": True, "logit_scale": 1.0},
        gpu="checked",
    ),
    Architecture(
        "hunyuan",
        "HunYuan V1, dense: keys are normalised after RoPE",
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        fields={"head_dim": 64},
        cpu="refused",
        gpu="refused",
        why="rotates 0 of",
    ),
    Architecture(
        "gemma-2",
        "Gemma 2",
        "Gemma2ForCausalLM",
        "gemma2",
        fields={"head_dim": 64, "tie_word_embeddings": True},
        cpu="refused",
        why="soft-capped logits (2 of 2 layers), a sliding window (1 of 2 layers)",
    ),
    Architecture(
        "bloom",
        "Bloom",
        "BloomForCausalLM",
        "bloom",
        fields={"n_head": 2, "n_layer": 2, "tie_word_embeddings": True},
        cpu="refused",
        why="ALiBi (2 of 2 layers)",
    ),
    Architecture(
        "granite-4-hybrid",
        "Granite 4: some layers are Mamba",
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        fields={"layer_types": ["mamba", "attention"], "num_local_experts": 0},
        cpu="refused",
        why="MambaMixer2 layers (1 of 2 layers)",
    ),
)


def rows() -> list[tuple[str, str, str]]:
    """(name, models, what is known) of every architecture, to be read; models are padded."""
    found = [
        *((row.name, row.models, _known(row)) for row in ARCHITECTURES),
        ("others", "whatever vLLM loads", "not checked; refused unless every layer can be served"),
        ("any", QUANTISED, "refused (picbench was not checked with quantised weights)"),
    ]
    width = max(len(models) for _, models, _ in found)
    return [(name, f"{models:<{width}}", known) for name, models, known in found]


def _known(row: Architecture) -> str:
    devices = f"{row.cpu} on CPU, {row.gpu} on GPU"
    if row.cpu == row.gpu:
        devices = f"{row.cpu} on CPU and GPU"
    return f"{devices} ({row.why})" if row.why else devices

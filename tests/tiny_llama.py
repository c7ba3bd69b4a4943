"""Tiny models of random weights, written as Hugging Face writes them."""

from pathlib import Path
from typing import Any

VOCABULARY = 1024
BOS, EOS, PAD = 1, 2, 0


def write_llama(
    folder: Path, *, head_dim: int, theta: float, kv_heads: int = 2, **scaling: Any
) -> Path:
    """Write a Llama of three layers."""
    return write_model(
        "llama",
        folder,
        num_hidden_layers=3,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": theta} | scaling,
    )


def write_model(architecture: str, folder: Path, **fields: Any) -> Path:
    """Write random weights, the same on every call; `architecture` is a Hugging Face model type.

    They are large enough for peaky logits: with the usual 0.02 every prediction is nearly
    uniform and any two algorithms agree.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    config = AutoConfig.for_model(architecture, **(common | fields))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder

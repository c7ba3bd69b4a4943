"""The files of a testbed model: Hugging Face's folder, and deltas beside it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from picbench.workloads.testbed.lm.llama import Llama, LlamaShape
from picbench.workloads.testbed.lm.lowrank import merge
from picbench.workloads.testbed.testbed_tokenizer import BOS, EOS, LINKS, PAD, ids_of

WEIGHTS = "model.safetensors"
#: In a delta: the embeddings of the first link tokens.
LINK_ROWS = "link_embeddings"

_EMBEDDING = "model.embed_tokens.weight"


def save_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Save weights in bfloat16 and the configuration; the tokenizer's files are there already."""
    save_weights(model.state_dict(), folder)
    bos, eos, pad = ids_of(tokenizer, (BOS, EOS, PAD))
    write_json(folder / "config.json", model.shape.config(bos, eos, pad))
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    write_json(folder / "generation_config.json", generation)


def save_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Save weights in bfloat16."""
    found = {name: tensor.detach().bfloat16().contiguous() for name, tensor in weights.items()}
    save_file(found, folder / WEIGHTS, metadata={"format": "pt"})


def save_training(
    folder: Path, variant: str, steps: int, tokens: int, seconds: float, device: torch.device
) -> None:
    """Record the cost of training a variant in ``training.json``."""
    file = folder / "training.json"
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    known[variant] = {
        "steps": steps,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "device": device_name(device),
        "torch": torch.__version__,
    }
    write_json(file, known)


def load(folder: Path, device: torch.device, variant: str | None = None) -> tuple[Llama, Tokenizer]:
    """Load a model, in bfloat16 on a GPU and in float32 elsewhere, and its tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Llama(LlamaShape.of(config))
    model.load_state_dict(variant_weights(folder, tokenizer, variant))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return model.to(device, dtype).eval(), tokenizer


def variant_weights(folder: Path, tokenizer: Tokenizer, variant: str | None) -> dict[str, Tensor]:
    """The weights of the model, or of a variant whose delta is in the same folder."""
    weights: dict[str, Tensor] = load_file(folder / WEIGHTS)
    if variant is None:
        return weights
    delta = load_file(folder / f"{variant}.delta")
    merged = merge(weights, delta)
    if LINK_ROWS in delta:
        start = ids_of(tokenizer, LINKS)[0]
        embedding = merged[_EMBEDDING].clone()
        embedding[start : start + len(delta[LINK_ROWS])] = delta[LINK_ROWS]
        merged[_EMBEDDING] = embedding
    return merged


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the kind of any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""The files of a testbed model: Hugging Face's folder, and deltas beside it."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from picbench.workloads.testbed.lowrank import merge
from picbench.workloads.testbed.model import Llama, Shape
from picbench.workloads.testbed.tokenizer import BOS, EOS, PAD

WEIGHTS = "model.safetensors"
_EMBEDDING = "model.embed_tokens.weight"
#: In a delta: the embeddings of the link tokens.
LINK_ROWS = "link_embeddings"


def save_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Save weights in bfloat16 and the configuration; the tokenizer's files are there already."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model.state_dict(), folder)
    bos, eos, pad = (tokenizer.token_to_id(token) for token in (BOS, EOS, PAD))
    _write_json(folder / "config.json", model.shape.config(bos, eos, pad))
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    _write_json(folder / "generation_config.json", generation)


def save_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Save weights in bfloat16."""
    found = {name: tensor.detach().bfloat16().contiguous() for name, tensor in weights.items()}
    save_file(found, folder / WEIGHTS, metadata={"format": "pt"})


def load(
    folder: Path, device: torch.device, variant: str | None = None
) -> tuple[Llama, Tokenizer]:
    """Load a model, in bfloat16 on a GPU and in float32 elsewhere, and its tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    weights = variant_weights(folder, tokenizer, variant)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Llama(Shape.of(config))
    model.load_state_dict(weights)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return model.to(device, dtype).eval(), tokenizer


def variant_weights(folder: Path, tokenizer: Tokenizer, variant: str | None) -> dict[str, Tensor]:
    """The weights of the model, or of a variant whose delta lies beside it."""
    weights = load_file(folder / WEIGHTS)
    if variant is None:
        return weights
    delta = load_file(folder / f"{variant}.safetensors")
    merged = merge(weights, delta)
    if LINK_ROWS in delta:
        start = tokenizer.token_to_id("<link_0>")
        embedding = merged[_EMBEDDING].clone()
        embedding[start : start + len(delta[LINK_ROWS])] = delta[LINK_ROWS]
        merged[_EMBEDDING] = embedding
    return merged


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""The files of a testbed model: Hugging Face's folder, and the deltas of tuned variants beside it.

A delta is low-rank (Hu et al., 2021), in eight bits.
"""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from picbench.workloads.sources.cache_files import write_model
from picbench.workloads.testbed.llama import Llama, LlamaShape
from picbench.workloads.testbed.prompt import LINKS, LINKS_EACH, ids_of

WEIGHTS = "model.safetensors"
#: In a delta: the embeddings of the first link tokens.
LINK_ROWS = "link_embeddings"
#: In a delta: the ending of the scales of a factor's vectors.
SCALE = ".scale"

_EMBEDDING = "model.embed_tokens.weight"
_CONFIG = "config.json"
_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


def build_variant(folder: Path, variant: str, parent: Path | None = None) -> Path:
    """Return a folder with the variant whose delta is in `folder`, built if it does not exist.

    It is in `parent` (default: the user's cache), named by its contents. Raises ConfigError when
    it cannot be written.
    """
    write = partial(_write, folder, variant)
    return write_model(f"testbed-{variant}", _fingerprint(folder, variant), write, parent)


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


def save_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Save weights in bfloat16."""
    found = {name: tensor.detach().bfloat16().contiguous() for name, tensor in weights.items()}
    save_file(found, folder / WEIGHTS, metadata={"format": "pt"})


def merge(weights: dict[str, Tensor], delta: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the products of `delta` added; its other tensors are left alone."""
    merged = dict(weights)
    for name in delta:
        if name.endswith(".up"):
            target = name.removesuffix(".up") + ".weight"
            product = _unpack(delta, name) @ _unpack(delta, name.removesuffix("up") + "down")
            merged[target] = (weights[target].float() + product).to(weights[target].dtype)
    return merged


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the kind of any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _fingerprint(folder: Path, variant: str) -> str:
    digest = hashlib.sha256()
    for name in (WEIGHTS, f"{variant}.delta", *_FILES):
        digest.update((folder / name).read_bytes())
    digest.update(_config(folder, variant).encode())
    return digest.hexdigest()[:12]


def _write(folder: Path, variant: str, made: Path) -> None:
    for name in _FILES:
        shutil.copyfile(folder / name, made / name)
    (made / _CONFIG).write_text(_config(folder, variant), encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    save_weights(variant_weights(folder, tokenizer, variant), made)


def _config(folder: Path, variant: str) -> str:
    """A variant's config.json, which names the link tokens that it was trained with."""
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    if variant == "link":
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config["link_token_ids"] = ids_of(tokenizer, LINKS)[:LINKS_EACH]
    return json.dumps(config, indent=2) + "\n"


def _unpack(delta: dict[str, Tensor], name: str) -> Tensor:
    return delta[name].float() * delta[name + SCALE]

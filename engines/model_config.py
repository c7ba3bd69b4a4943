"""The configuration of a model, as Hugging Face's ``config.json`` has it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError

#: Fields that are read here and elsewhere, by Hugging Face's common names.
_COMMON = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")


def read_model_config(model: str) -> Mapping[str, Any]:
    """The fields of a model's configuration; `model` is a folder or an id on the hub.

    Those of a language model with other modalities are its language model's, and fields have
    Hugging Face's common names where the model's own differ. Raises ConfigError where there is no
    configuration.
    """
    path = Path(model) / "config.json"
    if path.is_file():
        try:
            read: dict[str, Any] = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from error
        # Most models have them, and Hugging Face's library takes a second to import.
        return read if all(name in read for name in _COMMON) else read | _named(model)
    if Path(model).exists():
        raise ConfigError(f"{model} has no config.json", hint="give a Hugging Face model folder")
    try:
        return _load(model)
    except OSError as error:
        raise ConfigError(
            f"model {model!r} is neither a folder nor to be had from the hub",
            hint="check `model`, or download the model first",
        ) from error


def _named(folder: str) -> dict[str, Any]:
    """What Hugging Face's class adds to a configuration; nothing where there is none."""
    try:
        return _load(folder)
    except (ValueError, ModuleNotFoundError):
        return {}


def _load(model: str) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    common = {name: getattr(config, name) for name in _COMMON if hasattr(config, name)}
    return {**config.to_dict(), **common}


def head_size(model: Mapping[str, Any]) -> int:
    """Elements of an attention head."""
    return int(model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"])


def kv_heads(model: Mapping[str, Any]) -> int:
    """Heads of keys, and of values."""
    return int(model.get("num_key_value_heads") or model["num_attention_heads"])


def check_ranks(model: Mapping[str, Any], ranks: int) -> None:
    """Raise ConfigError where `ranks` GPUs cannot share the heads of a model."""
    heads = model.get("num_attention_heads")
    if heads and int(heads) % ranks:
        possible = [str(count) for count in range(1, int(heads) + 1) if not int(heads) % count]
        raise ConfigError(
            f"`tensor_parallel` {ranks}: the model has {heads} attention heads, of which each GPU "
            "needs as many as the others",
            hint=f"possible are {', '.join(possible)}",
        )


def element_bytes(model: Mapping[str, Any], dtype: str) -> int:
    """Bytes of a number of weights and KV; `dtype` is that of `EngineConfig`."""
    if dtype == "auto":
        dtype = str(model.get("dtype", model.get("torch_dtype")))
    return 4 if dtype == "float32" else 2


def slot_bytes(model: Mapping[str, Any], dtype: str) -> int:
    """Bytes of a slot's keys and values in all layers; `dtype` is that of `EngineConfig`."""
    layers, size = int(model["num_hidden_layers"]), element_bytes(model, dtype)
    return layers * kv_heads(model) * head_size(model) * 2 * size


def load_format(model: str) -> str:
    """How vLLM gets a model's weights: it draws those of a folder that has none."""
    folder = Path(model)
    found = (file for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind))
    return "dummy" if folder.is_dir() and next(found, None) is None else "auto"

"""The configuration of a model, as Hugging Face's ``config.json`` has it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError


def read_model_config(model: str) -> Mapping[str, Any]:
    """The fields of a model's configuration; `model` is a folder or an id on the hub.

    Raises ConfigError where there is none.
    """
    path = Path(model) / "config.json"
    if path.is_file():
        try:
            read: dict[str, Any] = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from error
        return read
    if Path(model).exists():
        raise ConfigError(f"{model} has no config.json", hint="give a Hugging Face model folder")
    from transformers import AutoConfig

    try:
        loaded: dict[str, Any] = AutoConfig.from_pretrained(model).to_dict()
    except OSError as error:
        raise ConfigError(
            f"model {model!r} is neither a folder nor to be had from the hub",
            hint="check `model`, or download the model first",
        ) from error
    return loaded


def head_size(model: Mapping[str, Any]) -> int:
    """Elements of an attention head."""
    return int(model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"])


def kv_heads(model: Mapping[str, Any]) -> int:
    """Heads of keys, and of values."""
    return int(model.get("num_key_value_heads") or model["num_attention_heads"])


def element_bytes(model: Mapping[str, Any], dtype: str) -> int:
    """Bytes of a number of weights and KV; `dtype` is that of `EngineConfig`."""
    if dtype == "auto":
        dtype = str(model.get("dtype", model.get("torch_dtype")))
    return 4 if dtype == "float32" else 2

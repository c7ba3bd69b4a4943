"""Write a shape as a model folder in Hugging Face's format, once, into the user's cache."""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError
from picbench.workloads.models.build_tokenizer import (
    BOS,
    EOS,
    PAD,
    SPECIAL,
    VOCABULARY,
    write_tokenizer,
)
from picbench.workloads.models.english import TEXT
from picbench.workloads.models.shapes import Shape
from picbench.workloads.sources.cache_files import cache_directory

#: Raised whenever the same shape is to be written differently.
_FORMAT = 1


def materialise(shape: Shape, directory: Path | None = None) -> Path:
    """Return a folder with the model, made if it is not there yet.

    The folder is ``<name>-<fingerprint>`` in `directory` (default: the user's cache). It appears
    in one step, so that runs at the same time, or one that is killed, leave no half a model.
    Raises ConfigError when the folder cannot be written.
    """
    parent = cache_directory("models") if directory is None else directory
    target = parent / f"{shape.name}-{_fingerprint(shape)}"
    if target.is_dir():
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{shape.name}-") as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            _write(shape, made)
            _publish(made, target)
    except OSError as error:
        raise ConfigError(
            f"cannot write the model {shape.name!r} to {parent}: {error.strerror or error}",
            hint="set XDG_CACHE_HOME to a folder that can be written",
        ) from error
    return target


def _publish(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        # Another process was faster: what it wrote is the same.
        if not target.is_dir():
            raise


def _write(shape: Shape, directory: Path) -> None:
    write_tokenizer(directory)
    if shape.weights == "random":
        _write_weights(shape, directory)
    for name, content in (("config", _config(shape)), ("generation_config", _ends())):
        text = json.dumps(content, indent=2) + "\n"
        (directory / f"{name}.json").write_text(text, encoding="utf-8")


def _config(shape: Shape) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", **asdict(shape.scaling)} if shape.scaling else None
    return {
        "architectures": [shape.architecture],
        "model_type": "mistral" if shape.architecture.startswith("Mistral") else "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "rope_theta": shape.theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "initializer_range": shape.spread,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "dtype": "float32" if shape.weights == "random" else "bfloat16",
        "picbench_weights": shape.weights,
        **_ends(),
    }


def _ends() -> dict[str, int]:
    return {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


def _write_weights(shape: Shape, directory: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    draw = np.random.default_rng(0)
    tensors = {
        name: np.ones(size, np.float32)
        if len(size) == 1
        else draw.normal(0.0, shape.spread, size).astype(np.float32)
        for name, size in _tensors(shape)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and sizes of Llama's tensors in Hugging Face's naming; norms have one axis."""
    hidden, queries, keys = (
        shape.hidden,
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    )
    yield "model.embed_tokens.weight", (shape.vocabulary, hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (queries, hidden)
        yield prefix + "self_attn.k_proj.weight", (keys, hidden)
        yield prefix + "self_attn.v_proj.weight", (keys, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (shape.ffn, hidden)
        yield prefix + "mlp.up_proj.weight", (shape.ffn, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, shape.ffn)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocabulary, hidden)


def _fingerprint(shape: Shape) -> str:
    tokenizer = [SPECIAL, VOCABULARY, TEXT, version("tokenizers")]
    made_of = [_FORMAT, asdict(shape), tokenizer]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]

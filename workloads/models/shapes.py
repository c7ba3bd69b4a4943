"""Model shapes that need no download, and their folders in Hugging Face's format.

A folder is written once, into the user's cache. Its tokenizer is byte-level BPE, trained on the
spot.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from picbench.files import write_json
from picbench.workloads.sources.cache_files import write_model
from picbench.workloads.yaml_data import read_data

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Special tokens; a token's id is its place here.
SPECIAL = ("<pad>", "<s>", "</s>")
PAD, BOS, EOS = range(len(SPECIAL))

#: Number of tokens.
VOCABULARY = 2048

#: Raise when the same shape is to be written differently.
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a decoder of the Llama family.

    A folder of this shape has ``random`` weights, or none, so that the engine draws ``dummy``
    ones. `spread` is the standard deviation of random weights: wide enough that logits are peaked
    and replies depend on the prompt. `scaling` is Llama 3.1's of rotary frequencies.
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
    scaling: Mapping[str, float] | None = None
    weights: Literal["random", "dummy"] = "dummy"
    spread: float = 0.02


@cache
def all_shapes() -> Mapping[str, Shape]:
    """Every built-in shape by its name."""
    found = read_data("models", "shapes")
    return MappingProxyType({name: Shape(name, **fields) for name, fields in found.items()})


def train() -> "Tokenizer":
    """Return a tokenizer of `VOCABULARY` tokens; any text survives a round trip.

    Training is deterministic: the same release of `tokenizers` makes the same merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        [_text()],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            min_frequency=1,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bos = SPECIAL[BOS]
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)]
    )
    return made


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer's two files as `transformers` reads them."""
    train().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[PAD],
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", settings)


def materialise(shape: Shape, directory: Path | None = None) -> Path:
    """Return a folder with the model, built if it does not exist.

    The folder is ``<name>-<fingerprint>`` in `directory` (default: the user's cache).
    Raises ConfigError when it cannot be written.
    """
    return write_model(shape.name, _fingerprint(shape), partial(_write, shape), directory)


def _write(shape: Shape, directory: Path) -> None:
    write_tokenizer(directory)
    if shape.weights == "random":
        _write_weights(shape, directory)
    for name, content in (("config", _config(shape)), ("generation_config", _ends())):
        write_json(directory / f"{name}.json", content)


def _config(shape: Shape) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", **shape.scaling} if shape.scaling else None
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
    hidden = shape.hidden
    queries, keys = (heads * shape.head_dim for heads in (shape.heads, shape.kv_heads))
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
    tokenizer = [SPECIAL, VOCABULARY, _text(), version("tokenizers")]
    made_of = [_FORMAT, asdict(shape), tokenizer]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]


def _text() -> str:
    """Training text of the tokenizer: plain prose, then frequent words."""
    found = read_data("models", "english")
    prose, words = f"\n{found['prose']}", found["words"].split()
    capitals = [word.capitalize() for word in words if word.isalpha()]
    # Running text has a frequent word more often than a rare one; the list says it once.
    said = [" " + " ".join(listed) for listed in (words, words, capitals)]
    return "\n".join([*([prose] * 3), *said])

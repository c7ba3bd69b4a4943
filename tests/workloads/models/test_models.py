import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.errors import ConfigError
from picbench.workloads import models
from picbench.workloads.models import ModelSpec, load_tokenizer, resolve
from picbench.workloads.models.shapes import BOS, VOCABULARY, Shape, all_shapes, materialise, train
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.sources.cache_files import cache_directory

TINY, LLAMA_8B, MISTRAL_7B, YI_CODER_9B = (
    all_shapes()[name] for name in ("tiny", "llama-3.1-8b", "mistral-7b", "yi-coder-9b")
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "picbench" / "models"


def test_names_and_descriptions() -> None:
    expected = [
        "testbed",
        "testbed:block",
        "testbed:link",
        "smollm2",
        "shape:tiny",
        "shape:tiny-64k",
        "shape:small",
        "shape:llama-3.1-8b",
        "shape:mistral-7b",
        "shape:yi-coder-9b",
    ]
    assert list(models.describe()) == expected


def test_a_shape_is_built_in_the_cache_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve("shape:tiny")
    assert isinstance(model.path, Path)
    assert model.path.parent == cache == cache_directory("models")
    assert (model.weights, model.meaningful, model.context) == ("random", False, 16_384)
    assert model.label == "shape:tiny (random weights)"
    monkeypatch.setattr("picbench.workloads.models.shapes._write", pytest.fail)
    assert resolve("shape:tiny") == model
    assert [entry.name for entry in cache.iterdir()] == [model.path.name]


def test_variants_of_the_testbed_are_built_in_the_cache(cache: Path) -> None:
    base, block = resolve("testbed"), resolve("testbed:block")
    assert Path(block.path).parent == cache
    assert (block.weights, block.context, block.restates) == ("real", base.context, True)
    assert (base.label, block.label) == ("testbed model", "testbed model, block-tuned")


def test_big_shapes_have_no_weights(cache: Path) -> None:
    model = resolve("shape:llama-3.1-8b")
    assert (model.weights, model.meaningful, model.context) == ("dummy", False, 131_072)
    assert not list(Path(model.path).glob("*.safetensors"))


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("shape:tinny", "did you mean 'shape:tiny'"),
        ("shape:gpt", "shape:mistral-7b"),
        ("tiny", "did you mean 'shape:tiny'"),
        ("smollm2:", "smollm2:FILE"),
        ("testbed:blok", "did you mean 'testbed:block'"),
        ("/no/such/folder", "`model`"),
    ],
)
def test_unknown_models_are_refused(spec: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(spec)
    assert spec in caught.value.message
    assert named in str(caught.value)


def test_hub_ids_are_passed_through() -> None:
    model = resolve("mistralai/Mistral-7B-v0.3")
    assert model == ModelSpec("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-v0.3")
    assert model.meaningful
    assert model.label == model.name


def test_a_folder_with_weights_is_a_real_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}', encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    model = resolve(str(tmp_path))
    assert (model.path, model.weights, model.context) == (tmp_path.resolve(), "real", 4096)


def test_a_built_folder_is_known_for_what_it_is(tiny_model: ModelSpec) -> None:
    assert resolve(str(tiny_model.path)).weights == "random"


@pytest.mark.parametrize(
    ("config", "problem"),
    [(None, "no config.json"), ("{", "config.json"), ("[]", "JSON object"), ("{}", "no weights")],
)
def test_broken_folders_are_refused(tmp_path: Path, config: str | None, problem: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "text", "has"),
    [
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}', True),
        ("tokenizer_config.json", '{"eos_token": "</s>"}', False),
        ("chat_template.jinja", "{{ messages }}", True),
        ("README.md", "", False),
    ],
)
def test_whether_a_folder_has_a_chat_template(
    file: str, text: str, has: bool, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(text)
    assert models.has_chat_template(ModelSpec("mine", tmp_path)) is has


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config"):
        models.has_chat_template(ModelSpec("mine", tmp_path))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelSpec("here", tmp_path))
    assert "here: cannot load its tokenizer" in caught.value.message
    assert "\n" not in str(caught.value)


def test_without_a_network_an_unknown_id_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`transformers` would try for a minute, file by file."""
    asked: list[str] = []

    def fail(url: str) -> None:
        asked.append(url)
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", asked.append)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(resolve("nobody/nothing"))
    assert "not in the hub's cache, and the hub cannot be reached" in caught.value.message
    assert len(asked) == 1


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        materialise(TINY, tmp_path / "file")


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(shape: Shape, directory: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("picbench.workloads.models.shapes._write_weights", fail)
    with pytest.raises(ConfigError, match="disk full"):
        materialise(TINY, tmp_path)
    assert not list(tmp_path.iterdir())


def test_builders_at_the_same_time_agree(tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(materialise(TINY, tmp_path))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert list(tmp_path.iterdir()) == [found[0]]


def test_a_changed_shape_is_another_folder(tmp_path: Path) -> None:
    changed = replace(LLAMA_8B, theta=1.0)
    assert materialise(LLAMA_8B, tmp_path) != materialise(changed, tmp_path)


def test_weights_are_the_same_everywhere(tiny_model: ModelSpec, tmp_path: Path) -> None:
    again = materialise(TINY, tmp_path)
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / file).read_bytes() == (Path(tiny_model.path) / file).read_bytes()


@pytest.mark.parametrize("shape", all_shapes().values(), ids=list(all_shapes()))
def test_transformers_reads_the_config(shape: Shape, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(materialise(shape, tmp_path))
    assert config.architectures == [shape.architecture]
    assert (config.hidden_size, config.intermediate_size) == (shape.hidden, shape.ffn)
    assert (config.num_attention_heads, config.num_key_value_heads) == (shape.heads, shape.kv_heads)
    assert (config.num_hidden_layers, config.head_dim) == (shape.layers, shape.head_dim)
    assert (config.vocab_size, config.bos_token_id) == (shape.vocabulary, BOS)
    assert config.max_position_embeddings == shape.positions
    assert config.rope_parameters["rope_theta"] == shape.theta
    assert config.rope_parameters["rope_type"] == ("llama3" if shape.scaling else "default")


def test_tiny_replies_depend_on_the_prompt(tiny_model: ModelSpec) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model.path, dtype=torch.float32)
    replies = []
    for first in (10, 11, 12):
        prompt = torch.tensor([[BOS, first, *range(100, 160)]])
        with torch.no_grad():
            best = model(prompt).logits[0, -1].log_softmax(-1).max().item()
            reply = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
        # 2,048 equally likely tokens would have -7.6 each
        assert best > -5
        assert len(set(reply.tolist())) >= 6
        replies.append(tuple(reply.tolist()))
    assert len(set(replies)) == 3


def test_the_tokenizer_is_full_and_repeatable() -> None:
    first = train()
    assert first.get_vocab_size() == VOCABULARY == TINY.vocabulary
    assert first.to_str() == train().to_str()


def test_frequent_words_are_one_token(tiny_tokenizer: Tokenizer) -> None:
    words = [" the", " people", " question", " because", " government", "\n\n"]
    encoded = tiny_tokenizer(words, add_special_tokens=False)["input_ids"]
    assert [len(ids) for ids in encoded] == [1] * len(words)


@given(text=st.text())
def test_any_text_survives_a_round_trip(tiny_tokenizer: Tokenizer, text: str) -> None:
    ids = tiny_tokenizer([text], add_special_tokens=False)["input_ids"][0]
    assert tiny_tokenizer.decode(ids) == text


def test_the_tokenizer_prepends_bos_when_asked(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer(["word"], add_special_tokens=True)["input_ids"][0]
    assert ids[0] == tiny_tokenizer.bos_token_id == BOS

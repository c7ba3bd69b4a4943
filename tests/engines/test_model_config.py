"""Configurations of models, under common names."""

import json
from pathlib import Path
from typing import Any

import pytest

from picbench.engines.config import EngineConfig
from picbench.engines.model_config import check_ranks, head_size, read_model_config
from picbench.engines.vllm.launch import _context
from picbench.errors import ConfigError


def written(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def test_other_names_are_translated(tmp_path: Path) -> None:
    model = read_model_config(written(tmp_path, model_type="bloom", n_head=4, n_layer=3))
    assert (model["num_attention_heads"], model["num_hidden_layers"]) == (4, 3)
    assert head_size(model) == model["hidden_size"] // 4


def test_a_model_with_other_modalities_is_its_language_model(tmp_path: Path) -> None:
    text = {"hidden_size": 96, "num_attention_heads": 3, "max_position_embeddings": 77}
    model = read_model_config(written(tmp_path, model_type="llava", text_config=text))
    assert (model["hidden_size"], head_size(model)) == (96, 32)
    assert model["max_position_embeddings"] == 77


def test_an_unknown_kind_is_left_to_the_engine(tmp_path: Path) -> None:
    assert read_model_config(written(tmp_path, model_type="ours", n_head=4)) == {
        "model_type": "ours",
        "n_head": 4,
    }


def test_a_model_of_any_length_needs_a_context(tmp_path: Path) -> None:
    model = read_model_config(written(tmp_path, model_type="bloom", n_head=4))
    assert _context(EngineConfig("bloom", context=300), model) == 300
    with pytest.raises(ConfigError, match=r"no length \(give `context`\)"):
        _context(EngineConfig("bloom"), model)


def test_gpus_have_as_many_heads_each() -> None:
    check_ranks({"num_attention_heads": 8}, 4)
    check_ranks({}, 3)  # A model that does not say is left to vLLM.
    with pytest.raises(ConfigError, match=r"`tensor_parallel` 16: .* 8 .*possible are 1, 2, 4, 8"):
        check_ranks({"num_attention_heads": 8}, 16)

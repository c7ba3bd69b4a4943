"""Anchors of engines: their files are read and tokenized at start, and wrong ones are one line."""

from pathlib import Path
from typing import Any

import pytest
from small_engine import small_config

from picbench.engines.conversion import ModelTokenizer
from picbench.engines.engine import Engine
from picbench.engines.oracle import Oracle, mepic
from picbench.engines.request import Chunk, Request, Text
from picbench.errors import ConfigError
from picbench.workloads.testbed import model_path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "anchor.txt"
    path.write_text("The harbour was built in the summer.\n")
    return path


def test_a_file_is_in_view_while_chunks_are_compiled(file: Path, deviation: Any) -> None:
    spec = f"mepic:anchor={file}"
    config = small_config(model_path(), 400, 2048, algorithm=spec, tiers="", anchors={})
    encode = ModelTokenizer(config.model).encode
    text, keeper = encode(file.read_text()), encode("The keeper wrote a letter. " * 4)
    segments = [Text(tokens=encode("Read.")), Chunk(tokens=keeper), Text(tokens=encode("Who?"))]
    with Engine(config) as engine:
        requests = [Request(segments), Request(segments, algorithm="mepic:anchor=passage")]
        result, other = engine.generate(requests, max_tokens=4, logprobs=8, ignore_eos=True)
        with pytest.raises(ConfigError, match=r"was not started with anchor=./no.txt"):
            engine.generate([Request(segments, algorithm="naive:anchor=./no.txt")])
    oracle = Oracle(str(model_path()))
    assert deviation(oracle, mepic().anchored(text), requests[0], result) < 1e-3
    assert deviation(oracle, mepic().anchored(text), requests[1], other) > 1e-3


@pytest.mark.parametrize(
    ("anchors", "message"),
    [
        ({}, "the model has no tokenizer"),
        ({"./a.txt": (9,) * 512}, "anchor=./a.txt has 512 tokens; the context has 512"),
        ({"./a.txt": (99_999_999,)}, "anchor=./a.txt has a token that the model does not have"),
    ],
)
def test_wrong_anchors_are_refused_at_start(llama: Path, anchors: Any, message: str) -> None:
    sizes = {"algorithm": "naive:anchor=./a.txt", "tiers": "", "anchors": anchors}
    with pytest.raises(ConfigError) as caught:
        Engine(small_config(llama, 100, 512, **sizes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

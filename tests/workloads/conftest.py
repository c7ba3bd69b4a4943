import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from picbench.workloads.models import ModelSpec, load_tokenizer
from picbench.workloads.models.shapes import all_shapes, materialise
from picbench.workloads.prompts.tokens import Tokenizer

WriteRows = Callable[..., Path]


class WordTokenizer:
    """One token a word, with the white space after it; ids are assigned in order of appearance."""

    def __init__(self, bos_token_id: int | None = 0, prepends: bool = True) -> None:
        self.bos_token_id = bos_token_id
        self._prepends = prepends and bos_token_id is not None
        self._ids = {"<bos>": 0}

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        start = [0] if add_special_tokens and self._prepends else []
        return {"input_ids": [start + [self._id(word) for word in _words(one)] for one in text]}

    def decode(self, token_ids: list[int]) -> str:
        words = list(self._ids)
        return "".join(words[index] for index in token_ids)

    def _id(self, word: str) -> int:
        return self._ids.setdefault(word, len(self._ids))


def _words(text: str) -> list[str]:
    return re.findall(r"\S+\s*|\s+", text)


@pytest.fixture
def word_tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture
def make_tokenizer() -> type[WordTokenizer]:
    return WordTokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return ModelSpec(
        "shape:tiny", materialise(all_shapes()["tiny"], tmp_path_factory.mktemp("models")), "random"
    )


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model: ModelSpec) -> Tokenizer:
    return load_tokenizer(tiny_model)


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Write rows into ``<dataset>/<name>.jsonl`` of a folder, and return the folder."""

    def write(dataset: str, *rows: Mapping[str, Any], name: str = "rows") -> Path:
        folder = tmp_path / "data" / dataset
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        return tmp_path / "data"

    return write


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with rows of the real data sets, where this machine has it."""
    default = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("PICBENCH_DATA", default))
    if not folder.is_dir():
        pytest.skip("no real rows: set PICBENCH_DATA to a folder with <dataset>/*.jsonl")
    return folder

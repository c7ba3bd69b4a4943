"""Tokens without `transformers`, as with it."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from picbench.workloads.models import load_tokenizer, resolve
from picbench.workloads.prompts.tokens import Encoder, PlainTokenizer, start_tokens
from picbench.workloads.traffic.chunk_source import plain_ids

TEXTS = ["Who wrote it?", "", "Ada lived in Oslo.\nIt burned.  Twice.", "žluťoučký 猫 🙂"]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> PlainTokenizer:
    """What `load_tokenizer` gives where `transformers` is not installed."""
    find: Callable[..., Any] = importlib.util.find_spec
    absent = {"transformers": None}
    monkeypatch.setattr(
        "picbench.workloads.models.find_spec",
        lambda name: absent[name] if name in absent else find(name),
    )
    found = load_tokenizer(resolve("testbed", weights=False))
    assert isinstance(found, PlainTokenizer)
    return found


def test_ids_are_those_of_transformers(plain: PlainTokenizer) -> None:
    known: Any = load_tokenizer(resolve("testbed"))
    if isinstance(known, PlainTokenizer):
        from transformers import AutoTokenizer

        known = AutoTokenizer.from_pretrained(str(resolve("testbed").path))
    for special in (False, True):
        ids = plain(TEXTS, add_special_tokens=special)["input_ids"]
        assert ids == known(TEXTS, add_special_tokens=special)["input_ids"]
        assert plain(TEXTS[0], add_special_tokens=special)["input_ids"] == ids[0]
        assert [plain.decode(each) for each in ids] == [known.decode(each) for each in ids]
    assert start_tokens(plain) == start_tokens(known)
    assert plain_ids(plain) == plain_ids(known)
    assert Encoder(plain).prompt(TEXTS) == Encoder(known).prompt(TEXTS)

from typing import Any

import pytest

from picbench.workloads.prompts.tokens import Encoder


class Letters:
    """Token i is the i-th character; prompts begin with `bos` if there is one."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos
        self.encoded: list[str] = []

    def __call__(self, text: Any, *, add_special_tokens: bool) -> dict[str, Any]:
        self.encoded += text
        first = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": [[*first, *map(ord, one)] for one in text]}

    def decode(self, token_ids: Any) -> str:
        raise NotImplementedError


def test_a_text_is_tokenized_once() -> None:
    tokenizer = Letters()
    encode = Encoder(tokenizer)
    assert encode(["ab", "", "ab"]) == [(97, 98), (), (97, 98)]
    assert encode(text for text in ("c", "ab")) == [(99,), (97, 98)]
    assert encode([]) == []
    assert tokenizer.encoded == ["ab", "", "c"]


@pytest.mark.parametrize(
    ("bos", "tokens", "begun"),
    [(None, (97,), (97,)), (1, (97,), (1, 97)), (1, (1, 97), (1, 97)), (1, (), (1,))],
)
def test_a_prompt_begins_with_one_bos(
    bos: int | None, tokens: tuple[int, ...], begun: tuple[int, ...]
) -> None:
    encode = Encoder(Letters(bos))
    text = "".join(map(chr, tokens))
    assert encode.prompt([text, "a"]) == [begun, (97,)]

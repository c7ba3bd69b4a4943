from collections.abc import Mapping
from typing import Any

import pytest

from picbench.run.remote import PromptText

BOS = 1


class Letters:
    """A token a letter, but one for "th", which is never split again."""

    def __init__(self, bos: int | None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: Any, *, add_special_tokens: bool) -> Mapping[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [self._ids(one, add_special_tokens) for one in text]}
        return {"input_ids": self._ids(text, add_special_tokens)}

    def decode(self, token_ids: Any) -> Any:
        return "".join("th" if i == 2 else "<s>" if i == BOS else chr(i) for i in token_ids)

    def _ids(self, text: str, special: bool) -> list[int]:
        ids = [ord(letter) for letter in text.replace("th", "\x02")]
        return [self.bos_token_id, *ids] if special and self.bos_token_id is not None else ids


@pytest.mark.parametrize("bos", [BOS, None])
def test_a_text_with_the_same_ids_is_found_without_its_bos(bos: int | None) -> None:
    tokens = [2, ord("e"), ord(" "), ord("o")]
    assert PromptText(lambda: Letters(bos))([BOS, *tokens] if bos else tokens) == "the o"


def test_there_is_none_where_the_tokenizer_would_merge_what_the_prompt_does_not() -> None:
    assert PromptText(lambda: Letters(BOS))([BOS, ord("t"), ord("h")]) is None


def test_there_is_none_where_the_server_would_add_a_bos() -> None:
    assert PromptText(lambda: Letters(BOS))([ord("a")]) is None

"""The interface of a tokenizer, and how texts are encoded."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that is used here."""

    @property
    def bos_token_id(self) -> Any:
        """The id of the token that begins a sequence, or None."""

    def __call__(self, text: Any, *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Encode a text, or a list of texts, under the key ``input_ids``."""

    def decode(self, token_ids: Any) -> Any:
        """Return the text of a sequence of ids."""


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Tokenize each text alone, without special tokens."""
    if not texts:
        return []
    return [tuple(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def begin(tokenizer: Tokenizer, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first tokens of a prompt with exactly one BOS, if the tokenizer adds one.

    Chat templates may have put it into the text already.
    """
    bos = tokenizer.bos_token_id
    if bos is not None and tokens[:1] == (bos,):
        return tokens
    return start_tokens(tokenizer) + tokens


def start_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the BOS token if this tokenizer puts one before a prompt by itself, else nothing.

    Some tokenizers define a BOS token that their model was never trained with, so this encodes a
    text with special tokens and looks.
    """
    bos = tokenizer.bos_token_id
    ids = tokenizer(["a"], add_special_tokens=True)["input_ids"][0]
    return (bos,) if bos is not None and ids[0] == bos else ()

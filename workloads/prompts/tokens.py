"""The interface of a tokenizer, and how texts are encoded."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
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


def start_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the BOS token if this tokenizer puts one before a prompt by itself, else nothing.

    Some tokenizers define a BOS token that their model was never trained with, so this encodes a
    text with special tokens and looks.
    """
    bos = tokenizer.bos_token_id
    ids = tokenizer(["a"], add_special_tokens=True)["input_ids"][0]
    return (bos,) if bos is not None and ids[0] == bos else ()


class Encoder:
    """Tokenizes each text alone, without special tokens, and every distinct text once.

    Rows repeat texts: instructions, and passages that several questions are about.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[int, ...]] = {}

    def __call__(self, texts: Iterable[str]) -> list[tuple[int, ...]]:
        """The ids of each text."""
        wanted = list(texts)
        new = [text for text in dict.fromkeys(wanted) if text not in self._known]
        self._known.update(zip(new, encode(self._tokenizer, new), strict=True))
        return [self._known[text] for text in wanted]

    @cached_property
    def start(self) -> tuple[int, ...]:
        """What begins a prompt; see `start_tokens`."""
        return start_tokens(self._tokenizer)

    def begin(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first tokens of a prompt with exactly one BOS, if the tokenizer adds one.

        Chat templates may have put it into the text already.
        """
        bos = self._tokenizer.bos_token_id
        if bos is not None and tokens[:1] == (bos,):
            return tokens
        return self.start + tokens

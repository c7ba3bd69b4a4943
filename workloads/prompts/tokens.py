"""The interface of a tokenizer, and how texts are encoded."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from picbench.dummy_prefix import inside_prompt


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that is used here."""

    @property
    def bos_token_id(self) -> Any:
        """The id of the token that begins a sequence, or None."""

    def __call__(self, text: Any, *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Encode a text, or a list of texts, under the key ``input_ids``."""

    def decode(self, token_ids: Any) -> Any:
        """Return the text of a sequence of ids."""


class PlainTokenizer:
    """The tokenizer of a file ``tokenizer.json``, by the package `tokenizers` alone."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer as Backend

        self.backend_tokenizer = Backend.from_file(str(file))
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        settings = file.with_name("tokenizer_config.json")
        found = json.loads(settings.read_bytes()) if settings.exists() else {}
        bos = found.get("bos_token")
        name = bos["content"] if isinstance(bos, dict) else bos
        self.bos_token_id = None if name is None else self.backend_tokenizer.token_to_id(name)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    @property
    def all_special_ids(self) -> list[int]:
        """The ids that no text has."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return [token for token, known in added.items() if known.special]

    def __call__(self, text: Any, *, add_special_tokens: bool) -> Mapping[str, Any]:
        """See `Tokenizer`."""
        one = isinstance(text, str)
        texts = [text] if one else list(text)
        found = self.backend_tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        ids = [encoding.ids for encoding in found]
        return {"input_ids": ids[0] if one else ids}

    def decode(self, token_ids: Any) -> str:
        """See `Tokenizer`."""
        return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=False))


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Tokenize each text alone, without special tokens."""
    ids = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else ()
    return list(map(tuple, ids))


def start_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the BOS token if this tokenizer puts one before a prompt by itself, else nothing.

    Some tokenizers define a BOS token that their model was never trained with, so this encodes a
    text with special tokens and looks.
    """
    bos = tokenizer.bos_token_id
    ids = tokenizer(["a"], add_special_tokens=True)["input_ids"][0]
    return (bos,) if bos is not None and ids[0] == bos else ()


def prompt_encoder(tokenizer: Tokenizer) -> Callable[[str], tuple[int, ...]]:
    """Gives the ids of a text inside a prompt, after those that the tokenizer begins prompts with.

    Of an empty text it gives the latter alone.
    """
    start, inside = start_tokens(tokenizer), inside_prompt(tokenizer)
    return lambda text: (*start, *(encode(inside, [text])[0] if text else ()))


class Encoder:
    """Tokenizes each text alone, without special tokens, and every distinct text once.

    Texts stand inside a prompt, except for the first of `prompt`. Rows repeat them: instructions,
    and passages that several questions are about.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._inside = tokenizer, inside_prompt(tokenizer)
        self._known: dict[str, tuple[int, ...]] = {}

    def __call__(self, texts: Iterable[str]) -> list[tuple[int, ...]]:
        """The ids of each text."""
        wanted = list(texts)
        new = [text for text in dict.fromkeys(wanted) if text not in self._known]
        self._known.update(zip(new, encode(self._inside, new), strict=True))
        return [self._known[text] for text in wanted]

    def prompt(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """The ids of the segments of a prompt; they decode to the texts one after another.

        The first begins with exactly one BOS, if the tokenizer adds one. Chat templates may have
        put it into the text already.
        """
        found, first = self(texts), next((n for n, text in enumerate(texts) if text), 0)
        [found[first]] = encode(self._tokenizer, [texts[first]])
        bos = self._tokenizer.bos_token_id
        if bos is None or found[0][:1] != (bos,):
            found[0] = start_tokens(self._tokenizer) + found[0]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids inside a prompt."""
        return str(self._inside.decode(list(tokens)))

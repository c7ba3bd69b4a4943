"""A prompt's text, for servers that take no token ids."""

from collections.abc import Callable, Sequence
from functools import cached_property

from picbench.workloads.prompts.tokens import Tokenizer, start_tokens


class PromptText:
    """Turns token ids into the text that has these very ids; `load` gives the model's tokenizer."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load

    def __call__(self, tokens: Sequence[int]) -> str | None:
        """The text that a server tokenizes to `tokens`, None where there is none.

        Servers put a tokenizer's BOS before a text themselves.
        """
        start = start_tokens(self._tokenizer)
        given = tuple(tokens)
        text = str(self._tokenizer.decode(list(given[len(start) :])))
        found = self._tokenizer(text, add_special_tokens=True)["input_ids"]
        return text if tuple(found) == given else None

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._load()

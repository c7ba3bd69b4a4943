"""The model's tokenizer, loaded only when text has to be read or written."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from picbench.errors import ConfigError


class ModelTokenizer:
    """Text to token ids and back, by the tokenizer of a model folder or hub id."""

    def __init__(self, model: str) -> None:
        self._model = model

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a segment, without special tokens. Raises ConfigError without tokenizer."""
        if self._loaded is None:
            raise ConfigError(
                f"model {self._model!r} has no tokenizer", hint="give segments as token ids"
            )
        return tuple(self._loaded.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated tokens, without special ones; empty for a model without tokenizer."""
        if self._loaded is None:
            return ""
        return str(self._loaded.decode(list(tokens), skip_special_tokens=True))

    @cached_property
    def stops(self) -> list[int]:
        """Tokens that end a generation, from the model's generation settings."""
        from transformers import AutoConfig, GenerationConfig

        try:
            config: Any = GenerationConfig.from_pretrained(self._model)
        except OSError:
            config = AutoConfig.from_pretrained(self._model)
        stops = config.eos_token_id
        if stops is None:
            return []
        return list(stops) if isinstance(stops, list) else [int(stops)]

    @cached_property
    def _loaded(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._model)
        except (OSError, ValueError):
            return None

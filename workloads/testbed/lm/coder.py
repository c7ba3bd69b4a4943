"""Text to token ids, as the testbed model sees it."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from picbench.workloads.testbed.testbed_tokenizer import BOS, EOS, LINKS, ids_of


class Coder:
    """A tokenizer that encodes every part of a prompt alone, as a run does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bos, self.eos, *self.links = ids_of(tokenizer, (BOS, EOS, *LINKS))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, without special tokens."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def count(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has."""
        return [len(ids) for ids in self.encode(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a sequence, without special tokens."""
        return self._tokenizer.decode(list(ids))

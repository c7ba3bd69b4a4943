"""Prompts of the testbed, from the data sets' own templates, and their tokens."""

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from picbench.workloads.datasets.base import Dataset
from picbench.workloads.datasets.multi_news import MultiNews
from picbench.workloads.datasets.needle import Needle
from picbench.workloads.datasets.qa import HotpotQA, MuSiQue, WikiMQA
from picbench.workloads.datasets.samsum import SAMSum
from picbench.workloads.prompts.segmentation import Counter

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
#: MiniPIC's marks: the start of a span, and a block that depends on the prompt before it.
SSEP, PDEP = "<ssep>", "<pdep>"
#: Tokens whose embeddings the link-tuned variant trains.
LINKS = tuple(f"<link_{i}>" for i in range(8))
SPECIAL = (BOS, EOS, PAD, SSEP, PDEP, *LINKS)
#: Link tokens after every chunk of the link-tuned variant (KVLink's best setting).
LINKS_EACH = 5

# Listed here instead of found by entry points, so that training works from a checkout.
_DATASETS: MappingProxyType[str, Dataset] = MappingProxyType(
    {
        made.name: made
        for made in (MuSiQue(), WikiMQA(), HotpotQA(), SAMSum(), MultiNews(), Needle())
    }
)


class Prompt(NamedTuple):
    """The text of a prompt: before the chunks, the chunks, after them."""

    head: str
    chunks: Sequence[str]
    tail: str


def dataset(name: str) -> Dataset:
    """The data set whose template, chunks and score the rows called `name` use."""
    return _DATASETS[name]


def prompt(name: str, context: str, question: str, count: Counter) -> Prompt:
    """Render a row; `count` counts tokens, for contexts that are cut by tokens."""
    head, tail = dataset(name).template.render(question)
    return Prompt(head, dataset(name).split(context, count), tail)


def ids_of(tokenizer: "Tokenizer", tokens: Iterable[str]) -> list[int]:
    """The ids of tokens that the vocabulary must have."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return [vocabulary[token] for token in tokens]


class Coder:
    """A tokenizer that encodes every segment of a prompt alone, as a run does."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self.bos, self.eos, *self.links = ids_of(tokenizer, (BOS, EOS, *LINKS))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, without special tokens."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def count(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text."""
        return [len(ids) for ids in self.encode(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a sequence, without special tokens."""
        return self._tokenizer.decode(list(ids))

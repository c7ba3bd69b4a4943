"""The testbed's tokenizer: byte-level BPE, trained on the text of the invented world.

Run ``python -m picbench.workloads.testbed.testbed_tokenizer DIR`` to train it again.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from picbench.workloads.synthetic.example import Level
from picbench.workloads.synthetic.generate import DATASETS, example
from picbench.workloads.testbed.testbed_prompt import prompt

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
#: MiniPIC's marks: the start of a span, and a block that depends on the prompt before it.
SSEP, PDEP = "<ssep>", "<pdep>"
#: Tokens whose embeddings the link-tuned variant trains.
LINKS = tuple(f"<link_{i}>" for i in range(8))
SPECIAL = (BOS, EOS, PAD, SSEP, PDEP, *LINKS)
VOCABULARY = 4992
CONTEXT = 4096

_EXAMPLES = 3000


def train(size: int = VOCABULARY, examples: int = _EXAMPLES) -> Tokenizer:
    """Train a tokenizer of `size` tokens on this many examples of every data set's train split."""
    tokenizer = Tokenizer(models.BPE())
    # A space is put at the start of a line before encoding and removed after decoding, so that a
    # word has the same token there as inside a sentence.
    tokenizer.normalizer = normalizers.Replace(Regex(r"\n(?=[^\n])"), "\n ")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\n ", "\n")])
    trainer = BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(examples), trainer)
    bos = ids_of(tokenizer, [BOS])[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def ids_of(tokenizer: Tokenizer, tokens: Iterable[str]) -> list[int]:
    """The ids of tokens that the vocabulary must have."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return [vocabulary[token] for token in tokens]


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Save in Hugging Face's format."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [SSEP, PDEP, *LINKS],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _texts(examples: int) -> Iterator[str]:
    level = Level(scale=0.3, more=4)
    for name in DATASETS:
        for index in range(examples):
            made = example(name, "train", index, level=level)
            texts = prompt(name, made.context, made.exchange.input, _count_words)
            yield from (texts.head, *texts.chunks, f"{texts.tail} {made.exchange.reply}")
            yield from (f" {further.input} {further.reply}" for further in made.more)


def _count_words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


if __name__ == "__main__":
    save(train(), Path(sys.argv[1]))


class Coder:
    """A tokenizer that encodes every segment of a prompt alone, as a run does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
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

"""The testbed's tokenizer: byte-level BPE, trained on the text of the invented world."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from picbench.workloads.synthetic.example import Level
from picbench.workloads.synthetic.generate import DATASETS, example
from picbench.workloads.testbed.prompt import (
    BOS,
    EOS,
    LINKS,
    PAD,
    PDEP,
    SPECIAL,
    SSEP,
    ids_of,
    prompt,
)

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

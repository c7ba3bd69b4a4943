"""The built-in tokenizer: byte-level BPE, trained on the spot, so that nothing is downloaded."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from picbench.workloads.models.english import TEXT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Special tokens; a token's id is its place here.
SPECIAL = ("<pad>", "<s>", "</s>")
PAD, BOS, EOS = range(len(SPECIAL))

#: How many tokens there are.
VOCABULARY = 2048


def train() -> "Tokenizer":
    """Return a tokenizer of `VOCABULARY` tokens; any text survives a round trip.

    Training is deterministic: the same release of `tokenizers` makes the same merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            min_frequency=1,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bos = SPECIAL[BOS]
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)]
    )
    return made


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer's two files as `transformers` reads them."""
    train().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[PAD],
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

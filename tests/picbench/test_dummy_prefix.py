"""Segments of a prompt that are tokenized alone stand for the text that was rendered."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from picbench.dummy_prefix import inside_prompt
from picbench.engines.config import EngineConfig
from picbench.engines.conversion import ModelTokenizer, RequestPreparer
from picbench.engines.request import Chunk, Request, Text
from picbench.workloads.prompts.tokens import Encoder
from picbench.workloads.prompts.truncate import truncate
from picbench.workloads.sample import SampleSegment

WORDS = ["Passage 2:\nOslo is the capital of Norway.\n", "\n\nThat was the last passage.  Q: who?"]
SPACE = "▁"
FIRST_SPACE = decoders.Sequence(
    [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def metaspace(scheme: str) -> Callable[[Tokenizer], None]:
    """What transformers makes of SentencePiece models: legacy ones always, others at the start."""

    def change(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        tokenizer.decoder = FIRST_SPACE

    return change


def prepend(tokenizer: Tokenizer) -> None:
    """The tokenizer.json of Llama 2, Mistral 7B and Yi."""
    parts = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence(parts)
    tokenizer.decoder = FIRST_SPACE


def prepended_alone(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Prepend(SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()


def byte_level(*, space: bool) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
        tokenizer.decoder = decoders.ByteLevel()

    return change


def made(change: Callable[[Tokenizer], None]) -> Any:
    tokenizer = Tokenizer(models.BPE())
    change(tokenizer)
    letters = [*map(chr, range(32, 127)), "\n", SPACE, "é"]
    alphabet = [*letters, *pre_tokenizers.ByteLevel.alphabet()]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


PREFIXED = {
    "always": made(metaspace("always")),
    "first": made(metaspace("first")),
    "prepend": made(prepend),
    "bytes": made(byte_level(space=True)),
}
PLAIN = {"never": made(metaspace("never")), "bytes": made(byte_level(space=False))}


@pytest.mark.parametrize("tokenizer", PREFIXED.values(), ids=PREFIXED)
@given(texts=st.lists(st.text(" \nabOs:.é"), min_size=1, max_size=4))
def test_a_prompt_decodes_to_its_texts(tokenizer: Any, texts: list[str]) -> None:
    ids = [token for segment in Encoder(tokenizer).prompt(texts) for token in segment]
    own = tokenizer("".join(texts), add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == tokenizer.decode(own)
    assert ids[:1] == own[:1] or len(texts) > 1


@pytest.mark.parametrize("tokenizer", PREFIXED.values(), ids=PREFIXED)
def test_only_the_first_text_has_what_the_tokenizer_puts_before_texts(tokenizer: Any) -> None:
    encode = Encoder(tokenizer)
    own = tuple(tokenizer("Oslo", add_special_tokens=False)["input_ids"])
    first, *others = encode.prompt(["Oslo", "Oslo", "", "Oslo"])
    assert first == own
    assert others == [others[0], (), others[0]]
    assert others[0] != own
    assert encode.prompt(["", "Oslo"]) == [(), own]
    assert encode.decode(encode([" is"])[0]) == " is"


@pytest.mark.parametrize("tokenizer", PLAIN.values(), ids=PLAIN)
def test_tokenizers_without_a_dummy_prefix_stay_as_they_are(tokenizer: Any) -> None:
    assert inside_prompt(tokenizer) is tokenizer


def test_every_component_of_a_sequence_is_told() -> None:
    tokenizer = made(prepended_alone)
    inside = inside_prompt(tokenizer)
    assert inside.decode(inside("a b", add_special_tokens=False)["input_ids"]) == "a b"
    assert inside.decode(inside(" a", add_special_tokens=False)["input_ids"]) == " a"


def test_text_that_is_cut_keeps_the_space_at_its_cut() -> None:
    encode = Encoder(PREFIXED["always"])
    segments = [SampleSegment("text", "S", encode.prompt(["S"])[0])]
    segments.append(SampleSegment("chunk", " a b c d e", encode([" a b c d e"])[0]))
    (_, cut) = truncate(segments, 10, encode)
    assert cut.text == encode.decode(cut.tokens) == " a c d e"


@pytest.fixture
def mistral(tmp_path: Path) -> Path:
    """The tokenizer of Mistral 7B v0.1 and v0.2, as its repository has it."""
    found = importlib.util.find_spec("mistral_common")
    if found is None or found.origin is None:
        pytest.skip("its model is in mistral_common")
    model = Path(found.origin).parent / "data/tokenizer.model.v1"
    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    about = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": True} | about))
    return tmp_path


TEXTS = ["Read this.\n", "Passage 1:\nAda lived in Oslo.\n", "\n\nThat was all.", " Q: who?"]


def test_a_real_tokenizer(mistral: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(mistral)
    ids = [token for segment in Encoder(tokenizer).prompt(TEXTS) for token in segment]
    assert ids == tokenizer("".join(TEXTS))["input_ids"]


@pytest.mark.parametrize("begun", [[], [Text(tokens=(1,))]])
def test_an_engine_tokenizes_as_a_prompt_is_rendered(mistral: Path, begun: list[Text]) -> None:
    config = EngineConfig(model=str(mistral))
    tokenizer = ModelTokenizer(config.model)
    head, *chunks, tail = TEXTS
    request = Request([*begun, Text(head), *map(Chunk, chunks), Text(tail)])
    _, ids = RequestPreparer(config, tokenizer)._tokenized(request)
    own = AutoTokenizer.from_pretrained(mistral)("".join(TEXTS))["input_ids"]
    assert ids == own[len(own) - len(ids) :]
    assert len(own) - len(ids) == (0 if begun else 1)

"""A renderer of vLLM that reads marks, held against one that does not."""

import asyncio
import copy
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.renderers import TokenizeParams, renderer_from_config

from picbench.engines.vllm.frontend.marked_prompts import MarkedTokenizer, read_marks
from picbench.engines.vllm.marks import DocumentMarks
from picbench.errors import ConfigError
from picbench.workloads.testbed import model_path

MARKS = DocumentMarks.of(True)
CONTEXT = 512

#: The tokenizer cuts before a space, so that these texts have the same tokens without marks.
HEAD, FIRST, SECOND, TAIL = "Read these.", " The old bridge was closed.", " A tower fell.", " Who?"
MARKED = f"{HEAD}<<doc>>{FIRST}<</doc>><<doc>>{SECOND}<</doc>>{TAIL}"
PLAIN = HEAD + FIRST + SECOND + TAIL


@pytest.fixture(scope="module")
def config() -> Any:
    return EngineArgs(str(model_path()), max_model_len=CONTEXT).create_engine_config()


@pytest.fixture(scope="module")
def stock(config: Any) -> Any:
    return renderer_from_config(config)


@pytest.fixture(scope="module")
def marked(config: Any) -> Any:
    assert MARKS is not None
    renderer = renderer_from_config(config)
    read_marks(renderer, MARKS)
    return renderer


def rendered(renderer: Any, text: str, **asked: Any) -> Any:
    params = TokenizeParams(max_total_tokens=CONTEXT, max_output_tokens=8, **asked)
    [found] = renderer.render_cmpl([{"prompt": text}], params)
    found.pop("arrival_time")
    return found


def ids(renderer: Any, text: str) -> list[int]:
    found: list[int] = renderer.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return found


def chunks(found: Any) -> list[list[int]]:
    return [found["prompt_token_ids"][slice(*span)] for span in found["pic"]["spans"]]


def test_documents_are_tokenized_apart(stock, marked):
    found = rendered(marked, MARKED)
    parts = [ids(stock, text) for text in (HEAD, FIRST, SECOND, TAIL)]
    [bos] = stock.get_tokenizer()("")["input_ids"]
    assert found["prompt_token_ids"] == [bos, *(token for part in parts for token in part)]
    assert chunks(found) == parts[1:3]
    assert found["prompt"] == PLAIN


@pytest.mark.parametrize("text", ["", PLAIN, "[[doc]]a[[/doc]]"])
def test_text_without_marks_is_left_to_vllm(stock, marked, text):
    assert rendered(marked, text) == rendered(stock, text)


@pytest.mark.parametrize("text", ["<<doc>><</doc>>a", "b<<doc>> <</doc>>", "<<doc>><</doc>>"])
def test_documents_without_words_are_no_chunks(stock, marked, text):
    found = rendered(marked, text)
    assert "pic" not in found
    assert found == rendered(stock, text.replace("<<doc>>", "").replace("<</doc>>", ""))


def test_a_prompt_that_begins_with_a_document_has_special_tokens_before_it(stock, marked):
    found = rendered(marked, f"<<doc>>{FIRST}<</doc>>")
    assert chunks(found) == [ids(stock, FIRST)]
    assert found["pic"]["spans"][0][0] == 1
    bare = rendered(marked, f"<<doc>>{FIRST}<</doc>>", add_special_tokens=False)
    assert bare["prompt_token_ids"] == found["prompt_token_ids"][1:]
    assert bare["pic"]["spans"][0][0] == 0


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("special", [True, False])
def test_truncated_prompts_are_those_of_vllm(stock, marked, side, special):
    """For all lengths; of a chunk, what is left of it is the chunk."""
    whole = rendered(marked, MARKED, add_special_tokens=special)
    tokens, spans = whole["prompt_token_ids"], whole["pic"]["spans"]
    assert tokens == rendered(stock, PLAIN, add_special_tokens=special)["prompt_token_ids"]
    for most in range(1, len(tokens) + 2):
        asked = {"truncate_prompt_tokens": most, "truncation_side": side}
        found = rendered(marked, MARKED, add_special_tokens=special, **asked)
        wanted = rendered(stock, PLAIN, add_special_tokens=special, **asked)
        assert found["prompt_token_ids"] == wanted["prompt_token_ids"]
        # What is cut off on the left; a special token in front may be kept.
        right = side == "right" or (side is None and stock.tokenizer.truncation_side == "right")
        kept = set(range(most)) if right else set(range(len(tokens) - most, len(tokens)))
        if special and side is None and not right and most < len(tokens):
            kept.discard(len(tokens) - most)
        left = [[t for n, t in enumerate(tokens) if a <= n < b and n in kept] for a, b in spans]
        assert (chunks(found) if "pic" in found else []) == list(filter(None, left))


def test_what_is_as_long_as_the_context_is_truncated_or_refused(stock, marked):
    text = HEAD + f"<<doc>>{FIRST * CONTEXT}<</doc>>" + TAIL
    found = rendered(marked, text, truncate_prompt_tokens=-1)
    wanted = rendered(stock, HEAD + FIRST * CONTEXT + TAIL, truncate_prompt_tokens=-1)
    assert found["prompt_token_ids"] == wanted["prompt_token_ids"]
    with pytest.raises(VLLMValidationError, match="maximum context length is 512"):
        rendered(marked, text)


def test_offsets_are_those_of_what_was_sent(marked):
    found = rendered(marked, MARKED, return_token_offsets=True)
    tokens, offsets = found["prompt_token_ids"], found["prompt_token_offsets"]
    assert len(tokens) == len(offsets)
    assert offsets[0] == (0, 0)
    for start, end in found["pic"]["spans"]:
        characters = MARKED[offsets[start][0] : offsets[end - 1][1]]
        assert f"<<doc>>{characters}<</doc>>" in MARKED
    assert "".join(MARKED[start:end] for start, end in offsets) == PLAIN
    cut = rendered(marked, MARKED, return_token_offsets=True, truncate_prompt_tokens=9)
    assert len(cut["prompt_token_offsets"]) == 9


def test_batches_are_rendered_as_one_by_one(marked):
    """Several prompts of a request, and of requests at a time, in the renderer's threads."""
    texts = [MARKED, PLAIN, f"<<doc id=a>>{SECOND}<</doc>>{TAIL}", MARKED] * 4
    params = TokenizeParams(max_total_tokens=CONTEXT, max_output_tokens=8)

    async def at_a_time() -> list[Any]:
        one = [marked.render_cmpl_async([{"prompt": text}], params) for text in texts]
        several = marked.render_cmpl_async([{"prompt": text} for text in texts], params)
        return [*(found for [found] in await asyncio.gather(*one)), *await several]

    for found, text in zip(asyncio.run(at_a_time()), texts * 2, strict=True):
        found.pop("arrival_time")
        assert found == rendered(marked, text)


def test_chunks_of_one_id_are_of_one_document(marked):
    """A chunk's document is what came before it under its id, and the chunk itself."""
    text = "a<<doc id=x>>b c<</doc>><<doc>>d<</doc>><<doc id=y>>e<</doc>><<doc id=x>>f<</doc>>"
    found = rendered(marked, text)
    first, second, third, last = chunks(found)
    assert found["pic"]["documents"] == [first, None, third, first + last]
    assert second == ids(marked, "d")


def test_misplaced_marks_are_errors_of_clients(marked):
    with pytest.raises(VLLMValidationError, match="closing mark at character 4 of the prompt"):
        rendered(marked, "abcd<</doc>>")


def test_text_inside_has_no_dummy_prefix(config, tmp_path):
    """Tokenizers that put a space before a prompt do so before its first text alone."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: n for n, letter in enumerate(["<s>", "▁", *"abcdef"])}
    made = Tokenizer(models.BPE(letters, []))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Replace("▁", " ")
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>").save_pretrained(tmp_path)
    changed = copy.copy(config)
    changed.model_config = copy.copy(config.model_config)
    changed.model_config.tokenizer = str(tmp_path)
    assert MARKS is not None
    renderer = renderer_from_config(changed)
    read_marks(renderer, MARKS)
    text = rendered(renderer, "ab<<doc>>c d<</doc>><<doc>>e<</doc>>f")
    assert renderer.get_tokenizer().convert_ids_to_tokens(text["prompt_token_ids"]) == [*"▁abc▁def"]
    template = rendered(renderer, "<s><<doc>>c<</doc>>f")
    tokens = renderer.get_tokenizer().convert_ids_to_tokens(template["prompt_token_ids"])
    assert tokens[-3:] == [*"▁cf"]


def test_only_the_engine_that_asks_for_marks_reads_them(marked, stock):
    assert isinstance(marked._tokenize_prompt, MarkedTokenizer)
    assert not isinstance(stock._tokenize_prompt, MarkedTokenizer)
    before = marked._tokenize_prompt
    assert MARKS is not None
    read_marks(marked, MARKS)
    assert marked._tokenize_prompt is before


def test_prompts_that_are_not_made_as_text_have_no_marks(config):
    changed = copy.copy(config)
    changed.model_config = copy.copy(config.model_config)
    changed.model_config.skip_tokenizer_init = True
    assert MARKS is not None
    with pytest.raises(ConfigError, match="`marks` are read in text"):
        read_marks(renderer_from_config(changed), MARKS)

"""Chat templates, applied by transformers' own tokenizers."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.errors import ConfigError
from picbench.workloads.load import load_samples
from picbench.workloads.models import ModelSpec, load_tokenizer
from picbench.workloads.prompts.chat import MARKER, Chat, find_chat
from picbench.workloads.sample import Sample

# In the manner of Llama 3, Mistral and Qwen: with BOS and stripped messages; with BOS; without
# either, and with a default system message.
STRIPPING = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
PLAIN = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }}[/INST]{% endfor %}"
SYSTEM = "[system]Be nice.[end]{% for m in messages %}[user]{{ m.content }}[end]{% endfor %}[bot]"
TEMPLATES = [STRIPPING, PLAIN, SYSTEM]

CONTEXT = "Passage 1:\nAda lived in Oslo.\nPassage 2:\nOslo lies in Norway."
ROW = {"input": "Where?", "context": CONTEXT, "answers": ["Norway"], "_id": "one"}


@pytest.fixture
def tokenizer(tiny_model: ModelSpec) -> Any:
    return load_tokenizer(tiny_model)


def with_template(tokenizer: Any, template: str) -> Chat:
    tokenizer.chat_template = template
    return Chat(tokenizer)


def load(tokenizer: Any, data: Path, chat: Chat | None, **options: Any) -> Sample:
    (sample,) = load_samples("musique", data, tokenizer, chat=chat, **options)
    return sample


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_sample_reads_as_the_template_of_its_whole_prompt(
    template: str, tokenizer: Any, write_rows: Any
) -> None:
    """With one BOS, and the chunks' tokens as without a template."""
    data = write_rows("musique", ROW)
    plain = load(tokenizer, data, None)
    chatty = load(tokenizer, data, with_template(tokenizer, template))
    messages = [{"role": "user", "content": "".join(segment.text for segment in plain.segments)}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "".join(segment.text for segment in chatty.segments) == whole
    assert tokenizer.decode(chatty.tokens).removeprefix("<s>") == whole.removeprefix("<s>")
    assert chatty.chunks == plain.chunks
    assert chatty.tokens != plain.tokens
    assert chatty.tokens[0] == tokenizer.bos_token_id
    assert chatty.tokens.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_long_prompt_keeps_the_template_whole(
    template: str, tokenizer: Any, write_rows: Any
) -> None:
    passages = "\n".join(f"Passage {index}:\n" + "word " * 200 for index in range(1, 6))
    data = write_rows("musique", ROW | {"context": passages})
    chat = with_template(tokenizer, template)
    whole = load(tokenizer, data, chat)
    cut = load(tokenizer, data, chat, context=500, max_tokens=32)
    assert cut.truncated
    assert 466 <= cut.prompt_tokens <= 468
    assert cut.segments[0] == whole.segments[0]
    assert cut.segments[-1] == whole.segments[-1]


def test_a_context_below_the_template_is_refused(tokenizer: Any, write_rows: Any) -> None:
    data = write_rows("musique", ROW)
    chat = with_template(tokenizer, "x" * 400 + PLAIN)
    with pytest.raises(ConfigError, match=r"chat template of .*`context`"):
        load(tokenizer, data, chat, context=100, max_tokens=32)


@given(head=st.text(max_size=20), tail=st.text(max_size=20))
def test_both_sides_survive(head: str, tail: str, tiny_tokenizer: Any) -> None:
    chat = with_template(tiny_tokenizer, PLAIN)
    assert chat.wrap(head, tail) == (f"<s>[INST] {head}", f"{tail}[/INST]")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[0].content }}{{ messages[0].content }}", "2 times"),
        ("nothing", "0 times"),
        ("{{ raise_exception('a system message first') }}", "a system message first"),
        ("{{ messages[0].content[0].text.upper() }}", "fails"),
        ("{% if %}", "fails"),
        ("{{ messages[0].content | lower }}", "0 times"),
    ],
)
def test_a_template_that_spoils_the_context_is_refused(
    template: str, problem: str, tokenizer: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"chat template .*{problem}.*`chat=off`"):
        with_template(tokenizer, template).wrap("", "")


def test_a_prompt_that_contains_the_marker_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="2 times"):
        with_template(tokenizer, PLAIN).wrap(MARKER, "")


def test_prompts_do_not_change_overnight(tokenizer: Any) -> None:
    chat = with_template(tokenizer, "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}")
    assert chat.wrap("", "")[0] == "26 Jul 2024 "


def test_models_are_told_not_to_think_at_length(tokenizer: Any) -> None:
    template = (
        "{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}"
    )
    assert with_template(tokenizer, template).wrap("", "")[1] == "<think></think>"


@pytest.mark.parametrize(
    ("rule", "template", "wanted", "used"),
    [
        ("auto", PLAIN, True, True),
        ("auto", PLAIN, False, False),
        ("auto", None, True, False),
        ("on", PLAIN, True, True),
        ("on", PLAIN, False, True),
        ("off", PLAIN, True, False),
        ("off", None, True, False),
    ],
)
def test_when_a_template_is_used(
    rule: Any, template: str | None, wanted: bool, used: bool, tokenizer: Any
) -> None:
    tokenizer.chat_template = template
    assert (find_chat(rule, tokenizer, wanted=wanted) is not None) == used


def test_a_required_template_must_exist(word_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"`chat=on`: .*no chat template"):
        find_chat("on", word_tokenizer, wanted=True)

"""Documents in parts of messages: each form becomes the same text between marks."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.vllm.marks import DocumentMarks
from picbench.engines.vllm.parts import KINDS, PartReader, read_kinds
from picbench.engines.vllm.settings import PicSettings
from picbench.errors import ConfigError

MARKS = DocumentMarks.of(True)
assert MARKS is not None


def rewritten(body: dict[str, Any], *kinds: str) -> dict[str, Any]:
    return PartReader(MARKS, read_kinds(kinds or ("documents",))).rewrite(body)


def of_user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


#: Parts of type document, and the text that they become.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({"text": "A b."}, "<<doc>>A b.<</doc>>"),
    "with an id": ({"text": "A b.", "id": "k/1"}, "<<doc id=k/1>>A b.<</doc>>"),
    "with a title": ({"text": "A b.", "title": "T"}, "<<doc>>T\nA b.<</doc>>"),
    "content": ({"content": "A b."}, "<<doc>>A b.<</doc>>"),
    "list of parts": ({"content": [text("A"), text("b.")]}, "<<doc>>A\nb.<</doc>>"),
    "Anthropic's text": (
        {"source": {"type": "text", "media_type": "text/plain", "data": "A b."}},
        "<<doc>>A b.<</doc>>",
    ),
    "Anthropic's content": (
        {"source": {"type": "content", "content": [text("A b.")]}, "title": "T"},
        "<<doc>>T\nA b.<</doc>>",
    ),
    "Cohere's data": ({"document": {"id": "d1", "data": "A b."}}, "<<doc id=d1>>A b.<</doc>>"),
    "Cohere's text": ({"document": "A b."}, "<<doc>>A b.<</doc>>"),
    "of one's own": ({"document": {"text": "A b."}}, "<<doc>>A b.<</doc>>"),
}


@pytest.mark.parametrize(("part", "wanted"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", ["text", "input_text"])
def test_forms_of_documents(part: dict[str, Any], wanted: str, kind: str) -> None:
    part = {"type": "document", **part}
    name = "messages" if kind == "text" else "input"
    body = {"model": "m", name: [{"role": "user", "content": [part, text("Who?")]}]}
    before = deepcopy(body)
    [message] = rewritten(body)[name]
    assert message["content"] == [{"type": kind, "text": wanted}, text("Who?")]
    assert body == before
    assert rewritten(body, "tools") == body


def test_documents_of_a_system_prompt_and_of_tools_results() -> None:
    part = {"type": "document", "text": "A."}
    made = {"type": "text", "text": "<<doc>>A.<</doc>>"}
    body = {
        "system": [text("S"), part],
        "messages": [{"role": "user", "content": [{"type": "tool_result", "content": [part]}]}],
    }
    found = rewritten(body)
    assert found["system"] == [text("S"), made]
    assert found["messages"][0]["content"] == [{"type": "tool_result", "content": [made]}]


BREAK = {"cache_control": {"type": "ephemeral"}}


def test_a_chunk_ends_at_a_breakpoint_and_begins_after_the_last_one() -> None:
    document = {"type": "document", "text": "D", **BREAK}
    parts = [
        text("a"),
        text("b", **BREAK),
        document,
        text("c", prompt_cache_breakpoint={}),
        text("d", **BREAK),
        text("e"),
    ]
    [message] = rewritten(of_user(*parts), "documents", "breakpoints")["messages"]
    texts = [part["text"] for part in message["content"]]
    assert texts == ["<<doc>>a", "b<</doc>>", "<<doc>>D<</doc>>", "<<doc>>c", "d<</doc>>", "e"]
    [left] = rewritten(of_user(*parts))["messages"]
    assert [part["text"] for part in left["content"]] == ["a", "b", "<<doc>>D<</doc>>", *"cde"]


def test_results_of_tools() -> None:
    body = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
            {"role": "tool", "tool_call_id": "2", "content": [text("s"), text(" ")]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "3", "content": "t"}],
            },
        ],
        "input": [{"type": "function_call_output", "call_id": "4", "output": "u"}, "v"],
    }
    found = rewritten(body, "tools")
    _, one, two, three = found["messages"]
    assert one["content"] == "<<doc>>r<</doc>>"
    assert two["content"] == [text("<<doc>>s<</doc>>"), text(" ")]
    assert three["content"][0]["content"] == "<<doc>>t<</doc>>"
    assert found["input"] == [{**body["input"][0], "output": "<<doc>>u<</doc>>"}, "v"]
    assert rewritten(body) == body


def test_results_with_marks_of_their_own_stay() -> None:
    body = {"messages": [{"role": "tool", "content": "a <<doc>>b<</doc>>"}]}
    assert rewritten(body, "tools") == body


def test_earlier_turns() -> None:
    roles = ["system", "user", "assistant", "user", "assistant"]
    body = {"messages": [{"role": role, "content": role} for role in roles]}
    found = [message["content"] for message in rewritten(body, "turns")["messages"]]
    assert found == ["system", "<<doc>>user<</doc>>", "<<doc>>assistant<</doc>>", *roles[3:]]


def test_documents_of_templates() -> None:
    body = {"messages": [], "documents": [{"title": "T", "text": "A", "id": "k"}, "B", {"n": 1}]}
    found = rewritten(body, "templates")["documents"]
    assert found == [{"title": "T", "text": "<<doc id=k>>A<</doc>>", "id": "k"}, "B", {"n": 1}]
    assert rewritten(body) == body


DOCUMENT = {"type": "document"}
NO_TEXT = "a document without text"
#: Parts that cannot be served, and why.
REFUSED: dict[str, tuple[Any, str]] = {
    "nothing in it": (DOCUMENT, NO_TEXT),
    "empty": (DOCUMENT | {"text": ""}, NO_TEXT),
    "white space": (DOCUMENT | {"text": " \n"}, NO_TEXT),
    "a number": (DOCUMENT | {"text": 7}, NO_TEXT),
    "null": (DOCUMENT | {"content": None}, NO_TEXT),
    "no parts": (DOCUMENT | {"content": []}, NO_TEXT),
    "parts that are images": (DOCUMENT | {"content": [{"type": "image"}]}, NO_TEXT),
    "a document in it that is empty": (DOCUMENT | {"document": {}}, NO_TEXT),
    "a source without data": (DOCUMENT | {"source": {"type": "text"}}, NO_TEXT),
    "a PDF": (DOCUMENT | {"source": {"type": "base64", "data": "JVBE"}}, "of type 'base64'"),
    "an address": (DOCUMENT | {"source": {"type": "url", "url": "x"}}, "of type 'url'"),
    "a file": (DOCUMENT | {"source": {"type": "file", "file_id": "x"}}, "of type 'file'"),
    "a source of no type": (DOCUMENT | {"source": {}}, "of type None"),
    "an id with a space": (DOCUMENT | {"text": "A", "id": "a b"}, "cannot have the id 'a b'"),
    "an empty id": (DOCUMENT | {"text": "A", "id": ""}, "cannot have the id ''"),
    "an id that is a number": (DOCUMENT | {"text": "A", "id": 7}, "cannot have the id 7"),
    "an id that is too long": (DOCUMENT | {"text": "A", "id": "k" * 201}, "cannot have the id"),
    "an id that closes": (DOCUMENT | {"text": "A", "id": "k>>x"}, "cannot have the id"),
    "an opening mark inside": (DOCUMENT | {"text": "A <<doc>>"}, "has a mark in it"),
    "a closing mark inside": (DOCUMENT | {"text": "A <</doc>> b"}, "has a mark in it"),
    "a mark in its title": (DOCUMENT | {"text": "A", "title": "<<doc>>"}, "has a mark in it"),
    "a breakpoint on an image": ({"type": "image_url", **BREAK}, "on a part without text"),
    "a breakpoint on text that is none": ({"type": "text", "text": 1, **BREAK}, "without text"),
    "a breakpoint over a mark": (text("<<doc>>", **BREAK), "has a mark in it"),
}


@pytest.mark.parametrize(("part", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_chunk_is_refused_with_its_place(part: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^messages\[0\]\.content\[1\]: .*{reason}") as raised:
        rewritten(of_user(text("q"), part), "documents", "breakpoints")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", ["documents", None, {"documents": True}])
def test_kinds_are_a_list(given: Any) -> None:
    with pytest.raises(ConfigError, match="`parts` is "):
        PicSettings.read({"pic": {"parts": given}})


def test_unknown_kinds_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown kind 'tool' \(did you mean 'tools'\?\)"):
        PicSettings.read({"pic": {"parts": ["tool"]}})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "output", "source", "document", "id"]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(body=st.dictionaries(st.sampled_from(["messages", "input", "system", "documents"]), JSON))
def test_any_body_is_rewritten_or_refused(body: dict[str, Any]) -> None:
    before = deepcopy(body)
    try:
        rewritten(body, *KINDS)
    except ConfigError as error:
        assert ": " in error.message
    assert body == before


@given(st.text(max_size=20), st.none() | st.from_regex(r"[\w.:/@#-]{1,8}", fullmatch=True))
def test_what_is_put_between_marks_is_cut_out_again(inside: str, key: str | None) -> None:
    try:
        [marked] = MARKS.around([inside], key)
    except ConfigError:
        return
    spans = [span for span in MARKS.cut(marked) if span.chunk]
    found = [(marked[span.start : span.end], span.document) for span in spans]
    assert found == ([(inside, key)] if inside.strip() else [])

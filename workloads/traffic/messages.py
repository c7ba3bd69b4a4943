"""Text of messages in the forms that clients, agents and traces write, as contents of a prompt.

Messages stand one after another, in a line each, as `picbench serve` puts them for models without
a chat template. Documents are chunks: content parts of type ``document`` and ``search_result``, and
text between the marks of `picbench serve --marks on`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from picbench.workloads.traffic.trace import PromptContent

_MARKED = re.compile(r"<<doc(?: id=[^>]*)?>>(.*?)<</doc>>", re.DOTALL)

#: Content parts of documents, of tools' results, and of what models do not get back.
_DOCUMENTS = ("document", "search_result")
_RESULTS = ("tool_result", "tool_call_response", "function_call_output", "custom_tool_call_output")
_LEFT_OUT = ("thinking", "redacted_thinking", "reasoning")

#: Where text is in a message or part, in order of preference.
_TEXTS = (
    *("content", "text", "parts", "output", "result", "response", "value", "data"),
    *("source", "document"),
)

#: Where calls of tools are in a message or part.
_CALLS = ("tool_calls", "arguments", "input", "function_call")

#: Roles in the words of LangChain and ShareGPT.
_ROLES = {"human": "user", "ai": "assistant", "gpt": "assistant", "developer": "system"}


def contents(message: Any, role: str = "") -> Iterator[PromptContent]:
    """The contents of a message, of a list of messages or parts, or of a text."""
    if isinstance(message, list):
        for part in message:
            yield from contents(part, role)
    elif isinstance(message, str):
        yield from _of_text(message, role)
    elif isinstance(message, Mapping):
        yield from _of_object(message, role)


def _of_object(given: Mapping[str, Any], role: str) -> Iterator[PromptContent]:
    kind = given.get("type")
    inner = given.get("kwargs") or given.get("data") if kind not in _DOCUMENTS else None
    if isinstance(inner, Mapping):  # LangChain's messages, by type or class.
        named = str((given.get("id") or kind or [""])[-1]) if kind == "constructor" else str(kind)
        given, kind = {"role": named.removesuffix("Message").lower(), **inner}, None
    said = given.get("role") or given.get("from")
    role = _ROLES.get(str(said), str(said)) if said else role
    if kind in _LEFT_OUT:
        return
    if kind in _RESULTS:
        role = "tool"
    if kind in _DOCUMENTS:
        text = f"{given['title']}\n" if isinstance(given.get("title"), str) else ""
        yield from _chunk(text + text_of({**given, "type": None, "title": None}))
        return
    found = next((given[name] for name in _TEXTS if given.get(name)), None)
    if found is not None:
        yield from contents(found, role)
    for name in _CALLS:
        if given.get(name) and given[name] is not found:
            call = {"name": given.get("name"), name: given[name]}
            yield from _of_text(json.dumps(call, ensure_ascii=False), role)


def _of_text(text: str, role: str) -> Iterator[PromptContent]:
    """Text, and the documents that are marked in it."""
    for number, part in enumerate(_MARKED.split(text)):
        if number % 2:
            yield from _chunk(part)
        elif part:
            yield PromptContent(text=f"{part}\n", role=role)


def _chunk(text: str) -> Iterator[PromptContent]:
    if text.strip():
        name = hashlib.blake2b(text.encode(errors="replace"), digest_size=12).hexdigest()
        yield PromptContent(text=text, chunk=name, role="document")


def text_of(message: Any) -> str:
    """The text of a message or part alone."""
    return "".join(content.text or "" for content in contents(message)).rstrip("\n")


def tools_of(body: Mapping[str, Any]) -> Iterator[PromptContent]:
    """The tools that a request offers, one after another: what precedes a system prompt."""
    for tool in body.get("tools") or body.get("functions") or ():
        yield PromptContent(text=f"{json.dumps(tool, ensure_ascii=False)}\n", role="tools")

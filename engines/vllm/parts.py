"""Documents in the parts of messages, which become text between marks.

Clients name documents in three ways that no chat template knows: as content parts of type
``document`` (Anthropic's and Cohere's forms, and plain ones), by cache breakpoints
(``cache_control``, ``prompt_cache_breakpoint``), and as what they are: tools' results, earlier
turns. Bodies of chat completions, responses and messages are rewritten, so that servers get text
alone, in which each document is between marks (`DocumentMarks`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from picbench.engines.vllm.marks import DocumentMarks
from picbench.errors import ConfigError, closest

#: What may become chunks, by the name that an operator switches it on with.
KINDS: Mapping[str, str] = {
    "documents": "content parts of type document",
    "breakpoints": "what ends at a cache breakpoint, from the one before it in its message",
    "tools": "results of tools",
    "turns": "messages before the last one of the user, but for system messages",
    "templates": "what chat templates get as `documents`, unless they mark it themselves",
}

_BREAKPOINTS = ("cache_control", "prompt_cache_breakpoint")
_TEXTS = ("text", "input_text", "output_text")
_RESULTS = ("tool_result", "function_call_output")

Body = dict[str, Any]


def read_kinds(given: Any) -> frozenset[str]:
    """The kinds of the setting `parts`, a list of names. Raises ConfigError for others."""
    if not isinstance(given, list | tuple):
        raise ConfigError(f"`parts` is {given!r}", hint=f"use a list of {', '.join(KINDS)}")
    for name in given:
        if name not in KINDS:
            raise ConfigError(f"`parts`: unknown kind {name!r}", hint=closest(str(name), KINDS))
    return frozenset(given)


@dataclass(frozen=True, slots=True)
class PartReader:
    """Rewrites bodies: what of these `kinds` is in them is put between `marks`."""

    marks: DocumentMarks
    kinds: Collection[str]

    def rewrite(self, body: Body) -> Body:
        """A body of one of the three APIs; what it does not name stays as it is.

        Raises ConfigError, with the place, for documents and breakpoints without text, documents
        that are no text, ids that marks cannot have, and text that has a mark itself.
        """
        changed = dict(body)
        for name in ("system", "messages", "input"):
            if isinstance(items := body.get(name), list):
                changed[name] = list(self._items(items, name))
        documents = body.get("documents")
        if "templates" in self.kinds and isinstance(documents, list):
            changed["documents"] = [
                self._template_document(one, f"documents[{i}]") for i, one in enumerate(documents)
            ]
        return changed

    def _items(self, items: Sequence[Any], name: str) -> Iterator[Any]:
        """Messages, or the parts of a system prompt."""
        if name == "system":
            yield from self._parts(items, name, "text", every=False)
            return
        asked = [i for i, item in enumerate(items) if _role(item) == "user"]
        kind = "input_text" if name == "input" else "text"
        for i, item in enumerate(items):
            place = f"{name}[{i}]"
            if not isinstance(item, dict):
                yield item
                continue
            result = item.get("type") in _RESULTS or _role(item) == "tool"
            turn = i < max(asked, default=0) and _role(item) in ("user", "assistant")
            every = (result and "tools" in self.kinds) or (turn and "turns" in self.kinds)
            yield self._message(item, place, kind, every=every)

    def _message(self, item: Body, place: str, kind: str, *, every: bool) -> Body:
        """A message, a tool's result or an output, whose text is a chunk if `every` text is."""
        changed = dict(item)
        for name in ("content", "output"):
            content = item.get(name)
            if isinstance(content, list):
                parts = self._parts(content, f"{place}.{name}", kind, every=every)
                changed[name] = list(parts)
            elif isinstance(content, str) and every:
                changed[name] = self._chunk(content)
        return changed

    def _parts(self, parts: Sequence[Any], place: str, kind: str, *, every: bool) -> Iterator[Any]:
        """Content parts; what ends at a breakpoint begins after the last chunk before it."""
        since: list[Body] = []
        for i, part in enumerate(parts):
            where = f"{place}[{i}]"
            changed = self._part(part, where, kind, every=every)
            same = changed is part
            marked = "breakpoints" in self.kinds and isinstance(part, dict) and _breaks(part)
            if same and _has_text(part):
                since.append(part)
                if marked:
                    texts = self._wrapped([one["text"] for one in since], None, where)
                    yield from (one | {"text": t} for one, t in zip(since, texts, strict=True))
                    since = []
                continue
            if marked and same:
                problem = "a cache breakpoint on a part without text"
                raise ConfigError(f"{where}: {problem}", hint="put it on a text or document part")
            yield from since
            since = []
            yield changed
        yield from since

    def _part(self, part: Any, place: str, kind: str, *, every: bool) -> Any:
        if not isinstance(part, dict):
            return part
        if part.get("type") == "document" and "documents" in self.kinds:
            return {"type": kind, "text": self._document(part, place)}
        if part.get("type") == "tool_result":
            return self._message(part, place, kind, every=every or "tools" in self.kinds)
        if every and _has_text(part):
            return {**part, "text": self._chunk(part["text"])}
        return part

    def _document(self, part: Mapping[str, Any], place: str) -> str:
        inner = part.get("document")
        given = {**part, **inner} if isinstance(inner, dict) else dict(part)
        source = given.get("source")
        if isinstance(source, dict):
            if source.get("type") not in ("text", "content"):
                kind = source.get("type")
                raise ConfigError(f"{place}: a document of type {kind!r}", hint="send its text")
            given |= {"text": source.get("data"), "content": source.get("content")}
        found = [given.get(name) for name in ("text", "content", "data")]
        if isinstance(inner, str):
            found.append(inner)
        text = next((text for text in map(_text, found) if text), "")
        if not text.strip():
            raise ConfigError(f"{place}: a document without text", hint='use "text": "..."')
        if isinstance(title := given.get("title"), str) and title:
            text = f"{title}\n{text}"
        return self._wrapped([text], given.get("id"), place)[0]

    def _template_document(self, document: Any, place: str) -> Any:
        """One of the documents that a chat template puts into the prompt itself."""
        if not isinstance(document, dict):
            return document
        names = [n for n in ("text", "content", "contents") if isinstance(document.get(n), str)]
        return document | {
            name: self._wrapped([document[name]], document.get("id"), place)[0]
            for name in names[:1]
        }

    def _chunk(self, text: str) -> str:
        """A text between marks, unless it has some of its own."""
        return text if self.marks.pattern.search(text) else self.marks.around([text])[0]

    def _wrapped(self, texts: Sequence[str], key: Any, place: str) -> list[str]:
        try:
            return self.marks.around(texts, key)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error.message}", hint=error.hint) from error


def _breaks(part: Mapping[str, Any]) -> bool:
    return any(part.get(name) for name in _BREAKPOINTS)


def _has_text(part: Any) -> bool:
    """Whether a content part is plain text."""
    return (
        isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part.get("text"), str)
    )


def _role(item: Any) -> Any:
    return item.get("role") if isinstance(item, dict) else None


def _text(value: Any) -> str:
    """Text that is given as it is, or as a list of texts and text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return ""
    parts = (part.get("text") if isinstance(part, dict) else part for part in value)
    return "\n".join(part for part in parts if isinstance(part, str))

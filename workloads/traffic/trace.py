"""Requests of a trace, as far as caches can tell them apart, and what their contents are made of.

Every source becomes a stream of `TracedRequest` (`trace_file.py`), which `picbench profile` counts
and `picbench run` serves.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

#: Gives the token ids of a text; of an empty one, the ids that every prompt of texts begins with.
Encode = Callable[[str], tuple[int, ...]]

#: From here on ids stand for tokens of contents whose length alone is known.
INVENTED = 1 << 40

#: The most tokens of one content: more would take the memory of the machine.
_MOST = 10_000_000

#: What of prompts a trace shows: contents, ids that each name all before them, or only lengths.
Sees = Literal["contents", "prefixes", "lengths"]


class TraceSegment(NamedTuple):
    """Consecutive prompt tokens: a chunk or text.

    Segments of one `content` are equal; None is content that never occurs again. `tokens` are the
    ids, eight bytes each, where they are known. Without them segments of different contents count
    as different from their first token on. `before` is what precedes a chunk in its document.
    `role` is whose text it is: tools, system, user, assistant, tool, document; empty if not known.
    """

    content: int | None
    length: int
    chunk: bool
    tokens: bytes | None = None
    before: "TraceSegment | None" = None
    role: str = ""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace.

    `arrival` is in seconds from the start, None where the trace has no times. `output` is the
    number of generated tokens; `reply` is what they are, None where that is not known. `source` is
    the place of the request, for messages, `session` names its conversation.
    """

    segments: tuple[TraceSegment, ...]
    output: int
    arrival: float | None = None
    reply: TraceSegment | None = None
    source: str = ""
    session: str = ""

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that is being read.

    `kind` is its format. An `exact` trace has token ids, so that contents with a common beginning
    share their first blocks. `requests` can be iterated once; it raises DataError with file, line
    and field. `sees` and `note` say what cannot be known of it.
    """

    kind: str
    exact: bool
    requests: Iterator[TracedRequest]
    sees: Sees = "contents"
    note: str = ""


#: Tokens of a content.
Count = Annotated[int, Field(ge=1, le=_MOST)]
_Ids = Annotated[list[Annotated[int, Field(ge=0, lt=INVENTED)]], Field(min_length=1)]

#: Token ids, or only their number; an error is about the form that is meant.
_Tokens = Annotated[
    Annotated[Count, Tag("count")] | Annotated[_Ids, Tag("ids")],
    Discriminator(lambda tokens: "ids" if isinstance(tokens, list) else "count"),
]


class PromptContent(BaseModel):
    """Content of a prompt: its text, its token ids, or their number.

    `chunk` names a chunk, `id` a text that other prompts share. The name alone is enough for a
    content that was named before. `before` is the text of a chunk's document up to the chunk.
    `role` is whose text it is.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    text: str | None = None
    tokens: _Tokens | None = None
    chunk: str | None = None
    id: str | None = None
    before: "PromptContent | None" = None
    role: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.text is not None and self.tokens is not None:
            raise ValueError("has 'text' and 'tokens', one of them is enough")
        if self.chunk is not None and self.id is not None:
            raise ValueError("has 'chunk' and 'id', which are both names")
        if self.text is None and self.tokens is None and self.name is None:
            raise ValueError("needs 'text', 'tokens', or the name of what came before")
        if self.before and (self.chunk is None or (self.text, self.tokens) == (None, None)):
            raise ValueError("has 'before', which comes with a 'chunk' and its content")
        return self

    @property
    def name(self) -> tuple[str, str] | None:
        """The field that names it, and its name."""
        named = {"chunk": self.chunk, "id": self.id}
        return next(((kind, name) for kind, name in named.items() if name is not None), None)


class PromptLine(BaseModel):
    """A request: the contents of its prompt, its arrival, and what it generated.

    `arrival` is in seconds, `output` the number of generated tokens. `reply` is the generated
    content, which later prompts may contain, and has as many tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    parts: Annotated[list[PromptContent], Field(min_length=1)]
    arrival: float | None = Field(None, ge=0, allow_inf_nan=False)
    output: Count | None = None
    reply: PromptContent | None = None


class ContentTable:
    """Makes segments; in an `exact` table each has token ids, invented ones where none are known.

    Its methods raise ValueError for a name with two lengths or two contents, or with none yet.
    `load` loads a tokenizer, and is called only for texts. A table that `keeps` contents has each
    text once, however many prompts repeat it, and encodes it once.
    """

    def __init__(
        self, *, exact: bool, load: Callable[[], Encode] | None = None, keeps: bool = False
    ) -> None:
        self.exact, self.keeps, self._load = exact, keeps, load
        self._kept: dict[bytes, bytes] = {}
        self._by_text: dict[bytes, bytes] = {}
        self._encode: Encode | None = None
        self._start: tuple[int, ...] = ()
        self._texts: set[tuple[str, str]] = set()
        self._named: dict[tuple[str, str], TraceSegment] = {}
        self._by_tokens: dict[bytes, int] = {}
        self._told: set[int] = set()
        self._numbers = 0
        self._unique = 0

    def of_tokens(self, ids: Sequence[int], *, chunk: bool) -> TraceSegment:
        """A segment of known tokens."""
        return self.of_bytes(array("q", ids).tobytes(), chunk=chunk)

    def of_bytes(self, tokens: bytes, *, chunk: bool, role: str = "") -> TraceSegment:
        """A segment of known tokens, as it has them."""
        digest = hashlib.blake2b(tokens, digest_size=16).digest()
        content = self._by_tokens.get(digest)
        if content is None:
            content = self._by_tokens[digest] = self._next()
            self._told.add(content)
        if self.keeps:
            tokens = self._kept.setdefault(digest, tokens)
        known = tokens if self.exact else None
        return TraceSegment(content, len(tokens) // 8, chunk, known, role=role)

    def _encoded(self, text: str) -> bytes:
        """The tokens of a text inside a prompt."""
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        if (known := self._by_text.get(digest)) is not None:
            return known
        if self._encode is None:
            assert self._load is not None, "only traces with texts have PromptContent"
            self._encode = self._load()
            self._start = self._encode("")
        found = array("q", self._encode(text)[len(self._start) :]).tobytes()
        if self.keeps:
            self._by_text[digest] = found
        return found

    def of_length(self, length: int, *, chunk: bool) -> TraceSegment:
        """A segment that no other prompt has, of which only the length is known."""
        if not self.exact:
            return TraceSegment(None, length, chunk)
        first = INVENTED + self._unique
        self._unique += length
        invented = array("q", range(first, first + length)).tobytes()
        return TraceSegment(self._next(), length, chunk, invented)

    def name(self, kind: str, name: str, segment: TraceSegment | None = None) -> TraceSegment:
        """What a name stands for since its first occurrence, where it needs a segment."""
        known = self._named.get((kind, name))
        if known is None:
            if segment is None:
                raise ValueError(
                    f"field {kind!r}: {name!r} has no 'text' and no 'tokens', and had none before"
                )
            content = segment.content if segment.content is not None else self._next()
            known = self._named[kind, name] = segment._replace(content=content)
        elif segment is not None and known.length != segment.length:
            raise ValueError(
                f"field {kind!r}: {name!r} has {segment.length} tokens here and had "
                f"{known.length} before"
            )
        elif segment is not None and known.content != segment.content:
            both = {known.content, segment.content}
            if both <= self._told:
                raise ValueError(f"field {kind!r}: {name!r} has other tokens here than before")
        if segment is not None and segment.before not in (None, known.before):
            raise ValueError(f"field 'before': {name!r} has another text before it than at first")
        return known

    def of_prompt(self, parts: Sequence[PromptContent]) -> tuple[TraceSegment, ...]:
        """The segments of a prompt that have tokens.

        The ids that a tokenizer begins prompts with are a text of their own, before a chunk as
        well, so that a named content has the same tokens in every place.
        """
        made = [self.of_content(content, f"parts.{place}") for place, content in enumerate(parts)]
        first = parts[0]
        named = first.tokens is None and first.name in self._texts
        if self._start and (first.text is not None or named):
            made.insert(0, self.of_tokens(self._start, chunk=False))
        return tuple(segment for segment in made if segment.length)

    def of_content(self, content: PromptContent, where: str) -> TraceSegment:
        """The segment of a content. Raises ValueError that names `where` it stands."""
        chunk, tokens, made = content.chunk is not None, content.tokens, None
        if isinstance(tokens, int):
            made = self.of_length(tokens, chunk=chunk)
        elif tokens is not None:
            made = self.of_tokens(tokens, chunk=chunk)
        elif content.text is not None:
            made = self.of_bytes(self._encoded(content.text), chunk=chunk)
        if content.role and made is not None:
            made = made._replace(role=content.role)
        if content.before and content.chunk is not None and made is not None:
            before = self.of_content(content.before, f"{where}.before")
            if content.before.name is None:
                before = self.name("before", content.chunk, before)
            made = made._replace(before=before)
        if content.name is None:
            assert made is not None, "PromptContent has a name, a text or tokens"
            return made
        if content.text is not None:
            self._texts.add(content.name)
        try:
            return self.name(*content.name, made)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

"""A request as one flat sequence of rows, each token once for every way it is computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from picbench.engines.oracle.rule import BLOCK, OracleSegment, Rule

#: A segment, or its kind and tokens only.
GivenSegment = OracleSegment | tuple[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class ExpandedRow:
    """One token computed in one view.

    `compiled` is the index of the chunk (in prompt order, duplicates apart) whose compilation the
    row belongs to; None for rows of the request itself: text, linked tokens, continuation.
    `reused` says whether the request sees the row: not that of a compilation if it is of a
    discarded anchor or document, or replaced by a linked token.
    """

    token: int
    position: int
    compiled: int | None = None
    reused: bool = True


def expand(
    segments: Sequence[GivenSegment], continuation: Sequence[int], rule: Rule
) -> list[ExpandedRow]:
    """The rows of all compilations, then those of the request in logical order.

    All positions are shifted by one constant so that no compilation starts below 0; rotary
    embeddings depend on differences only. The last token of the prompt is always a row of the
    request, and each token of the continuation follows it.
    """
    framed = rule.frame(list(_merged(segments)))
    prompt = list(_padded([segment for segment in framed if segment.tokens], rule.pad))
    anchor = rule.anchor(_text_before_chunks(prompt))
    compilations: list[ExpandedRow] = []
    request: list[ExpandedRow] = []
    documents = [rule.document(i) for i in range(sum(s.kind == "chunk" for s in prompt))]
    start = shift = len(anchor) + max(map(len, documents), default=0)
    chunks = 0
    for place, segment in enumerate(prompt):
        tokens = segment.tokens
        if segment.position is not None:
            start = shift + segment.position
        seen = _seen(segment)
        own = set(range(len(tokens)))
        if segment.kind == "chunk":
            own = {*rule.links(chunks, len(tokens)), *segment.dependent}
            if place == len(prompt) - 1:
                own.add(max(seen))
            hidden = own | _placeholders(segment)
            before = (*anchor, *documents[chunks])
            compilations += _compilation(chunks, before, tokens, start, hidden)
            own |= {i for i in seen if i in _placeholders(segment)}
            chunks += 1
        request += [ExpandedRow(seen[i], start + i) for i in sorted(own) if i in seen]
        start += len(tokens)
    return compilations + request + [ExpandedRow(t, start + i) for i, t in enumerate(continuation)]


def _placeholders(segment: OracleSegment) -> set[int]:
    return {first + i for first, length, _ in segment.slots for i in range(length)}


def _seen(segment: OracleSegment) -> dict[int, int]:
    """The tokens that a request has in a segment, by index: others in the place of slots."""
    seen = dict(enumerate(segment.tokens))
    for first, length, tokens in segment.slots:
        for i in range(length):
            del seen[first + i]
        seen.update({first + i: token for i, token in enumerate(tokens)})
    return seen


def _compilation(
    chunk: int, before: Sequence[int], tokens: Sequence[int], start: int, replaced: set[int]
) -> list[ExpandedRow]:
    first = start - len(before)
    return [ExpandedRow(t, first + i, chunk, reused=False) for i, t in enumerate(before)] + [
        ExpandedRow(t, start + i, chunk, reused=i not in replaced) for i, t in enumerate(tokens)
    ]


def _merged(segments: Sequence[GivenSegment]) -> Iterator[OracleSegment]:
    """Drop empty segments and join neighbouring texts that have no positions of their own."""
    filled = [segment for segment in map(_full, segments) if segment.tokens]
    for _, run in groupby(enumerate(filled), key=lambda item: _group(*item)):
        joined = [segment for _, segment in run]
        tokens = tuple(token for segment in joined for token in segment.tokens)
        yield joined[0]._replace(tokens=tokens)


def _group(index: int, segment: OracleSegment) -> int:
    """What texts that are joined have in common."""
    return index if segment.kind == "chunk" or segment.position is not None else -1


def _full(segment: GivenSegment) -> OracleSegment:
    return segment if isinstance(segment, OracleSegment) else OracleSegment(*segment)


def _padded(prompt: Sequence[OracleSegment], pad: int | None) -> Iterator[OracleSegment]:
    """Pad chunks at the start and texts at the end, except a text that ends the prompt."""
    for place, segment in enumerate(prompt):
        tokens = segment.tokens
        last_text = segment.kind == "text" and place == len(prompt) - 1
        pads = () if pad is None or last_text else (pad,) * (-len(tokens) % BLOCK)
        padded = (*pads, *tokens) if segment.kind == "chunk" else (*tokens, *pads)
        yield segment._replace(tokens=padded)


def _text_before_chunks(prompt: Sequence[OracleSegment]) -> Sequence[int]:
    return prompt[0].tokens if prompt[0].kind == "text" else ()

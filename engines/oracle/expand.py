"""A request as one flat sequence of rows, each token once for every way it is computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from picbench.engines.oracle.rule import BLOCK, Rule

#: ("text" or "chunk", token ids)
OracleSegment = tuple[Literal["text", "chunk"], Sequence[int]]


@dataclass(frozen=True, slots=True)
class ExpandedRow:
    """One token computed in one view.

    `compiled` is the index of the chunk (in prompt order, duplicates apart) whose compilation the
    row belongs to; None for rows of the request itself: text, linked tokens, continuation.
    `reused` says whether the request sees the row of a compilation: not if it is a discarded anchor
    or replaced by a linked token.
    """

    token: int
    position: int
    compiled: int | None = None
    reused: bool = True


def expand(
    segments: Sequence[OracleSegment], continuation: Sequence[int], rule: Rule
) -> list[ExpandedRow]:
    """The rows of all compilations, then those of the request in logical order.

    All positions are shifted by one constant so that no anchor starts below 0; rotary
    embeddings depend on differences only. The last token of the prompt is always a row of the
    request, and each token of the continuation follows it.
    """
    prompt = list(_padded(list(_merged(segments)), rule.pad))
    anchor = rule.anchor(_text_before_chunks(prompt))
    compilations: list[ExpandedRow] = []
    request: list[ExpandedRow] = []
    start = len(anchor)
    chunks = 0
    for place, (kind, tokens) in enumerate(prompt):
        own = set(range(len(tokens)))
        if kind == "chunk":
            own = set(rule.links(chunks, len(tokens)))
            if place == len(prompt) - 1:
                own.add(len(tokens) - 1)
            compilations += _compilation(chunks, anchor, tokens, start, own)
            chunks += 1
        request += [ExpandedRow(tokens[i], start + i) for i in sorted(own)]
        start += len(tokens)
    return compilations + request + [ExpandedRow(t, start + i) for i, t in enumerate(continuation)]


def _compilation(
    chunk: int, anchor: Sequence[int], tokens: Sequence[int], start: int, replaced: set[int]
) -> list[ExpandedRow]:
    first = start - len(anchor)
    return [ExpandedRow(t, first + i, chunk, reused=False) for i, t in enumerate(anchor)] + [
        ExpandedRow(t, start + i, chunk, reused=i not in replaced) for i, t in enumerate(tokens)
    ]


def _merged(segments: Sequence[OracleSegment]) -> Iterator[OracleSegment]:
    """Drop empty segments and join neighbouring texts."""
    filled = [(kind, tuple(tokens)) for kind, tokens in segments if tokens]
    for kind, run in groupby(filled, key=lambda segment: segment[0]):
        if kind == "chunk":
            yield from run
        else:
            yield kind, tuple(token for _, tokens in run for token in tokens)


def _padded(prompt: Sequence[OracleSegment], pad: int | None) -> Iterator[OracleSegment]:
    """Pad chunks at the start and texts at the end, except a text that ends the prompt."""
    for place, (kind, tokens) in enumerate(prompt):
        last_text = kind == "text" and place == len(prompt) - 1
        pads = () if pad is None or last_text else (pad,) * (-len(tokens) % BLOCK)
        yield kind, (*pads, *tokens) if kind == "chunk" else (*tokens, *pads)


def _text_before_chunks(prompt: Sequence[OracleSegment]) -> Sequence[int]:
    return prompt[0][1] if prompt[0][0] == "text" else ()

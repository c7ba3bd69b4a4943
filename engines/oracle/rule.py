"""The oracle's own description of an algorithm, and the rows that a request becomes under it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

#: Slots of a KV block: the unit of MEPIC's recomputation and of paper padding.
BLOCK = 16

#: (index of the chunk in its prompt, its length) -> indices of the tokens to link.
LinkedTokens = Callable[[int, int], Collection[int]]

#: Index of a chunk in its prompt -> the text of its document before it.
DocumentTokens = Callable[[int], Sequence[int]]

#: The prompt's text before its first chunk -> the tokens that every chunk is compiled after.
AnchorTokens = Callable[[Sequence[int]], Sequence[int]]


class OracleSegment(NamedTuple):
    """A segment of a prompt, "text" or "chunk".

    `position` is that of the first token; None: it follows the segment before it. `slots` (first
    index, length, tokens) are runs of a chunk's tokens that only its compilation has; the request
    has `tokens` in the first of their places. `dependent` are indices of a chunk's tokens that are
    recomputed besides those of the rule; they are not for chunks with slots.
    """

    kind: str
    tokens: Sequence[int]
    position: int | None = None
    slots: Sequence[tuple[int, int, Sequence[int]]] = ()
    dependent: Collection[int] = ()


#: The prompt's segments, neighbouring texts joined -> the segments that are computed.
Frame = Callable[[Sequence[OracleSegment]], Sequence[OracleSegment]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One algorithm.

    `links` selects the tokens of a chunk that are recomputed with the whole logical prefix in view.
    `anchor` and then `document` give the tokens directly before a chunk while its canonical KV is
    computed; their own KV is discarded. `pad` is the token that pads segments to whole blocks as in
    MEPIC's paper (arXiv 2512.16822, section 3); None pads nothing, which equals pads that are
    masked and take no position. `frame` changes the prompt itself, before it is padded. Both come
    first: links, anchor and positions are those of the changed and padded prompt. The request's
    scores of canonical keys are divided by `temperature` (APE, arXiv 2502.05431).
    """

    links: LinkedTokens
    anchor: AnchorTokens = lambda _: ()
    pad: int | None = None
    frame: Frame = list
    document: DocumentTokens = lambda _: ()
    temperature: float = 1.0

    def anchored(self, text: Sequence[int] = ()) -> "Rule":
        """The same with chunks compiled after the prompt's text before them all, and `text`."""
        return replace(self, anchor=lambda prefix: (*prefix, *text))

    def within(self, documents: Sequence[Sequence[int]]) -> "Rule":
        """The same with each chunk compiled after the tokens of its document, one entry a chunk."""
        return replace(self, document=lambda index: documents[index])

    def padded(self, pad: int) -> "Rule":
        """The same with visible pads, token `pad`, that take positions."""
        return replace(self, pad=pad)


def full() -> Rule:
    """Every token of every chunk is recomputed: ordinary causal attention."""
    return Rule(lambda _, length: range(length))


def naive() -> Rule:
    """Nothing is recomputed."""
    return Rule(lambda _index, _length: ())


def epic(k: int) -> Rule:
    """LegoLink-k: the first k tokens of every chunk but the first (arXiv 2410.15332)."""
    return Rule(lambda index, length: range(min(k, length) if index else 0))


def epic_bos(k: int, bos: int) -> Rule:
    """LegoLink-k over chunks that all begin with a BOS of their own, which stays in the prompt."""

    def frame(prompt: Sequence[OracleSegment]) -> list[OracleSegment]:
        return [s._replace(tokens=(bos, *s.tokens)) if s.kind == "chunk" else s for s in prompt]

    return replace(epic(k), frame=frame)


def kvlink(*links: Sequence[int]) -> Rule:
    """Link tokens after every chunk: `links` of the first chunk, the second, ... (2502.16002).

    The last ones are those of all further chunks.
    """

    def frame(prompt: Sequence[OracleSegment]) -> list[OracleSegment]:
        framed, left = [], list(links)
        for segment in prompt:
            framed.append(segment)
            if segment.kind == "chunk":
                framed.append(OracleSegment("text", left.pop(0) if len(left) > 1 else left[0]))
        return framed

    return replace(naive(), frame=frame)


def block_attention() -> Rule:
    """All segments are compiled alone but the last, which sees them all (2409.15355).

    The first one, if it is text, has nothing before it in either way.
    """

    def frame(prompt: Sequence[OracleSegment]) -> list[OracleSegment]:
        *blocks, last = prompt
        return [*(block._replace(kind="chunk") for block in blocks), last._replace(kind="text")]

    return replace(naive(), frame=frame)


def first(share: float) -> Rule:
    """The first tokens of every chunk, the given share of them, rounded up."""
    return Rule(lambda _, length: range(-int(-round(share * length, 6) // 1)))


def epic_zero(bos: int, sinks: int = 4) -> Rule:
    """LegoLink-0: nothing is recomputed, chunks are compiled after so many discarded BOS."""
    return replace(naive(), anchor=lambda _: (bos,) * sinks)


def mepic(blocks: int = 1) -> Rule:
    """The first blocks of every chunk."""
    return Rule(lambda _, length: range(min(blocks * BLOCK, length)))


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
    request, and so is the first if its chunk is compiled after others, since no compilation has an
    attention sink for the request then. Each token of the continuation follows the prompt.
    """
    framed = rule.frame(list(_merged(segments)))
    prompt = list(_padded([segment for segment in framed if segment.tokens], rule.pad))
    anchor = rule.anchor(prompt[0].tokens if prompt[0].kind == "text" else ())
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
            before = (*anchor, *documents[chunks])
            own = {*rule.links(chunks, len(tokens)), *segment.dependent}
            if place == 0 and before:
                own.add(0)
            if place == len(prompt) - 1:
                own.add(max(seen))
            hidden = own | _placeholders(segment)
            at = start - len(before)
            compilations += [ExpandedRow(t, at + i, chunks, False) for i, t in enumerate(before)]
            compilations += [
                ExpandedRow(t, start + i, chunks, i not in hidden) for i, t in enumerate(tokens)
            ]
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


def _merged(segments: Sequence[GivenSegment]) -> Iterator[OracleSegment]:
    """Drop empty segments and join neighbouring texts that have no positions of their own."""
    given = (s if isinstance(s, OracleSegment) else OracleSegment(*s) for s in segments)
    filled = [segment for segment in given if segment.tokens]
    for _, run in groupby(enumerate(filled), key=lambda item: _group(*item)):
        joined = [segment for _, segment in run]
        tokens = tuple(token for segment in joined for token in segment.tokens)
        yield joined[0]._replace(tokens=tokens)


def _group(index: int, segment: OracleSegment) -> int:
    """What texts that are joined have in common."""
    return index if segment.kind == "chunk" or segment.position is not None else -1


def _padded(prompt: Sequence[OracleSegment], pad: int | None) -> Iterator[OracleSegment]:
    """Pad chunks at the start and texts at the end, except a text that ends the prompt."""
    for place, segment in enumerate(prompt):
        tokens = segment.tokens
        last_text = segment.kind == "text" and place == len(prompt) - 1
        pads = () if pad is None or last_text else (pad,) * (-len(tokens) % BLOCK)
        padded = (*pads, *tokens) if segment.kind == "chunk" else (*tokens, *pads)
        yield segment._replace(tokens=padded)

"""The oracle's own description of an algorithm: what is linked, anchored and padded."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
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
    first: links, anchor and positions are those of the changed and padded prompt.
    """

    links: LinkedTokens
    anchor: AnchorTokens = lambda _: ()
    pad: int | None = None
    frame: Frame = list
    document: DocumentTokens = lambda _: ()

    def anchored(self) -> "Rule":
        """The same with chunks compiled after the prompt's text before its first chunk."""
        return replace(self, anchor=lambda prefix: prefix)

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


def minipic(ssep: int, pdep: int, *, joined: bool = False) -> Rule:
    """A prompt of one text that says by separators what is compiled alone (2606.13126).

    From a token `ssep` up to the next separator it is a chunk, otherwise text. If `joined`, a chunk
    begins with the text from `pdep` on that is right before it, and that text is recomputed.
    """

    def frame(prompt: Sequence[OracleSegment]) -> list[OracleSegment]:
        parts: list[list[int]] = [[]]
        for token in (token for segment in prompt for token in segment.tokens):
            if token in (ssep, pdep):
                parts.append([])
            parts[-1].append(token)
        framed: list[OracleSegment] = []
        lead: list[int] = []
        for part in parts:
            if joined and part[:1] == [pdep] and part is not parts[-1]:
                framed += [OracleSegment("text", lead)]
                lead = part
            elif part[:1] == [ssep]:
                framed.append(OracleSegment("chunk", lead + part, dependent=range(len(lead))))
                lead = []
            else:
                framed += [OracleSegment("text", lead), OracleSegment("text", part)]
                lead = []
        return framed

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

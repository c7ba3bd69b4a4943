"""MiniPIC (arXiv 2606.13126): prompts say themselves what is reused, and what is recomputed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from picbench.engines.algorithms.base import Algorithm, NumberRange, option
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Marks, Pad, Segment
from picbench.errors import ConfigError


@dataclass(frozen=True)
class MiniPic(Algorithm):
    """Do what the prompt's primitives say: span separators, prompt depends and pads.

    Compiled: each span alone. Linked: what depends on the prompt. Shared: all blocks of spans that
    hold a token which is not linked. An algorithm of one's own is made of them by the client:
    documents as spans are Block-Attention, spans whose first k tokens depend on the prompt are
    EPIC, spans at fixed positions are Prompt Cache.

    As the request's arguments: `spans`, and `dependent` spans of tokens that see everything before
    them. As tokens, which any client can send: a span begins with the separator ``ssep`` and ends
    before the next separator; tokens from ``pdep`` on see everything before them, up to the next
    separator. Both are the first token of a block of 16, so the client pads what is before them.
    Separators and pads are ordinary tokens of the prompt, with positions. Where a request names its
    spans, ids in its prompt separate nothing.

    With ``spans=joined`` a span right after dependent tokens is compiled after these, as EPIC's
    chunks after their first tokens; by default it is compiled alone, as in the paper.

    With ``pad=visible`` everything before a span, and every span, is filled up to a whole block by
    pads that take positions, for spans that come as arguments. The published code puts them before
    a span's last token, here they follow it. By default pads are invisible.

    In the paper a span separator restarts the chain of block hashes, and a prompt depend hashes the
    whole prompt so far; text after a span without one is found again after any prompt with that
    span. Here all text depends on the whole prompt before it, so there are no such hits.
    """

    name: ClassVar[str] = "minipic"
    summary: ClassVar[str] = "MiniPIC: separators in the prompt, or arguments, say what is reused"

    ssep: int = option(-1, "id of the token that begins a span; -1: none", NumberRange(-1))
    pdep: int = option(-1, "id of the token after which tokens see all; -1: none", NumberRange(-1))
    spans: str = option(
        "alone", "spans alone, or joined to dependent tokens before them", ("alone", "joined")
    )
    pad: str = option("masked", "how spans fill whole blocks", ("masked", "visible"))

    def __post_init__(self) -> None:
        if self.ssep == self.pdep >= 0:
            raise ConfigError(
                f"{self.spec!r}: one token has two meanings", hint="give ssep and pdep two ids"
            )

    @property
    def separators(self) -> tuple[int, ...]:
        """The ids that were given."""
        return tuple(token for token in (self.ssep, self.pdep) if token >= 0)

    @property
    def pads(self) -> Pad:
        """Invisible, or added by `arrange`."""
        return Pad.MASKED

    def read_marks(self, tokens: Sequence[int], block_size: int) -> Marks:
        """The prompt from separator to separator."""
        names = {self.ssep: "ssep", self.pdep: "pdep"}
        if not any(token in tokens for token in self.separators):
            return Marks()
        begins = [index for index, token in enumerate(tokens) if token in names]
        for index in begins:
            if index % block_size:
                raise ConfigError(
                    f"prompt token {index}, {names[tokens[index]]}={tokens[index]}, is inside a "
                    f"block of {block_size} tokens",
                    hint="pad what is before a separator to whole blocks",
                )
        parts = list(pairwise([*begins, len(tokens)]))
        dependent = [part for part in parts if tokens[part[0]] == self.pdep]
        spans = [part for part in parts if tokens[part[0]] == self.ssep]
        if self.spans == "joined":
            leads = {end: start for start, end in dependent}
            spans = [(leads.get(start, start), end) for start, end in spans]
        return Marks(tuple(spans), tuple(dependent))

    def arrange(self, segments: Sequence[Segment], layout: LayoutConfig) -> Sequence[Segment]:
        """Fill whole blocks with visible pads, if asked for."""
        if self.pad == "masked":
            return segments
        if any(segment.position is not None for segment in segments):
            raise ConfigError("visible pads move positions", hint="use pad=masked")
        size, last = layout.block_size, len(segments) - 1
        return [
            segment
            if index == last
            else segment.framed(trail=(layout.pad_token,) * (-len(segment.tokens) % size))
            for index, segment in enumerate(segments)
        ]

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link nothing but what the prompt says (`Segment.dependent`)."""
        return ChunkPolicy()

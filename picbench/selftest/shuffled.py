"""An algorithm that serves wrong KV, for `picbench selftest`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import ClassVar

from picbench.engines.algorithms import Algorithm
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Segment


@dataclass(frozen=True)
class Shuffled(Algorithm):
    """Map each chunk to the KV of what stands before it in its document, and link nothing.

    The self-test puts a chunk of another prompt there. Everything else is right: sizes, positions,
    blocks, what is shared; and the prompt that the user sent stays as it was, so that only the
    answers can tell. On purpose, this breaks the rule of `Algorithm.arrange` that the user's tokens
    stay.
    """

    name: ClassVar[str] = "shuffled"
    summary: ClassVar[str] = "a control: chunks with the KV of other chunks"

    @property
    def documents(self) -> bool:
        """The engine hands documents on."""
        return True

    def arrange(self, segments: Sequence[Segment], layout: LayoutConfig) -> Sequence[Segment]:
        """Replace every chunk by as many tokens of its context, repeated where these are too few.

        Raises ValueError for a chunk without a document.
        """
        return [_replaced(segment) if segment.chunk else segment for segment in segments]

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Link nothing."""
        return ChunkPolicy()


def _replaced(segment: Segment) -> Segment:
    if not segment.context:
        raise ValueError("the control shuffled needs a document for each chunk")
    tokens = islice(cycle(segment.context), len(segment.tokens))
    return replace(segment, tokens=tuple(tokens), context=())

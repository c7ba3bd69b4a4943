"""A prompt's segments as they are planned: with pads, and each at its logical position.

Nothing here imports torch or vllm.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from picbench.engines.planning.policy import LayoutConfig, Pad, Segment
from picbench.errors import ConfigError


class PlacedSegment(NamedTuple):
    """A segment and the logical position of its first token."""

    segment: Segment
    start: int

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.segment.tokens)


def place(segments: Sequence[Segment], layout: LayoutConfig) -> list[PlacedSegment]:
    """The segments that have tokens, padded as the layout says, at their positions.

    Raises ConfigError if one has a position before the end of the last one, and for positions
    together with visible pads, which move them.
    """
    segments = [segment for segment in segments if segment.tokens]
    if layout.pad is Pad.PAPER:
        segments = list(_pad_as_paper(segments, layout))
    placed, at = [], 0
    for segment in segments:
        start = at if segment.position is None else segment.position
        if start < at:
            raise ConfigError(
                f"positions overlap: a segment of {len(segment.tokens)} tokens is at position "
                f"{start}, the one before it ends before {at}",
                hint="give positions in the prompt's order, each after the segment before it",
            )
        placed.append(PlacedSegment(segment, start))
        at = placed[-1].end
    return placed


def leading_text(placed: Sequence[PlacedSegment]) -> tuple[int, ...]:
    """The tokens before the first chunk, pads included."""
    texts = takewhile(lambda found: not found.segment.chunk, placed)
    return tuple(token for found in texts for token in found.segment.tokens)


def plain_tokens(placed: Sequence[PlacedSegment]) -> int:
    """How many of the user's tokens the prompt starts with, all at the positions 0, 1, 2, ...

    Their KV is that of the same prompt without a plan.
    """
    count = 0
    for segment, start in placed:
        if segment.chunk or segment.lead or start != count:
            break
        count += len(segment.own)
        if segment.trail:
            break
    return count


def foreign_tokens(placed: Sequence[PlacedSegment]) -> tuple[int, ...]:
    """Ids of added tokens that none of the user's has; hidden pads repeat one of the user's."""
    added = {token for segment, _ in placed if not segment.plain for token in segment.added}
    for segment, _ in placed:
        added = added and added.difference(segment.own)
    return tuple(sorted(added))


def _pad_as_paper(segments: Sequence[Segment], layout: LayoutConfig) -> Iterator[Segment]:
    for index, segment in enumerate(segments):
        if segment.position is not None:
            raise ConfigError("visible pads move positions", hint="use pad=masked")
        pads = (layout.pad_token,) * (-len(segment.tokens) % layout.block_size)
        if segment.chunk:
            yield segment.framed(lead=pads)
        elif index + 1 < len(segments):
            yield segment.framed(trail=pads)
        else:
            yield segment

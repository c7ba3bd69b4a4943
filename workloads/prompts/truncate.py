"""Truncate a prompt by LongBench's rule, which drops the middle."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from picbench.workloads.prompts.tokens import Encoder
from picbench.workloads.sample import SampleSegment


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens of a chat template before and after a prompt."""

    before: int = 0
    after: int = 0

    @property
    def size(self) -> int:
        """Tokens on both sides."""
        return self.before + self.after


def truncate(
    segments: Sequence[SampleSegment], budget: int, encoder: Encoder, frame: Frame | None = None
) -> tuple[SampleSegment, ...]:
    """Keep the first and last half of a budget of tokens (LongBench, pred.py).

    As in LongBench, the chat template wraps the truncated prompt: `frame` is kept whole, and the
    halves are of the budget without it. A segment in the middle is shortened and stays
    one; a segment of which nothing is left is dropped. A prompt within the budget is unchanged.
    """
    total = sum(len(segment.tokens) for segment in segments)
    if total <= budget:
        return tuple(segments)
    frame = frame or Frame()
    half = (budget - frame.size) // 2
    first, last = frame.before + half, total - half - frame.after
    kept: list[SampleSegment] = []
    start = 0
    for segment in segments:
        length = len(segment.tokens)
        head = min(length, max(0, first - start))
        tail = max(head, min(length, last - start))
        start += length
        kept.append(_without(segment, head, tail, encoder))
    return tuple(segment for segment in kept if segment.tokens)


def _without(segment: SampleSegment, start: int, end: int, encoder: Encoder) -> SampleSegment:
    """Return `segment` without its tokens from `start` to `end`."""
    if start == end:
        return segment
    head, tail = segment.tokens[:start], segment.tokens[end:]
    text = "".join(encoder.decode(ids) for ids in (head, tail) if ids)
    return replace(segment, text=text, tokens=head + tail)

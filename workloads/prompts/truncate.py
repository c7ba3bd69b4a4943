"""Make a prompt fit: LongBench's rule, which leaves out the middle."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.sample import SampleSegment


@dataclass(frozen=True, slots=True)
class Frame:
    """How many tokens of a chat template stand before a prompt and behind it."""

    before: int = 0
    behind: int = 0

    @property
    def size(self) -> int:
        """Tokens on both sides."""
        return self.before + self.behind


def truncate(
    parts: Sequence[SampleSegment], budget: int, tokenizer: Tokenizer, frame: Frame | None = None
) -> tuple[SampleSegment, ...]:
    """Keep the first and the last half of the tokens that the budget has (LongBench, pred.py).

    A chat template is put around what was kept, as in LongBench: `frame` is kept whole, and the
    halves are of what the budget has beyond it. A part in the middle is shortened and stays one
    part; a part of which nothing is left goes. A prompt within the budget comes back as it is.
    """
    total = sum(len(part.tokens) for part in parts)
    if total <= budget:
        return tuple(parts)
    frame = frame or Frame()
    half = (budget - frame.size) // 2
    first, last = frame.before + half, total - half - frame.behind
    kept: list[SampleSegment] = []
    start = 0
    for part in parts:
        length = len(part.tokens)
        head = min(length, max(0, first - start))
        tail = max(head, min(length, last - start))
        start += length
        kept.append(_without(part, head, tail, tokenizer))
    return tuple(part for part in kept if part.tokens)


def _without(part: SampleSegment, start: int, end: int, tokenizer: Tokenizer) -> SampleSegment:
    """Return `part` without its tokens from `start` to `end`."""
    if start == end:
        return part
    head, tail = part.tokens[:start], part.tokens[end:]
    text = "".join(str(tokenizer.decode(list(ids))) for ids in (head, tail) if ids)
    return replace(part, text=text, tokens=head + tail)

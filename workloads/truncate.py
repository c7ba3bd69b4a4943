"""Make a prompt fit: LongBench's rule, which leaves out the middle."""

from collections.abc import Sequence
from dataclasses import replace

from picbench.workloads.sample import Part
from picbench.workloads.tokens import Tokenizer


def truncate(parts: Sequence[Part], budget: int, tokenizer: Tokenizer) -> tuple[Part, ...]:
    """Keep the first and the last ``budget // 2`` tokens of the prompt (LongBench, pred.py).

    A part in the middle is shortened and stays one part; a part of which nothing is left goes.
    A prompt within the budget comes back as it is.
    """
    total = sum(len(part.tokens) for part in parts)
    if total <= budget:
        return tuple(parts)
    half = budget // 2
    kept: list[Part] = []
    start = 0
    for part in parts:
        length = len(part.tokens)
        head = min(length, max(0, half - start))
        tail = max(head, min(length, total - half - start))
        start += length
        kept.append(_without(part, head, tail, tokenizer))
    return tuple(part for part in kept if part.tokens)


def _without(part: Part, start: int, end: int, tokenizer: Tokenizer) -> Part:
    """Return `part` without its tokens from `start` to `end`."""
    if start == end:
        return part
    head, tail = part.tokens[:start], part.tokens[end:]
    text = "".join(str(tokenizer.decode(list(ids))) for ids in (head, tail) if ids)
    return replace(part, text=text, tokens=head + tail)

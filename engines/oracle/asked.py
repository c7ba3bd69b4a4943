"""Links of what a question attends to, for the oracle.

With nothing linked, the attention of the prompt's rows after the last chunk is summed over them,
all heads and all layers. Blocks of chunks follow one another by the mean of what their tokens have
of it, and as many tokens as the rule says are linked, block after block.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from picbench.engines.oracle.expand import ExpandedRow, GivenSegment, expand
from picbench.engines.oracle.rule import BLOCK, Rule, full, naive


@dataclass(frozen=True, slots=True)
class Asked:
    """As many tokens as the first `blocks` of every chunk have, by the question's attention.

    `compiled` says how chunks are compiled. `picked`, in positions of the prompt, are the tokens
    that an engine picked; None picks them here.
    """

    blocks: int = 1
    compiled: Rule = field(default_factory=naive)
    picked: Collection[int] | None = None

    def replay(self, picked: Collection[int]) -> Self:
        """The same with the tokens that an engine picked."""
        return replace(self, picked=picked)

    def rows(self, segments: Sequence[GivenSegment]) -> list[ExpandedRow]:
        """The rows of a request in which nothing is linked."""
        return expand(segments, (), self.compiled)

    def pick(
        self, segments: Sequence[GivenSegment], attentions: Sequence[torch.Tensor]
    ) -> set[int]:
        """The tokens to link, as positions of the prompt.

        `attentions` [1, heads, rows, rows] are those of each layer over `rows`.
        """
        rows = self.rows(segments)
        every = expand(segments, (), replace(self.compiled, links=full().links))
        first = min(row.position for row in every if row.compiled is None)
        seen = [i for i, row in enumerate(rows) if row.compiled is not None and row.reused]
        last = max(rows[i].position for i in seen)
        asking = [i for i, r in enumerate(rows) if r.compiled is None and r.position > last]
        total = torch.stack([layer[0][:, asking] for layer in attentions]).sum((0, 1, 2))
        blocks: dict[tuple[int, int], list[int]] = {}
        spans = chunk_spans(segments)
        for i in seen:
            chunk, position = rows[i].compiled, rows[i].position - first
            assert chunk is not None
            blocks.setdefault((chunk, (position - spans[chunk][0]) // BLOCK), []).append(i)
        ranked = sorted(blocks.values(), key=lambda block: -float(total[block].mean()))
        count = sum(min(self.blocks * BLOCK, length) for _, length in spans)
        return {rows[i].position - first for i in [i for block in ranked for i in block][:count]}

    def rule(self, segments: Sequence[GivenSegment], picked: Collection[int]) -> Rule:
        """The rule that links the tokens `picked`."""
        starts = [start for start, _ in chunk_spans(segments)]
        links = [{p - start for p in picked} for start in starts]
        return replace(
            self.compiled,
            links=lambda index, length: {i for i in links[index] if 0 <= i < length},
        )


def chunk_spans(segments: Sequence[GivenSegment]) -> list[tuple[int, int]]:
    """Where each chunk begins in its prompt, and its length."""
    spans, start = [], 0
    for segment in segments:
        kind, length = segment[0], len(segment[1])
        if kind == "chunk" and length:
            spans.append((start, length))
        start += length
    return spans

"""CacheBlend for the oracle: what is picked, and which layers see what.

In the first two layers the request sees its own rows only, one for each token, so that it is
computed in full. The keys or values of the second layer are compared with those of the chunks'
compilations. In later layers the request sees the rows of the tokens that were picked, and those of
the compilations for the others.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch

from picbench.engines.oracle.rule import BLOCK, ExpandedRow, GivenSegment, Rule, expand, full, naive

#: Layers that are computed in full: the first, and the one in which KV is compared.
FULL_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Blend:
    """CacheBlend: a `share` of all chunk tokens, rounded down, by the `deviation` of K or V.

    Chunks are `compiled` by a rule; `picked` are positions that an engine picked, None: picked
    here.
    """

    share: float
    deviation: Literal["k", "v"] = "v"
    compiled: Rule = field(default_factory=naive)
    picked: Collection[int] | None = None

    def anchored(self, text: Sequence[int] = ()) -> Self:
        """See `Rule.anchored`."""
        return replace(self, compiled=self.compiled.anchored(text))


@dataclass(frozen=True, slots=True)
class BlendedRows:
    """The rows of compilations, then one of the request for each token and the continuation.

    Row `compiled[i]` and row `fresh[i]` are the same token, which may be picked; so many are, the
    `count` with the largest deviation. `start` is the position of the prompt's first token.
    """

    rows: tuple[ExpandedRow, ...]
    compiled: tuple[int, ...]
    fresh: tuple[int, ...]
    count: int
    start: int

    @classmethod
    def of(
        cls, segments: Sequence[GivenSegment], continuation: Sequence[int], blend: Blend
    ) -> Self:
        """The rows of a request."""
        every = replace(blend.compiled, links=full().links)
        rows = expand(segments, continuation, every)
        reused = expand(segments, continuation, blend.compiled)
        compiled = [i for i, row in enumerate(reused) if row.compiled is not None and row.reused]
        own = {row.position: i for i, row in enumerate(rows) if row.compiled is None}
        tokens = sum(length for _, length in chunk_spans(segments))
        return cls(
            rows=tuple(rows),
            compiled=tuple(compiled),
            fresh=tuple(own[rows[i].position] for i in compiled),
            count=min(int(round(blend.share * tokens, 6)), len(compiled)),
            start=min(own),
        )

    def pick(self, kv: torch.Tensor) -> set[int]:
        """The tokens with the largest deviation, as positions of the prompt.

        `kv` [heads, rows, head_size] are keys or values of all rows at the layer that is compared.
        """
        difference = kv[:, list(self.fresh)] - kv[:, list(self.compiled)]
        deviation = difference.pow(2).sum(dim=(0, 2))
        picked = deviation.topk(self.count).indices.tolist()
        return {self.rows[self.fresh[i]].position - self.start for i in picked}

    def later(self, picked: Collection[int]) -> list[ExpandedRow]:
        """The rows as later layers see them: only the `picked` ones of the request are seen."""
        rows = list(self.rows)
        for compiled, fresh in zip(self.compiled, self.fresh, strict=True):
            if rows[fresh].position - self.start not in picked:
                rows[compiled] = replace(rows[compiled], reused=True)
                rows[fresh] = replace(rows[fresh], reused=False)
        return rows


@dataclass(frozen=True, slots=True)
class Asked:
    """As many tokens as the first `blocks` of every chunk have, by the question's attention.

    They are of whole blocks; with a `share` they are that part of all chunk tokens, each by its own
    attention. Chunks are `compiled` by a rule; `picked` are positions that an engine picked, None:
    picked here.
    """

    blocks: int = 1
    compiled: Rule = field(default_factory=naive)
    picked: Collection[int] | None = None
    share: float | None = None

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
        spans = chunk_spans(segments)
        if self.share is not None:
            count = int(round(self.share * sum(length for _, length in spans), 6))
            order = total[seen].argsort(descending=True, stable=True)[:count]
            return {rows[seen[i]].position - first for i in order.tolist()}
        blocks: dict[tuple[int, int], list[int]] = {}
        for i in seen:
            chunk, position = rows[i].compiled, rows[i].position - first
            assert chunk is not None
            blocks.setdefault((chunk, (position - spans[chunk][0]) // BLOCK), []).append(i)
        # What a compilation computed first is its attention sink, whatever the question is.
        sinks = {next(i for i, r in enumerate(rows) if r.compiled == c) for c, _ in blocks}

        def mean(block: list[int]) -> float:
            counted = [i for i in block if i not in sinks]
            return float(total[counted].mean()) if counted else 0.0

        ranked = sorted(blocks.values(), key=mean, reverse=True)
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

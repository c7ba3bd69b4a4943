"""Keys of blocks as runs: consecutive full blocks that are always cached and found together.

Where the tokens of a trace are known, a run is one block, whose key covers all tokens before its
end, as vLLM's. Where only contents and lengths are known, a run is all blocks that end in one
segment: two prompts have them in common if they have the segment and all before it in common, and
none of them otherwise. The last block of a segment that ends with it is a run of its own, because
vLLM does not look for the last block of a prompt.

Keys are hashes of 64 bits. Two different ones are equal once in 10^5 traces of 10^7 blocks.
"""

from collections.abc import Iterable
from typing import NamedTuple

from picbench.engines.config import BLOCK_SIZE
from picbench.profile.traces.traced_request import TraceSegment

#: Bytes of a token in `TraceSegment.tokens`.
TOKEN_BYTES = 8

_BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES


class ComputedSlice(NamedTuple):
    """Tokens from `first` up to `end` of a segment, which a request computes.

    `event` tells apart what stands between them and the computed tokens before them: the chunk
    that they belong to, or chunks of which nothing is computed. 0 is nothing.
    """

    segment: TraceSegment
    first: int
    end: int
    event: int = 0


class BlockRun(NamedTuple):
    """`blocks` consecutive full blocks; `forever` says that they can be found again."""

    key: int
    blocks: int
    forever: bool


class BlockKeys:
    """Makes runs of computed tokens; `exact` by token, else by content."""

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact
        self._unique = 0

    def runs(self, slices: Iterable[ComputedSlice]) -> list[BlockRun]:
        """The full blocks of computed tokens that stand one after another."""
        return self._by_token(slices) if self.exact else self._by_content(slices)

    def unique(self) -> int:
        """A key that no other block has."""
        self._unique += 1
        return hash(("unique", self._unique))

    def _by_content(self, slices: Iterable[ComputedSlice]) -> list[BlockRun]:
        found: list[BlockRun] = []
        key, filled, again = 0, 0, True
        for segment, first, end, event in slices:
            if end == first:
                continue
            content = segment.content
            if content is None:
                again = False
                key = self.unique()
            else:
                key = hash((key, content, first, end, event))
            filled += end - first
            blocks, filled = divmod(filled, BLOCK_SIZE)
            if blocks and not filled:
                blocks -= 1
                if blocks:
                    found.append(BlockRun(key, blocks, again))
                found.append(BlockRun(hash((key, "last")), 1, again))
            elif blocks:
                found.append(BlockRun(key, blocks, again))
        return found

    def _by_token(self, slices: Iterable[ComputedSlice]) -> list[BlockRun]:
        found: list[BlockRun] = []
        key, rest, events = 0, b"", tuple[int, ...]()
        for segment, first, end, event in slices:
            if end == first:
                continue
            if event:
                events += (event,)
            data = rest + known_tokens(segment)[first * TOKEN_BYTES : end * TOKEN_BYTES]
            whole = len(data) - len(data) % _BLOCK_BYTES
            for begin in range(0, whole, _BLOCK_BYTES):
                key = hash((key, data[begin : begin + _BLOCK_BYTES], events))
                events = ()
                found.append(BlockRun(key, 1, True))
            rest = data[whole:]
        return found


def known_tokens(segment: TraceSegment) -> bytes:
    """The tokens of a segment of an exact trace."""
    assert segment.tokens is not None
    return segment.tokens

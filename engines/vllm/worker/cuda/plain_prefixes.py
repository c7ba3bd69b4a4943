"""Requests without a plan that begin alike, such as with one system prompt. Host side.

vLLM maps their common prefix to the same blocks, and its attention reads these once for each of
them. If enough of what they read is shared, they decode as planned requests instead, whose kernels
read it once for all.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from picbench.engines.config import BLOCK_SIZE

#: The least share of all plain requests' blocks that sharing has to save. Kernels of planned
#: requests read what is not shared at 0.97 to 1.0 of FlashAttention-3's speed, and a step in which
#: nothing was shared took 3 % longer with them (results/gpu/kernels.md, decode-sharing.md).
LEAST_SAVED = 0.1


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """A request of `prompt` slots, the first of which are in `blocks`, all of them full."""

    prompt: int
    max_tokens: int
    blocks: tuple[int, ...]


class PlainPrefixes:
    """The running requests without a plan, and how many begin with which blocks.

    Prefixes are compared by cells of `cell_blocks` blocks, as their kernels read them: two requests
    share the cells up to the first one that differs. Adding and removing a request takes time in
    proportion to its own cells.
    """

    def __init__(self, cell_blocks: int) -> None:
        self._cell_blocks = cell_blocks
        self._requests: dict[str, PlainRequest] = {}
        # Blocks belong to one prefix, so a cell's blocks stand for all that precede it.
        self._readers: Counter[tuple[int, ...]] = Counter()
        self._total = 0
        self._saved = 0
        self._waiting: set[str] = set()

    @property
    def waiting(self) -> frozenset[str]:
        """Those that share a cell and were not taken yet; none unless it pays."""
        if self._saved < LEAST_SAVED * self._total or not self._waiting:
            return frozenset()
        return frozenset(name for name in self._waiting if self._shares(name))

    def add(self, request_id: str, prompt: int, max_tokens: int, blocks: Sequence[int]) -> None:
        """A new or resumed request; `blocks` are the first of its blocks."""
        self.remove(request_id)
        whole = tuple(blocks[: prompt // BLOCK_SIZE])
        request = self._requests[request_id] = PlainRequest(prompt, max_tokens, whole)
        self._total += -(-prompt // BLOCK_SIZE)
        for cell in self._cells(request):
            self._saved += len(cell) * (self._readers[cell] > 0)
            self._readers[cell] += 1
        if len(whole) >= self._cell_blocks:
            self._waiting.add(request_id)

    def remove(self, request_id: str) -> None:
        """A request has ended; unknown ones are ignored."""
        request = self._requests.pop(request_id, None)
        self._waiting.discard(request_id)
        if request is None:
            return
        self._total -= -(-request.prompt // BLOCK_SIZE)
        for cell in self._cells(request):
            self._readers[cell] -= 1
            if self._readers[cell]:
                self._saved -= len(cell)
            else:
                del self._readers[cell]

    def take(self, request_id: str, computed: int) -> PlainRequest | None:
        """A waiting request, which decodes as a planned one from now on; None in its prompt."""
        request = self._requests[request_id]
        if computed < request.prompt:
            return None
        self._waiting.remove(request_id)
        return request

    def _shares(self, request_id: str) -> bool:
        return self._readers[self._requests[request_id].blocks[: self._cell_blocks]] > 1

    def _cells(self, request: PlainRequest) -> list[tuple[int, ...]]:
        size, blocks = self._cell_blocks, request.blocks
        return [blocks[i : i + size] for i in range(0, len(blocks) - size + 1, size)]

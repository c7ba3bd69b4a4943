"""Prompt tokens that were seen before, and that prefix caching computes all the same, by cause."""

from picbench.engines.algorithms import parse
from picbench.engines.config import BLOCK_SIZE
from picbench.profile.reuse import ArmSimulation
from picbench.workloads.traffic.trace import TracedRequest

#: Why a prompt stops being like an earlier one.
DOCUMENTS, HISTORY, TOOLS = "reordered documents", "edited history", "changed tools or instructions"
REPEATED = "repeated in a conversation"

#: Tokens of text that recurs by name; shorter ones are separators.
_LEAST = 2 * BLOCK_SIZE


class Headroom:
    """Counts tokens that position-independent caching could reuse and prefix caching does not.

    `moved` are tokens of contents that an earlier prompt had at another place, by what precedes
    them that differs. `expired` are tokens that prefix caching would find again if a pool of
    `blocks` evicted nothing: what a tier below the pool would save.
    """

    def __init__(self, *, exact: bool, blocks: int | None = None) -> None:
        prefix = parse("prefix")
        self._unbounded = ArmSimulation(prefix, exact=exact)
        self._limited = ArmSimulation(prefix, exact=exact, blocks=blocks) if blocks else None
        self._seen: set[int | None] = set()
        self._prompts: set[int] = set()
        self.moved = dict.fromkeys((DOCUMENTS, HISTORY, TOOLS, REPEATED), 0)
        self.expired = self.found = 0

    def serve(self, request: TracedRequest) -> None:
        """Count the next request."""
        served = self._unbounded.serve(request)
        reused = served.reused if served else 0
        limited = self._limited.serve(request) if self._limited else served
        self.found += reused
        self.expired += max(0, reused - limited.reused) if limited else 0
        chat = any(segment.role in ("assistant", "tool") for segment in request.segments)
        cause, end, path, goes_on = "", 0, 0, False
        for segment in request.segments:
            start, end = end, end + segment.length
            path = hash((path, segment.content))
            goes_on |= path in self._prompts
            if end <= reused + BLOCK_SIZE:  # A block that is not full is not shared.
                continue
            if not cause:
                changed = segment.role in ("tools", "system")
                edited = REPEATED if goes_on else HISTORY
                cause = TOOLS if changed else edited if chat else DOCUMENTS
            if segment.content in self._seen and (segment.chunk or segment.length >= _LEAST):
                self.moved[cause] += end - max(start, reused)
        self._prompts.add(path)
        self._seen |= {s.content for s in request.segments if s.content is not None}

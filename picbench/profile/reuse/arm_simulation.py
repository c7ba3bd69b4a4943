"""An arm of a profile: requests in, what it reuses of them."""

from collections.abc import Sequence

from picbench.engines.algorithms import Algorithm, Reuse
from picbench.profile.reuse.block_runs import BlockKeys, BlockRun, ComputedSlice
from picbench.profile.reuse.chunk_plan import ChunkPlanner
from picbench.profile.reuse.reuse_counts import RequestReuse, ReuseTotals
from picbench.profile.reuse.simulated_engine import SimulatedEngine
from picbench.profile.reuse.unbounded_cache import UnboundedCache
from picbench.profile.traces.traced_request import TracedRequest, TraceSegment
from picbench.run.chunk_order import ContextIndex


class ArmSimulation:
    """Counts what an algorithm reuses, in a pool of `blocks` usable blocks; None never evicts.

    `exact` as in `BlockKeys`. Raises ConfigError for an algorithm that cannot be counted.
    """

    def __init__(self, algorithm: Algorithm, *, exact: bool, blocks: int | None = None) -> None:
        self.totals = ReuseTotals()
        self._keys = BlockKeys(exact=exact)
        self._order = ContextIndex() if algorithm.reorders else None
        self._reuse = algorithm.reuse
        chunks = algorithm.reuse is Reuse.CHUNKS
        self._planner = ChunkPlanner(algorithm, self._keys) if chunks else None
        self._cache: UnboundedCache | SimulatedEngine = (
            UnboundedCache() if blocks is None else SimulatedEngine(blocks, self._keys)
        )

    def serve(self, request: TracedRequest) -> RequestReuse | None:
        """Serve the next request; None if it can never fit the pool."""
        found = self._serve(request)
        self.totals.add(found)
        return found

    def close(self) -> ReuseTotals:
        """The sums, with what the pool holds at the end."""
        cache = self._cache
        if isinstance(cache, UnboundedCache):
            self.totals.cached_blocks = cache.blocks
        else:
            self.totals.cached_blocks = cache.pool.keyed
            self.totals.evicted_blocks = cache.pool.evictions
        return self.totals

    def _serve(self, request: TracedRequest) -> RequestReuse | None:
        segments: Sequence[TraceSegment] = request.segments
        prompt = request.prompt_tokens
        if self._reuse is Reuse.NOTHING:
            own = -(-(prompt + request.output - 1) // 16)
            if isinstance(self._cache, SimulatedEngine) and own > self._cache.pool.usable:
                return None
            return RequestReuse(prompt, 0, own_blocks=own)
        if self._order is not None:
            order = self._order.arrange([(s.chunk, _name(s), s.length) for s in segments])
            segments = [segments[place] for place in order]
            prompt = sum(segment.length for segment in segments)
        if self._planner is None or not any(segment.chunk for segment in segments):
            return self._cache.serve_plain(self._plain(segments, request), prompt, request.output)
        plan = self._planner.plan(segments, request.reply)
        return self._cache.serve_planned(plan, prompt, request.output)

    def _plain(self, segments: Sequence[TraceSegment], request: TracedRequest) -> list[BlockRun]:
        parts = segments if request.reply is None else (*segments, request.reply)
        return self._keys.runs([ComputedSlice(s, 0, s.length) for s in parts])


def _name(segment: TraceSegment) -> object:
    return segment.content if segment.content is not None else object()

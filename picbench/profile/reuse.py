"""What an arm reuses of a trace, request by request: a pool that evicts, or a cache without end."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile

from picbench.engines.algorithms import Algorithm, Reuse
from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.plan import Canonical
from picbench.errors import ConfigError
from picbench.profile.blocks import (
    BlockKeys,
    BlockRun,
    ChunkPlan,
    ChunkUse,
    EnginePlanner,
    HeldRun,
    PoolTooSmallError,
    SimulatedPool,
    blocks_of,
)
from picbench.workloads.prompts.chunk_order import ContextIndex
from picbench.workloads.traffic.trace import TracedRequest, TraceSegment


@dataclass(frozen=True, slots=True)
class RequestReuse:
    """Prompt tokens of one request by origin, without telling whose compile they are from.

    `reused` ones are those that `TokenCounts` calls reused or compiled, `compiled` its compile
    work. `chunk_blocks` are shared blocks of chunks, `prefix_blocks` those found of the rest,
    `copied_blocks` private copies. `shared` are the keys of the blocks that other requests hold or
    may find while it runs, with their numbers, `own_blocks` all others. `compile_blocks` are those
    of compiled chunks that it does not map itself.
    """

    prompt: int
    reused: int
    compiled: int = 0
    chunk_blocks: int = 0
    prefix_blocks: int = 0
    copied_blocks: int = 0
    own_blocks: int = 0
    shared: tuple[tuple[int | bytes, int], ...] = ()
    compile_blocks: int = 0

    @property
    def computed(self) -> int:
        """Tokens that are computed before the request can be answered."""
        return self.prompt - self.reused + self.compiled


@dataclass(slots=True)
class ReuseTotals:
    """Sums over the requests of a trace; `refused` ones need more blocks than the pool has.

    `cached_blocks` are those that the pool holds at the end: all that was ever cached, if it is
    unbounded. `evicted_blocks` lost their KV to others.
    """

    requests: int = 0
    refused: int = 0
    prompt: int = 0
    reused: int = 0
    compiled: int = 0
    chunk_blocks: int = 0
    prefix_blocks: int = 0
    copied_blocks: int = 0
    own_blocks: int = 0
    cached_blocks: int = 0
    evicted_blocks: int = 0

    def add(self, found: RequestReuse | None) -> None:
        """Count a request; None was refused."""
        if found is None:
            self.refused += 1
            return
        self.requests += 1
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(found, name))

    @property
    def computed(self) -> int:
        """Tokens that are computed for all prompts."""
        return self.prompt - self.reused + self.compiled

    @property
    def saved(self) -> float:
        """The share of prompt tokens that need not be computed; never negative in practice."""
        return 1 - self.computed / self.prompt if self.prompt else 0.0


_SUMMED = [one.name for one in fields(RequestReuse) if hasattr(ReuseTotals, one.name)]


class SimulatedEngine:
    """Serves requests one at a time, in a pool of `blocks` usable blocks."""

    def __init__(self, blocks: int, keys: BlockKeys) -> None:
        self.pool = SimulatedPool(blocks, self._on_evicted)
        self._keys = keys
        self._store = ChunkStore(self.pool, tiers=False, clock=lambda: 0.0)
        self._copied: set[bytes] = set()

    @property
    def blocks(self) -> int:
        """Blocks that hold KV, while no request runs."""
        return self.pool.keyed

    @property
    def evictions(self) -> int:
        """Blocks that lost their KV to others."""
        return self.pool.evictions

    def serve(self, plan: ChunkPlan, prompt: int, output: int) -> RequestReuse | None:
        """Serve a prompt; None for one that the pool can never hold.

        Raises PoolTooSmallError where chunks of which some blocks are left are compiled as a whole
        beside these, and the pool has no room for both.
        """
        mapped = plan.mapped
        room = mapped + blocks_of(plan.computed + output - 1)
        compiling = max((len(use.pages) - use.mapped for use in plan.uses), default=0)
        if room + compiling > self.pool.usable:
            return None
        reused = prompt - plan.computed
        if plan.private:
            compiled = self._copy(plan, room)
            return RequestReuse(prompt, reused, compiled, copied_blocks=mapped, own_blocks=room)
        compiled, hits = self._link(plan, output)
        reused += hits * BLOCK_SIZE
        own = room - mapped - hits
        return RequestReuse(prompt, reused, compiled, mapped, hits, own_blocks=own)

    def _copy(self, plan: ChunkPlan, room: int) -> int:
        """Serve a request with copies; the tokens that are compiled, each chunk once in all.

        Nothing can find its blocks afterwards.
        """
        new = {u.canonical.key: u for u in plan.uses if u.canonical.key not in self._copied}
        for blocks in (*(len(use.pages) for use in new.values()), room):
            self.pool.allocate(blocks)
            self.pool.free_empty(blocks)
        self._copied |= new.keys()
        return sum(use.tokens for use in new.values())

    def _link(self, plan: ChunkPlan, output: int) -> tuple[int, int]:
        """Compile what is missing, then serve; tokens compiled, and blocks that were found."""
        store, pool = self._store, self.pool
        chunks = list({(u.canonical.key, u.canonical.used): u for u in plan.uses}.values())
        missing = {u.canonical.key: u for u in chunks if not store.is_mappable(u.canonical)}
        waiting = [run for u in chunks for run in self._hold(u.canonical)] if missing else []
        jobs: list[tuple[ChunkUse, list[HeldRun]]] = []
        compiled = 0
        at_once = sum(len(use.pages) for use in chunks) + blocks_of(plan.computed)
        for use in missing.values():
            tokens, pages = self._compile(use)
            compiled += tokens
            if at_once <= pool.usable:
                jobs.append((use, pages))
            else:  # One step cannot hold all of them.
                self._complete(use, pages)
                waiting += self._hold(use.canonical)
        held = [run for use in plan.uses for run in self._hold(use.canonical)]
        mapped = sum(len(use.canonical.used) for use in plan.uses)
        assert len(held) == mapped, "a chunk was compiled, and is gone"
        hits = self._prefill(held, plan.runs, plan.computed)
        pool.release(waiting)
        store.touch(use.canonical for use in chunks)
        for use, pages in jobs:
            self._complete(use, pages)
        self._decode(held, plan.runs, plan.computed, output)
        return compiled, hits

    def _hold(self, canonical: Canonical) -> Iterator[HeldRun]:
        for key in canonical.keys:
            if (run := self.pool.hold(key)) is not None:
                yield run

    def _compile(self, use: ChunkUse) -> tuple[int, list[HeldRun]]:
        """Compile a chunk: tokens that are computed, and its blocks, all of them referenced."""
        self._store.prepare_compile(use.canonical, "compile")
        held: list[HeldRun] = []
        found = 0
        for key, tokens in use.pages[:-1]:
            run = self.pool.find(key)
            if run is None:
                break
            self.pool.touch(run)
            held.append(run)
            found += tokens
        rest = use.pages[len(held) :]
        self.pool.allocate(len(rest))
        held += [self.pool.fill(key, 1) for key, _ in rest]
        return use.tokens - found, held

    def _complete(self, use: ChunkUse, pages: list[HeldRun]) -> None:
        self._store.complete_compile(use.canonical, (), success=True, shared=True)
        self.pool.release(pages)

    def _prefill(self, held: list[HeldRun], runs: list[BlockRun], tokens: int) -> int:
        """Find and allocate the blocks of a prompt; the number that was found."""
        pool, most = self.pool, (tokens - 1) // BLOCK_SIZE
        hits = covered = place = 0
        partial: tuple[HeldRun, int] | None = None
        for key, blocks, _ in runs:
            run = pool.find(key)
            if run is None or covered + blocks > most:
                break
            pool.touch(run)
            held.append(run)
            hits, covered, place = hits + run.blocks, covered + blocks, place + 1
            if run.blocks < blocks:
                partial = run, blocks
                break
        pool.allocate(blocks_of(tokens) - hits)
        if partial is not None:  # Some of the allocated blocks are those that it had lost.
            partial[0].blocks = partial[1]
        full = tokens // BLOCK_SIZE - covered
        for key, blocks, _ in runs[place:]:
            if blocks > full:
                break
            full -= blocks
            held.append(pool.fill(key, blocks))
        return hits

    def _decode(self, held: list[HeldRun], runs: list[BlockRun], tokens: int, output: int) -> None:
        """Serve the reply, whose last token is not stored, and free all that the request holds."""
        pool, end = self.pool, tokens + output - 1
        for _ in range(blocks_of(end) - blocks_of(tokens)):
            pool.allocate(1)
        full, filled = tokens // BLOCK_SIZE, end // BLOCK_SIZE
        covered = 0
        for key, blocks, _ in runs:
            if full <= covered < filled:  # Of a known reply.
                held.append(pool.fill(key, min(blocks, filled - covered)))
                full = min(covered + blocks, filled)
            covered += blocks
        if filled > full:
            held.append(pool.fill(self._keys.unique(), filled - full))
        pool.free_empty(int(end % BLOCK_SIZE > 0))
        pool.release(held)

    def _on_evicted(self, key: Hashable) -> None:
        if isinstance(key, bytes):
            self._store.evict(key)


class UnboundedCache:
    """Remembers the keys of runs and chunks; those that can never recur are only counted.

    `blocks` is the number of blocks with KV, each counted once.
    """

    evictions = 0

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self._begun: dict[int, int] = {}
        self.blocks = 0

    def serve(self, plan: ChunkPlan, prompt: int, output: int) -> RequestReuse:
        """Serve a prompt."""
        compiled, unmapped = self._compile(plan)
        reused, mapped = prompt - plan.computed, plan.mapped
        slots = plan.computed + output - 1
        if plan.private:
            room = mapped + blocks_of(slots)
            return RequestReuse(prompt, reused, compiled, copied_blocks=mapped, own_blocks=room)
        found = self._found(plan.runs, (plan.computed - 1) // BLOCK_SIZE)
        hits = sum(blocks for _, blocks in found)
        computed = (*found, *self._store(plan.runs, slots))
        return RequestReuse(
            prompt,
            reused + hits * BLOCK_SIZE,
            compiled,
            mapped,
            hits,
            own_blocks=blocks_of(slots) - sum(blocks for _, blocks in computed),
            shared=(*plan.shared, *computed),
            compile_blocks=unmapped,
        )

    def _compile(self, plan: ChunkPlan) -> tuple[int, int]:
        """Compile the chunks that are not cached: tokens computed for that, blocks not mapped."""
        compiled = unmapped = 0
        for use in plan.uses:
            if all(key in self._known for key in use.canonical.keys):
                continue
            # A compile finds leading pages, but never the last one.
            cached = takewhile(lambda page: page[0] in self._known, use.pages[:-1])
            compiled += use.tokens - sum(tokens for _, tokens in cached)
            unmapped += len(use.pages) - use.mapped
            keys = {key for key, _ in use.pages} - self._known
            self.blocks += len(keys)
            self._known |= keys
        return compiled, unmapped

    def _found(self, runs: list[BlockRun], most: int) -> list[tuple[int, int]]:
        """The runs that are cached, and how many blocks of each, `most` blocks in all."""
        found: list[tuple[int, int]] = []
        for key, blocks, _ in runs:
            if key not in self._known or blocks > most:
                begun = min(self._begun.get(key, 0), most)
                return [*found, (key, begun)] if begun else found
            most -= blocks
            found.append((key, blocks))
        return found

    def _store(self, runs: list[BlockRun], slots: int) -> list[tuple[int, int]]:
        """Remember what is cached of `slots` tokens; unknown replies are counted as well.

        Returns the runs that were not cached before and can be found, with their blocks.
        """
        known, stored = self._known, []
        room = slots // BLOCK_SIZE
        for key, blocks, forever in runs:
            if blocks > room:  # Of a known reply, whose last token is not stored.
                self._begun[key] = max(room, self._begun.get(key, 0))
                break
            room -= blocks
            if key not in known:
                self.blocks += blocks
                if forever:
                    known.add(key)
                    stored.append((key, blocks))
        self.blocks += room
        return stored


class ArmSimulation:
    """Counts what an algorithm reuses, in a pool of `blocks` usable blocks; None never evicts.

    `exact` as in `BlockKeys`.
    """

    def __init__(self, algorithm: Algorithm, *, exact: bool, blocks: int | None = None) -> None:
        self.totals, self._algorithm = ReuseTotals(), algorithm
        self._keys = BlockKeys(exact=exact)
        self._order = ContextIndex() if algorithm.reorders else None
        chunks = algorithm.reuse is Reuse.CHUNKS
        self._planner = EnginePlanner(algorithm, self._keys) if chunks else None
        self._cache: UnboundedCache | SimulatedEngine = (
            UnboundedCache() if blocks is None else SimulatedEngine(blocks, self._keys)
        )

    def serve(self, request: TracedRequest) -> RequestReuse | None:
        """Serve the next request; None if it can never fit the pool.

        Raises ConfigError for a pool that has no room for the chunks that it needs at once.
        """
        prompt, output = request.prompt_tokens, request.output
        try:
            found = self._cache.serve(self._plan(request), prompt, output)
        except PoolTooSmallError as error:
            raise ConfigError(
                f"`pool` is too small to compile the chunks of {request.source or 'a request'} "
                f"under {self._algorithm.spec}",
                hint="raise it, or leave that algorithm out",
            ) from error
        self.totals.add(found)
        return found

    def close(self) -> ReuseTotals:
        """The sums, with what the pool holds at the end."""
        self.totals.cached_blocks = self._cache.blocks
        self.totals.evicted_blocks = self._cache.evictions
        return self.totals

    def _plan(self, request: TracedRequest) -> ChunkPlan:
        if self._algorithm.reuse is Reuse.NOTHING:
            return ChunkPlan((), [], request.prompt_tokens, private=True)
        segments: Sequence[TraceSegment] = request.segments
        if self._order is not None:
            # An unknown content equals no other.
            contents = (object() if s.content is None else s.content for s in segments)
            items = zip(segments, contents, strict=True)
            order = self._order.arrange([(s.chunk, content, s.length) for s, content in items])
            segments = [segments[place] for place in order]
        # Without tokens, prompts without chunks are counted by content, which is much faster.
        if self._planner and (self._keys.exact or any(segment.chunk for segment in segments)):
            return self._planner.plan(segments, request.reply)
        parts = segments if request.reply is None else (*segments, request.reply)
        return ChunkPlan((), self._keys.runs(parts), request.prompt_tokens, private=False)

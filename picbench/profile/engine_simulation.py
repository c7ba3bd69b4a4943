"""What a request with chunks shares and computes under an algorithm, run by run.

The same decisions as `picbench.engines.planning.layout.lay_out`, without slots: which pages of each
chunk are mapped, and which runs its computed tokens make. A chunk is a `Canonical` whose pages are
runs, so that the project's own chunk store can keep it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from picbench.engines.algorithms import Algorithm, Reuse
from picbench.engines.algorithms.base import ChunkAlgorithm
from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.packing import AnchorText
from picbench.engines.planning.pages import Page
from picbench.engines.planning.plan import Canonical
from picbench.engines.planning.policy import Anchor, Pad
from picbench.errors import ConfigError
from picbench.profile.pool_simulation import (
    TOKEN_BYTES,
    BlockKeys,
    BlockRun,
    ComputedSlice,
    HeldRun,
    RequestReuse,
    ReuseTotals,
    SimulatedPool,
    known_tokens,
)
from picbench.profile.traces import TracedRequest, TraceSegment
from picbench.run.schedule import ContextIndex

#: Plans of chunks that are kept; beyond them they are made again.
_KEPT = 100_000

_BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """A chunk in a prompt: what is mapped of it, and how large its pages are.

    `blocks` are those of each page of `canonical`, whose pages are runs.
    """

    canonical: Canonical
    blocks: tuple[int, ...]
    tokens: int

    @property
    def mapped(self) -> int:
        """Blocks that the request maps or copies."""
        return sum(self.blocks[index] for index in self.canonical.used)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A request as it is served: the chunks it uses, in order, and what it computes.

    `computed` counts tokens, `runs` are their full blocks. `private` requests copy their chunks.
    """

    uses: tuple[ChunkUse, ...]
    runs: list[BlockRun]
    computed: int
    private: bool

    @property
    def shared(self) -> tuple[tuple[bytes, int], ...]:
        """The pages that are mapped, with their blocks."""
        return tuple(
            (use.canonical.pages[index].name, use.blocks[index])
            for use in self.uses
            for index in use.canonical.used
        )


class ChunkPlanner:
    """Plans requests under one algorithm: mepic, naive or epic, as `check_countable` says."""

    def __init__(self, algorithm: Algorithm, keys: BlockKeys) -> None:
        check_countable(algorithm)
        self._algorithm = algorithm
        self._keys = keys
        self._private = bool(getattr(algorithm, "private", False))
        self._uses: dict[tuple[object, int, bool], ChunkUse] = {}

    def plan(
        self, segments: Sequence[TraceSegment], reply: TraceSegment | None = None
    ) -> ChunkPlan:
        """Plan a prompt; a known `reply` continues its runs."""
        uses: list[ChunkUse] = []
        slices: list[ComputedSlice] = []
        index = start = event = computed = 0
        for place, segment in enumerate(segments):
            if not segment.chunk:
                slices.append(ComputedSlice(segment, 0, segment.length, event))
                computed, event = computed + segment.length, 0
                start += segment.length
                continue
            linked = len(self._algorithm.plan_chunk(index, segment.length).linked)
            ends = place == len(segments) - 1 and linked < segment.length
            use = self._use(segment, linked, ends=ends)
            event = hash((event, start, use.canonical.key, linked, ends))
            if linked:
                slices.append(ComputedSlice(segment, 0, linked, event))
            if ends:  # The prompt's last token is always computed.
                last = 0 if linked else event
                slices.append(ComputedSlice(segment, segment.length - 1, segment.length, last))
            computed += linked + ends
            event = event if not (linked or ends) else 0
            if use.canonical.used:
                uses.append(use)
            index, start = index + 1, start + segment.length
        if reply is not None:
            slices.append(ComputedSlice(reply, 0, reply.length, event))
        private = self._private and bool(uses)
        return ChunkPlan(tuple(uses), self._keys.runs(slices), computed, private)

    def _use(self, segment: TraceSegment, linked: int, *, ends: bool) -> ChunkUse:
        identity = segment.content if segment.content is not None else self._keys.unique()
        name = identity, linked, ends
        found = self._uses.get(name)
        if found is None:
            if len(self._uses) >= _KEPT:
                self._uses.clear()
            found = self._make(segment, identity, linked, ends=ends)
            if segment.content is not None:
                self._uses[name] = found
        return found

    def _make(
        self, segment: TraceSegment, identity: object, linked: int, *, ends: bool
    ) -> ChunkUse:
        cut = len(self._algorithm.plan_chunk(1, segment.length).linked) // BLOCK_SIZE
        total = -(-segment.length // BLOCK_SIZE)
        if self._keys.exact:
            blocks: tuple[int, ...] = (1,) * total
            names = list(_page_names(known_tokens(segment)))
        else:
            # A last page of one token is not mapped where the prompt ends with it.
            last = int(segment.length % BLOCK_SIZE == 1 and total > cut)
            blocks = tuple(n for n in (cut, total - cut - last, last) if n)
            names = [_digest(repr((identity, number)).encode()) for number in range(len(blocks))]
        hidden = linked + ends
        used = tuple(_used(blocks, segment.length, linked, hidden))
        pages = tuple(Page((), (), (), name, canonical=True) for name in names)
        anchor = AnchorText((), BLOCK_SIZE, "")
        return ChunkUse(Canonical.of(anchor, pages, used), blocks, segment.length)


def _used(blocks: Sequence[int], length: int, linked: int, hidden: int) -> list[int]:
    """Indices of the pages, which are runs of blocks, that hold a token which is not linked."""
    found, begin = [], 0
    for index, count in enumerate(blocks):
        end = min(begin + count * BLOCK_SIZE, length)
        visible = end - max(begin, linked)
        if end == length:
            visible -= hidden - linked
        if visible > 0:
            found.append(index)
        begin = end
    return found


def _page_names(tokens: bytes) -> list[bytes]:
    names, name = [], b""
    for begin in range(0, len(tokens), _BLOCK_BYTES):
        name = _digest(name + tokens[begin : begin + _BLOCK_BYTES])
        names.append(name)
    return names


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def check_countable(algorithm: Algorithm) -> None:
    """Raise ConfigError for an algorithm whose reuse is not counted by first linked tokens."""
    policy = algorithm.plan_chunk(1, 1000)
    usual = (
        isinstance(algorithm, ChunkAlgorithm)
        and algorithm.name in ("mepic", "naive", "epic")
        and policy.selection is None
        and policy.anchor is Anchor.NONE
        and algorithm.pads is Pad.MASKED
        and not algorithm.documents
        and getattr(algorithm, "bos", "prompt") == "prompt"
        and tuple(policy.linked) == tuple(range(len(policy.linked)))
    )
    if not usual:
        raise ConfigError(
            f"`algo` {algorithm.spec}: what it reuses is not counted here",
            hint="full, prefix, reorder, naive, mepic with its `blocks`, epic with its `k` and "
            "`copy`",
        )


class SimulatedEngine:
    """Serves requests alone, in a pool of `blocks` usable blocks.

    Both ways to serve return None for a request that the pool can never hold. The pool raises
    PoolTooSmallError where the simulation itself is wrong.
    """

    def __init__(self, blocks: int, keys: BlockKeys) -> None:
        self.pool = SimulatedPool(blocks)
        self._keys = keys
        self._store = ChunkStore(self.pool, tiers=False, clock=lambda: 0.0)
        self._copied: set[bytes] = set()
        self.pool.evicted = self._on_evicted

    def serve_plain(self, runs: list[BlockRun], prompt: int, output: int) -> RequestReuse | None:
        """A prompt of text, as prefix caching serves it; `runs` may go on with a known reply."""
        room = -(-(prompt + output - 1) // BLOCK_SIZE)
        if room > self.pool.usable:
            return None
        held: list[HeldRun] = []
        hits = self._prefill(held, runs, prompt)
        self._decode(held, runs, prompt, output)
        return RequestReuse(prompt, hits * BLOCK_SIZE, prefix_blocks=hits, own_blocks=room - hits)

    def serve_planned(self, plan: ChunkPlan, prompt: int, output: int) -> RequestReuse | None:
        """A prompt with chunks."""
        mapped = sum(use.mapped for use in plan.uses)
        room = mapped + -(-(plan.computed + output - 1) // BLOCK_SIZE)
        spare = max((sum(use.blocks) - use.mapped for use in plan.uses), default=0)
        if room + spare > self.pool.usable:
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
        """Serve a request with copies; tokens that are compiled, once in all."""
        compiled = 0
        for use in plan.uses:
            if use.canonical.key not in self._copied:
                self._copied.add(use.canonical.key)
                compiled += use.tokens
                self._pass_through(sum(use.blocks))
        self._pass_through(room)
        return compiled

    def _pass_through(self, blocks: int) -> None:
        """Blocks of which nothing is found afterwards."""
        self.pool.allocate(blocks)
        self.pool.free_empty(blocks)

    def _link(self, plan: ChunkPlan, output: int) -> tuple[int, int]:
        """Compile what is missing, then serve; tokens compiled, and blocks that were found."""
        store, pool = self._store, self.pool
        chunks = list({(u.canonical.key, u.canonical.used): u for u in plan.uses}.values())
        missing = {u.canonical.key: u for u in chunks if not store.is_mappable(u.canonical)}
        waiting = [run for u in chunks for run in self._hold(u.canonical)] if missing else []
        jobs: list[tuple[ChunkUse, list[HeldRun]]] = []
        compiled = 0
        at_once = sum(sum(use.blocks) for use in chunks) + -(-plan.computed // BLOCK_SIZE)
        for use in missing.values():
            tokens, pages = self._compile(use)
            compiled += tokens
            if at_once <= pool.usable:
                jobs.append((use, pages))
            else:  # One step cannot hold all of them.
                self._complete(use, pages)
                waiting += self._hold(use.canonical)
        held = [self._mapped(page) for use in plan.uses for page in use.canonical.keys]
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
        pages = list(zip(use.canonical.pages, use.blocks, strict=True))
        self._store.prepare_compile(use.canonical, "compile")
        held: list[HeldRun] = []
        hits = 0
        for page, blocks in pages[:-1]:
            run = self.pool.find(page.name)
            if run is None or run.blocks < blocks:
                break
            self.pool.touch(run)
            held.append(run)
            hits += blocks
        self.pool.allocate(sum(use.blocks) - hits)
        held += [self.pool.fill(page.name, blocks) for page, blocks in pages[len(held) :]]
        return use.tokens - hits * BLOCK_SIZE, held

    def _complete(self, use: ChunkUse, pages: list[HeldRun]) -> None:
        self._store.complete_compile(use.canonical, (), success=True, shared=True)
        self.pool.free(reversed(pages))

    def _mapped(self, page: bytes) -> HeldRun:
        run = self.pool.hold(page)
        assert run is not None, "a chunk was compiled, and is gone"
        return run

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
        pool.allocate(-(-tokens // BLOCK_SIZE) - hits)
        if partial is not None:
            pool.extend(*partial)
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
        for _ in range(-(-end // BLOCK_SIZE) - -(-tokens // BLOCK_SIZE)):
            pool.allocate(1)
        full, filled = tokens // BLOCK_SIZE, end // BLOCK_SIZE
        covered = 0
        for key, blocks, _ in runs:
            if full <= covered < filled:  # Of a known reply; the last token is not stored.
                held.append(pool.fill(key, min(blocks, filled - covered)))
                full = min(covered + blocks, filled)
            covered += blocks
        if filled > full:
            held.append(pool.fill(self._keys.unique(), filled - full))
        pool.free_empty(int(end % BLOCK_SIZE > 0))
        pool.free(reversed(held))

    def _on_evicted(self, run: HeldRun) -> None:
        if isinstance(run.key, bytes) and self.pool.is_last(run):
            self._store.evict(run.key)


class UnboundedCache:
    """Remembers the keys of runs and chunks; those that can never recur are only counted.

    `blocks` is the number of blocks with KV, each counted once.
    """

    def __init__(self) -> None:
        self._runs: set[int] = set()
        self._begun: dict[int, int] = {}
        self._pages: set[bytes] = set()
        self.blocks = 0

    def serve_plain(self, runs: list[BlockRun], prompt: int, output: int) -> RequestReuse:
        """A prompt of text, as prefix caching serves it; `runs` may go on with a known reply."""
        found = self._found(runs, (prompt - 1) // BLOCK_SIZE)
        hits = sum(blocks for _, blocks in found)
        shared = (*found, *self._store(runs, prompt + output - 1))
        own = -(-(prompt + output - 1) // BLOCK_SIZE) - sum(blocks for _, blocks in shared)
        return RequestReuse(
            prompt, hits * BLOCK_SIZE, prefix_blocks=hits, own_blocks=own, shared=shared
        )

    def serve_planned(self, plan: ChunkPlan, prompt: int, output: int) -> RequestReuse:
        """A prompt with chunks."""
        compiled, unmapped = self._compile(plan)
        mapped = sum(use.mapped for use in plan.uses)
        room = mapped + -(-(plan.computed + output - 1) // BLOCK_SIZE)
        if plan.private:
            return RequestReuse(
                prompt, prompt - plan.computed, compiled, copied_blocks=mapped, own_blocks=room
            )
        found = self._found(plan.runs, (plan.computed - 1) // BLOCK_SIZE)
        hits = sum(blocks for _, blocks in found)
        computed = (*found, *self._store(plan.runs, plan.computed + output - 1))
        reused = prompt - plan.computed + hits * BLOCK_SIZE
        own = room - mapped - sum(blocks for _, blocks in computed)
        shared: tuple[tuple[int | bytes, int], ...] = (*plan.shared, *computed)
        return RequestReuse(
            prompt,
            reused,
            compiled,
            mapped,
            hits,
            own_blocks=own,
            shared=shared,
            compile_blocks=unmapped,
        )

    def _compile(self, plan: ChunkPlan) -> tuple[int, int]:
        """Compile the chunks that are not cached: tokens computed for that, blocks not mapped."""
        compiled = unmapped = 0
        for use in plan.uses:
            names = [page.name for page in use.canonical.pages]
            if all(names[index] in self._pages for index in use.canonical.used):
                continue
            compiled += use.tokens - BLOCK_SIZE * leading(
                [name in self._pages for name in names], use.blocks
            )
            unmapped += sum(use.blocks) - use.mapped
            for name, blocks in zip(names, use.blocks, strict=True):
                if name not in self._pages:
                    self._pages.add(name)
                    self.blocks += blocks
        return compiled, unmapped

    def _found(self, runs: list[BlockRun], most: int) -> list[tuple[int, int]]:
        """The runs that are cached, and how many blocks of each, `most` blocks in all."""
        found: list[tuple[int, int]] = []
        for key, blocks, _ in runs:
            if key not in self._runs or blocks > most:
                begun = min(self._begun.get(key, 0), most)
                return [*found, (key, begun)] if begun else found
            most -= blocks
            found.append((key, blocks))
        return found

    def _store(self, runs: list[BlockRun], slots: int) -> list[tuple[int, int]]:
        """Remember what is cached of `slots` tokens; replies that are not known count, too.

        Returns the runs that were not cached before and can be found, with their blocks.
        """
        known, stored = self._runs, []
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


def leading(present: list[bool], blocks: tuple[int, ...]) -> int:
    """Blocks of the first pages that are present, as a compile finds them: never the last one."""
    hits = 0
    for there, count in zip(present[:-1], blocks, strict=False):
        if not there:
            break
        hits += count
    return hits


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

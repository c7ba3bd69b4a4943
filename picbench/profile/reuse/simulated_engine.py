"""An engine with a pool of a given size, simulated: one request after another, block by block.

The pool is vLLM's (`SimulatedPool`), the chunks are kept by the project's own chunk store. It is
exact for requests that run alone, each of which fits one step together with the chunks that are
compiled for it, and the pool. Private copies are made from a tier that never forgets.
"""

from collections.abc import Iterator

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.plan import Canonical
from picbench.profile.reuse.block_runs import BlockKeys, BlockRun
from picbench.profile.reuse.chunk_plan import ChunkPlan, ChunkUse
from picbench.profile.reuse.reuse_counts import RequestReuse
from picbench.profile.reuse.simulated_pool import HeldRun, SimulatedPool


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

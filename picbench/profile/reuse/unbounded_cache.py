"""A cache that never evicts: what is reused of a trace at best."""

from picbench.engines.config import BLOCK_SIZE
from picbench.profile.reuse.block_runs import BlockRun
from picbench.profile.reuse.chunk_plan import ChunkPlan
from picbench.profile.reuse.reuse_counts import RequestReuse


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

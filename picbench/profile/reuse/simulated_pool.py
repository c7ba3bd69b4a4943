"""A simulation of vLLM's block pool: one least-recently-used order for prefix and chunk blocks.

Upstream: vllm/v1/core/block_pool.py of vLLM 0.32.0. Blocks without a key are at the front of its
free queue: they are never filled, or are put there when they are freed. Blocks with a key are
appended when their last reference goes, a request's last block first. So the front is a number, and
the rest an order of runs, of which the deepest block is evicted first. A key may have several
blocks; the oldest is found.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence


class PoolTooSmallError(Exception):
    """A request needs more blocks than are without references."""


class HeldRun:
    """Blocks of one run that are in the pool; `refs` requests reference them."""

    __slots__ = ("blocks", "key", "refs")

    def __init__(self, key: Hashable, blocks: int) -> None:
        self.key = key
        self.blocks = blocks
        self.refs = 1


class SimulatedPool:
    """A pool of `usable` blocks; `evicted` is called with each run that loses blocks to others.

    `evictions` counts blocks that lost their KV.

    It is what a chunk store needs of a pool (`PagePool`), and what a simulated engine does.
    """

    def __init__(self, usable: int) -> None:
        self.usable = usable
        self.evicted: Callable[[HeldRun], None] = lambda run: None
        self.evictions = 0
        self._free = usable
        self._idle: dict[HeldRun, None] = {}
        self._idle_blocks = 0
        self._cached: dict[Hashable, list[HeldRun]] = {}

    @property
    def available(self) -> int:
        """Blocks without references."""
        return self._free + self._idle_blocks

    @property
    def keyed(self) -> int:
        """Idle blocks that hold KV."""
        return self._idle_blocks

    def find(self, key: Hashable) -> HeldRun | None:
        """The oldest run with this key."""
        found = self._cached.get(key)
        return found[0] if found else None

    def touch(self, run: HeldRun) -> None:
        """Reference a run."""
        if not run.refs:
            del self._idle[run]
            self._idle_blocks -= run.blocks
        run.refs += 1

    def allocate(self, blocks: int) -> None:
        """Take blocks: empty ones first, then the least recently used. Raises PoolTooSmallError."""
        if blocks > self.available:
            raise PoolTooSmallError
        taken = min(blocks, self._free)
        self._free -= taken
        short = blocks - taken
        if not short:
            return
        lost: list[HeldRun] = []
        self._idle_blocks -= short
        self.evictions += short
        while short:
            run = next(iter(self._idle))
            lost.append(run)
            if run.blocks > short:
                run.blocks -= short
                break
            short -= run.blocks
            run.blocks = 0
            del self._idle[run]
        # Keys go after all blocks were taken, as upstream.
        for run in lost:
            self.evicted(run)
            if not run.blocks:
                self._forget(run)

    def fill(self, key: Hashable, blocks: int) -> HeldRun:
        """Give blocks that were allocated a key."""
        run = HeldRun(key, blocks)
        self._cached.setdefault(key, []).append(run)
        return run

    def extend(self, run: HeldRun, blocks: int) -> None:
        """Blocks that were allocated complete a run of which some were evicted."""
        run.blocks = blocks

    def free_empty(self, blocks: int) -> None:
        """Free blocks without a key."""
        self._free += blocks

    def free(self, runs: Iterable[HeldRun]) -> None:
        """Drop references; the first run is evicted first."""
        for run in runs:
            run.refs -= 1
            if not run.refs:
                self._idle[run] = None
                self._idle_blocks += run.blocks

    def is_last(self, run: HeldRun) -> bool:
        """Whether no other run has its key."""
        return len(self._cached.get(run.key, ())) < 2

    def resident(self, key: bytes) -> bool:
        """Whether a page is in the pool."""
        return key in self._cached

    def in_use(self, key: bytes) -> bool:
        """Whether a page is referenced."""
        run = self.find(key)
        return run is not None and run.refs > 0

    def block_id(self, key: bytes) -> int:
        """There are no ids here: nothing is copied or stored."""
        raise KeyError(key)

    def refresh(self, keys: Iterable[bytes]) -> None:
        """Make idle pages the last to be evicted."""
        for run in map(self.find, keys):
            if run is not None and run in self._idle:
                del self._idle[run]
                self._idle[run] = None

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget idle pages; their blocks are the next to be taken."""
        for run in map(self.find, keys):
            if run is not None and run in self._idle:
                del self._idle[run]
                self._idle_blocks -= run.blocks
                self._free += run.blocks
                self.evictions += run.blocks
                self._forget(run)

    def hold(self, key: bytes) -> HeldRun | None:
        """Reference a page; None if it is not in the pool."""
        run = self.find(key)
        if run is not None:
            self.touch(run)
        return run

    def release(self, blocks: Sequence[HeldRun]) -> None:
        """Drop references; the last run of the list is evicted first."""
        self.free(reversed(blocks))

    def _forget(self, run: HeldRun) -> None:
        found = self._cached.get(run.key, [])
        if run in found:
            found.remove(run)
        if not found:
            self._cached.pop(run.key, None)

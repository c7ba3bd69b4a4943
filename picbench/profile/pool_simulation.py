"""What one arm reuses of a trace, request by request and in all."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from picbench.engines.config import BLOCK_SIZE
from picbench.profile.traces import TraceSegment


@dataclass(frozen=True, slots=True)
class RequestReuse:
    """Prompt tokens of one request by origin, as the engine counts them (`TokenCounts`).

    `reused` are those that were not computed for it; chunks that were compiled for it are among
    them, and are in `compiled`, too. `chunk_blocks` are shared blocks of chunks, `prefix_blocks`
    found ones of the rest, `copied_blocks` private copies. `shared` are the keys of the blocks that
    others hold or may find while it runs, with their numbers, `own_blocks` all others.
    `compile_blocks` are of chunks that are compiled for it, in pages that it does not map itself.
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
        self.prompt += found.prompt
        self.reused += found.reused
        self.compiled += found.compiled
        self.chunk_blocks += found.chunk_blocks
        self.prefix_blocks += found.prefix_blocks
        self.copied_blocks += found.copied_blocks
        self.own_blocks += found.own_blocks

    @property
    def computed(self) -> int:
        """Tokens that are computed for all prompts."""
        return self.prompt - self.reused + self.compiled

    @property
    def saved(self) -> float:
        """The share of prompt tokens that need not be computed; never negative in practice."""
        return 1 - self.computed / self.prompt if self.prompt else 0.0


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


class HeldBlocks:
    """The blocks of the requests that were added and not dropped: shared ones count once."""

    def __init__(self) -> None:
        self.peak = 0
        self._users: Counter[int | bytes] = Counter()
        self._blocks = 0

    def add(self, request: RequestReuse) -> None:
        """A request begins."""
        self._blocks += request.own_blocks
        for key, blocks in request.shared:
            if not self._users[key]:
                self._blocks += blocks
            self._users[key] += 1

    def note(self, others: int = 0) -> None:
        """A step: the requests hold all their blocks, and `others`, which may be negative."""
        self.peak = max(self.peak, self._blocks + others)

    def drop(self, request: RequestReuse) -> None:
        """A request that was added has ended."""
        self._blocks -= request.own_blocks
        for key, blocks in request.shared:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._blocks -= blocks

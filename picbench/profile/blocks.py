"""KV blocks: their keys, a pool that holds them, and those of chunks under an algorithm.

`EnginePlanner` asks the engine's own `lay_out` which pages of each chunk are mapped, and which
blocks the computed tokens make. Chunks are a `Canonical` of names, which the chunk store can keep.
"""

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from picbench.engines.algorithms import Algorithm, stand_ins
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.chunk_pages import PageCache
from picbench.engines.planning.keys import Key
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.packing import AnchorText
from picbench.engines.planning.pages import Page
from picbench.engines.planning.plan import Canonical
from picbench.engines.planning.policy import Segment
from picbench.errors import ConfigError
from picbench.workloads.traffic.trace import TraceSegment

#: Bytes of a full block in `TraceSegment.tokens`.
_BLOCK_BYTES = BLOCK_SIZE * 8

#: From here on ids are invented: half of those that have four bytes.
_INVENTED = 1 << 30

#: Chunks that are remembered; further ones are planned anew.
_KEPT = 100_000


def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


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

    def runs(self, segments: Iterable[TraceSegment]) -> list[BlockRun]:
        """The full blocks of consecutive computed tokens."""
        return self._by_token(segments) if self.exact else self._by_content(segments)

    def unique(self) -> int:
        """A key that no other block has."""
        self._unique += 1
        return hash(("unique", self._unique))

    def _by_content(self, segments: Iterable[TraceSegment]) -> list[BlockRun]:
        found: list[BlockRun] = []
        key, filled, again = 0, 0, True
        for segment in segments:
            if segment.content is None:
                again = False
                key = self.unique()
            else:
                key = hash((key, segment.content))
            filled += segment.length
            blocks, filled = divmod(filled, BLOCK_SIZE)
            # The last block of a whole prompt is never found, so it is a run of its own.
            last = int(blocks > 0 and not filled)
            if blocks > last:
                found.append(BlockRun(key, blocks - last, again))
            if last:
                found.append(BlockRun(hash((key, "last")), 1, again))
        return found

    def _by_token(self, segments: Iterable[TraceSegment]) -> list[BlockRun]:
        found: list[BlockRun] = []
        key, rest = 0, b""
        for segment in segments:
            assert segment.tokens is not None, "segments of exact traces have tokens"
            data = rest + segment.tokens
            whole = len(data) - len(data) % _BLOCK_BYTES
            for begin in range(0, whole, _BLOCK_BYTES):
                key = hash((key, data[begin : begin + _BLOCK_BYTES]))
                found.append(BlockRun(key, 1, True))
            rest = data[whole:]
        return found


class PoolTooSmallError(Exception):
    """A request needs more blocks than are without references."""


@dataclass(eq=False, slots=True)
class HeldRun:
    """Blocks of one run that are in the pool; `refs` requests reference them."""

    key: Hashable
    blocks: int
    refs: int = 1


class SimulatedPool:
    """A pool of `usable` blocks, as an engine and a chunk store use it (`PagePool`).

    `evicted` is called with each key that loses blocks to others and has no other run; `evictions`
    counts all such blocks. `keyed` are idle blocks that hold KV.
    """

    def __init__(self, usable: int, evicted: Callable[[Hashable], None]) -> None:
        self.usable, self.evicted = usable, evicted
        self.evictions = 0
        self._free = usable
        self._idle: dict[HeldRun, None] = {}
        self.keyed = 0
        self._cached: dict[Hashable, list[HeldRun]] = {}

    def find(self, key: Hashable) -> HeldRun | None:
        """The oldest run with this key."""
        found = self._cached.get(key)
        return found[0] if found else None

    def touch(self, run: HeldRun) -> None:
        """Reference a run."""
        if not run.refs:
            del self._idle[run]
            self.keyed -= run.blocks
        run.refs += 1

    def allocate(self, blocks: int) -> None:
        """Take blocks: empty ones first, then the least recently used. Raises PoolTooSmallError."""
        if blocks > self._free + self.keyed:
            raise PoolTooSmallError
        taken = min(blocks, self._free)
        self._free -= taken
        short = blocks - taken
        self.keyed -= short
        self.evictions += short
        lost: list[HeldRun] = []
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
            if len(self._cached.get(run.key, ())) < 2:
                self.evicted(run.key)
            if not run.blocks:
                self._forget(run)

    def fill(self, key: Hashable, blocks: int) -> HeldRun:
        """Give blocks that were allocated a key."""
        run = HeldRun(key, blocks)
        self._cached.setdefault(key, []).append(run)
        return run

    def free_empty(self, blocks: int) -> None:
        """Free blocks without a key."""
        self._free += blocks

    def resident(self, key: bytes) -> bool:
        """Whether a page is in the pool."""
        return key in self._cached

    def in_use(self, key: bytes) -> bool:
        """Whether a page is referenced."""
        run = self.find(key)
        return run is not None and run.refs > 0

    def block_id(self, key: bytes) -> int:
        """Raise KeyError: there are no ids here, because nothing is copied or stored."""
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
                self.keyed -= run.blocks
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
        for run in reversed(blocks):
            run.refs -= 1
            if not run.refs:
                self._idle[run] = None
                self.keyed += run.blocks

    def _forget(self, run: HeldRun) -> None:
        found = self._cached.get(run.key, [])
        if run in found:
            found.remove(run)
        if not found:
            self._cached.pop(run.key, None)


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """A chunk in a prompt, and which pages of it are mapped or copied.

    Compiling it computes `tokens` in blocks of `pages`, keys with their tokens: first those that it
    is compiled after, then its own.
    """

    canonical: Canonical
    tokens: int
    pages: tuple[tuple[Hashable, int], ...]

    @property
    def mapped(self) -> int:
        """Blocks that the request maps or copies; only compiling the chunk needs all others."""
        return len(self.canonical.used)


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
    def mapped(self) -> int:
        """Blocks of chunks that the request maps or copies."""
        return sum(use.mapped for use in self.uses)

    @property
    def shared(self) -> tuple[tuple[bytes, int], ...]:
        """The pages that are mapped, with their blocks."""
        return tuple((key, 1) for use in self.uses for key in use.canonical.keys)


class EnginePlanner:
    """Plans requests as engines do, under any algorithm that reuses chunks.

    It takes milliseconds a request. Contents of known length get tokens that no other has.
    """

    def __init__(self, algorithm: Algorithm, keys: BlockKeys) -> None:
        self._algorithm, self._keys = algorithm, keys
        self._layout = algorithm.layout(bos_token=0, anchors=stand_ins(algorithm.anchor_text))
        self._pages = PageCache()
        self._invented: dict[int | None, int] = {}
        self._tokens = 0
        self._uses: dict[tuple[bytes, ...], ChunkUse] = {}

    def plan(
        self, segments: Sequence[TraceSegment], reply: TraceSegment | None = None
    ) -> ChunkPlan:
        """Plan a prompt; a known `reply` continues its runs. Raises ConfigError where it cannot."""
        given: list[Segment] = []
        for segment in segments:
            ids = self._ids(segment)
            if given and not (segment.chunk or given[-1].chunk):
                given[-1] = Segment(given[-1].tokens + ids)
                continue
            before = self._ids(segment.before) if segment.before else ()
            given.append(Segment(ids, segment.chunk, context=before))
        arm, layout = self._algorithm, self._layout
        try:
            plan = lay_out(arm.arrange(given, layout), arm.plan_chunk, layout, cache=self._pages)
        except ValueError as error:
            raise ConfigError(f"`algo` {arm.spec}: {error}", hint="leave it out") from error
        keys = [page.key for page in plan.computed if len(page.tokens) == BLOCK_SIZE]
        if reply is not None and not plan.picks and not plan.copies:
            known = [key for key in plan.keys if key is not None]
            keys += plan.generated_keys([*plan.tokens, *self._ids(reply)], known)
        found = {tuple[Key | None, ...](c.keys): c for c in plan.canonicals}
        uses = (self._use(found[view.copies or view.keys]) for view, _ in plan.placed)
        computed = sum(len(page.tokens) for page in plan.computed)
        # Blocks of tokens that a worker picks are never found again.
        runs = [BlockRun(hash(key) if key else self._keys.unique(), 1, bool(key)) for key in keys]
        return ChunkPlan(tuple(uses), runs, computed, bool(plan.copies))

    def _use(self, canonical: Canonical) -> ChunkUse:
        name = canonical.key, *canonical.keys
        if name not in self._uses:
            if len(self._uses) >= _KEPT:
                self._uses.clear()
            lead = [(hash(page.name), page.real) for page in canonical.anchor.pages()]
            own = [(page.name, page.real) for page in canonical.pages]
            pages = tuple(Page((), (), (), key, canonical=True) for key, _ in own)
            bare = Canonical.of(AnchorText((), BLOCK_SIZE, ""), pages, canonical.used)
            compiled = tuple[tuple[Hashable, int], ...]((*lead, *own))
            self._uses[name] = ChunkUse(bare, sum(n for _, n in compiled), compiled)
        return self._uses[name]

    def _ids(self, segment: TraceSegment) -> tuple[int, ...]:
        """Ids of four bytes, as plans need them; invented ones are larger than vocabularies."""
        if segment.tokens is not None:
            ids = array("q", segment.tokens)
            return tuple(i if i < _INVENTED else _INVENTED + i % _INVENTED for i in ids)
        first = self._invented.get(segment.content, self._tokens)
        if first == self._tokens:
            self._tokens += segment.length
        if segment.content is not None:
            self._invented[segment.content] = first
        first = _INVENTED + first % (_INVENTED - segment.length)
        return tuple(range(first, first + segment.length))

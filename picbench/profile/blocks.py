"""KV blocks: their keys, a pool that holds them, and those of chunks under an algorithm.

`ChunkPlanner` makes the same decisions as `picbench.engines.planning.layout.lay_out`, without
slots: which pages of each chunk are mapped, and which runs of blocks the computed tokens make.
`EnginePlanner` asks `lay_out` itself, for what the former does not know. A chunk is a `Canonical`
whose pages are runs, so that the project's own chunk store can keep it.
"""

import hashlib
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from picbench.engines.algorithms import Algorithm
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.chunk_pages import PageCache
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.packing import AnchorText
from picbench.engines.planning.pages import Page
from picbench.engines.planning.plan import Canonical
from picbench.engines.planning.policy import Anchor, LayoutConfig, Pad, Segment
from picbench.errors import ConfigError
from picbench.profile.traces import TraceSegment

#: Bytes of a token in `TraceSegment.tokens`, and of a full block.
_TOKEN_BYTES = 8
_BLOCK_BYTES = BLOCK_SIZE * _TOKEN_BYTES

#: From here on ids are invented: half of those that have four bytes.
_INVENTED = 1 << 30

#: Chunks that are remembered; further ones are planned anew.
_KEPT = 100_000


def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


class ComputedSlice(NamedTuple):
    """Tokens from `first` up to `end` of a segment, which a request computes.

    `event` identifies what stands between them and the computed tokens before them: the chunk that
    they belong to, or chunks that are mapped as a whole. 0 is nothing.
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
        """The full blocks of consecutive computed tokens."""
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
            if segment.content is None:
                again = False
                key = self.unique()
            else:
                key = hash((key, segment.content, first, end, event))
            filled += end - first
            blocks, filled = divmod(filled, BLOCK_SIZE)
            # The last block of a whole prompt is never found, so it is a run of its own.
            last = int(blocks > 0 and not filled)
            if blocks > last:
                found.append(BlockRun(key, blocks - last, again))
            if last:
                found.append(BlockRun(hash((key, "last")), 1, again))
        return found

    def _by_token(self, slices: Iterable[ComputedSlice]) -> list[BlockRun]:
        found: list[BlockRun] = []
        key, rest, events = 0, b"", tuple[int, ...]()
        for segment, first, end, event in slices:
            if end == first:
                continue
            if event:
                events += (event,)
            data = rest + _known_tokens(segment)[first * _TOKEN_BYTES : end * _TOKEN_BYTES]
            whole = len(data) - len(data) % _BLOCK_BYTES
            for begin in range(0, whole, _BLOCK_BYTES):
                key = hash((key, data[begin : begin + _BLOCK_BYTES], events))
                events = ()
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
    """A chunk in a prompt: which pages of it are mapped, and how large its pages are.

    `blocks` are those of each page of `canonical`, whose pages are runs. Compiling it computes
    `tokens`; those that it is compiled after are in `lead`, keys of blocks with their tokens.
    """

    canonical: Canonical
    blocks: tuple[int, ...]
    tokens: int
    lead: tuple[tuple[int, int], ...] = ()

    @property
    def pages(self) -> Iterator[tuple[Hashable, int, int]]:
        """What its compile allocates, in order: key, blocks and, of full pages, tokens."""
        yield from ((key, 1, tokens) for key, tokens in self.lead)
        for page, count in zip(self.canonical.pages, self.blocks, strict=True):
            yield page.name, count, count * BLOCK_SIZE

    @property
    def compile_blocks(self) -> int:
        """Blocks that its compile needs."""
        return len(self.lead) + sum(self.blocks)

    @property
    def mapped(self) -> int:
        """Blocks that the request maps or copies; only compiling the chunk needs all others."""
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
    def mapped(self) -> int:
        """Blocks of chunks that the request maps or copies."""
        return sum(use.mapped for use in self.uses)

    @property
    def shared(self) -> tuple[tuple[bytes, int], ...]:
        """The pages that are mapped, with their blocks."""
        return tuple(
            (use.canonical.pages[index].name, use.blocks[index])
            for use in self.uses
            for index in use.canonical.used
        )


class ChunkPlanner:
    """Plans requests under an algorithm that `knows` is true of."""

    @staticmethod
    def knows(algorithm: Algorithm) -> bool:
        """Whether it is mepic, naive or epic, and links the first tokens of chunks alone."""
        if algorithm.name not in ("mepic", "naive", "epic"):
            return False
        policy = algorithm.plan_chunk(1, 1000)
        return (
            policy.selection is None
            and policy.anchor is Anchor.NONE
            and algorithm.pads is Pad.MASKED
            and not algorithm.documents
            and getattr(algorithm, "bos", "prompt") == "prompt"
        )

    def __init__(self, algorithm: Algorithm, keys: BlockKeys) -> None:
        self._algorithm = algorithm
        self._keys = keys
        self._private = bool(getattr(algorithm, "private", False))
        self._uses: dict[tuple[int, int, bool], ChunkUse] = {}

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
        if segment.content is None:
            return self._make(segment, self._keys.unique(), linked, ends=ends)
        name = segment.content, linked, ends
        if name not in self._uses:
            if len(self._uses) >= _KEPT:
                self._uses.clear()
            self._uses[name] = self._make(segment, segment.content, linked, ends=ends)
        return self._uses[name]

    def _make(self, segment: TraceSegment, identity: int, linked: int, *, ends: bool) -> ChunkUse:
        length, total = segment.length, blocks_of(segment.length)
        if self._keys.exact:
            blocks: tuple[int, ...] = (1,) * total
            tokens, name, names = _known_tokens(segment), b"", []
            for begin in range(0, len(tokens), _BLOCK_BYTES):
                name = _digest(name + tokens[begin : begin + _BLOCK_BYTES])
                names.append(name)
        else:
            cut = len(self._algorithm.plan_chunk(1, length).linked) // BLOCK_SIZE
            # A last page of one token is not mapped where the prompt ends with it.
            last = int(length % BLOCK_SIZE == 1 and total > cut)
            blocks = tuple(n for n in (cut, total - cut - last, last) if n)
            names = [_digest(repr((identity, number)).encode()) for number in range(len(blocks))]
        # Pages are mapped that hold a token which is neither linked nor the last of a prompt.
        used, begin = [], 0
        for index, count in enumerate(blocks):
            end = min(begin + count * BLOCK_SIZE, length)
            if end - max(begin, linked) - (ends and end == length) > 0:
                used.append(index)
            begin = end
        pages = tuple(Page((), (), (), name, canonical=True) for name in names)
        canonical = Canonical.of(AnchorText((), BLOCK_SIZE, ""), pages, tuple(used))
        return ChunkUse(canonical, blocks, length)


class EnginePlanner:
    """Plans requests as engines do, token by token, under any algorithm that reuses chunks.

    It takes milliseconds a request. Contents of known length get tokens that no other has.
    """

    def __init__(self, algorithm: Algorithm, keys: BlockKeys) -> None:
        self._algorithm, self._keys = algorithm, keys
        self._layout = LayoutConfig(pad=algorithm.pads, bos_token=0, documents=algorithm.documents)
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
        keys = plan.keys[plan.canonical : len(plan.tokens) // BLOCK_SIZE]
        if reply is not None and not plan.picks and not plan.copies:
            known = [key for key in plan.keys if key is not None]
            keys += plan.generated_keys([*plan.tokens, *self._ids(reply)], known)
        found = {canonical.keys: canonical for canonical in plan.canonicals}
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
            lead = tuple((hash(page.name), page.real) for page in canonical.anchor.pages())
            pages = [Page((), (), (), page.name, canonical=True) for page in canonical.pages]
            bare = Canonical.of(AnchorText((), BLOCK_SIZE, ""), tuple(pages), canonical.used)
            tokens = sum(page.real for page in canonical.compile_plan().computed)
            self._uses[name] = ChunkUse(bare, (1,) * len(pages), tokens, lead)
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


def _known_tokens(segment: TraceSegment) -> bytes:
    """The tokens of a segment of an exact trace."""
    assert segment.tokens is not None
    return segment.tokens


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()

"""What a request with chunks shares and computes under an algorithm, run by run.

The same decisions as `picbench.engines.planning.layout.lay_out`, without slots: which pages of each
chunk are mapped, and which runs its computed tokens make. A chunk is a `Canonical` whose pages are
runs, so that the project's own chunk store can keep it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from picbench.engines.algorithms import Algorithm
from picbench.engines.algorithms.base import ChunkAlgorithm
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.packing import AnchorText
from picbench.engines.planning.pages import Page
from picbench.engines.planning.plan import Canonical
from picbench.engines.planning.policy import Anchor, Pad
from picbench.errors import ConfigError
from picbench.profile.reuse.block_runs import (
    TOKEN_BYTES,
    BlockKeys,
    BlockRun,
    ComputedSlice,
    known_tokens,
)
from picbench.profile.traces.traced_request import TraceSegment

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

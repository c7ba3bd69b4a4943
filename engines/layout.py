"""From segments to a plan: where each token of a prompt sits, and what has to be compiled.

An algorithm is a policy that turns each chunk of a prompt into a `Treatment`; `lay_out` is the
mechanism that all of them share. Nothing here imports torch or vllm.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import takewhile
from typing import Any

from picbench.engines.keys import (
    ChunkEvent,
    Key,
    anchor_key,
    canonical_key,
    computed_key,
    root_key,
)
from picbench.engines.plan import GAP, Canonical, Page, Plan, Slot

#: Discarded BOS tokens in front of a chunk that is compiled for LegoLink-0 (arXiv 2410.15332).
BOS_ANCHOR = 4


class Anchor(Enum):
    """What a chunk is compiled behind: nothing, discarded BOS tokens, the prompt's first text."""

    NONE = "none"
    BOS = "bos"
    PREFIX = "prefix"


class Pad(StrEnum):
    """How chunks fill whole blocks.

    `MASKED`: trailing pads that nobody sees and that take no position. `PAPER`: MEPIC's literal
    form (arXiv 2512.16822, section on segment alignment): visible pads in front of chunks and
    behind prompt text, which take positions.
    """

    MASKED = "masked"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment of a prompt in tokens; the first `lead` and the last `trail` are visible pads."""

    tokens: tuple[int, ...]
    chunk: bool = False
    lead: int = 0
    trail: int = 0

    def kind(self, index: int, kind: Slot) -> Slot:
        """`kind`, or `Slot.PAD` if the token at `index` is a pad."""
        real = self.lead <= index < len(self.tokens) - self.trail
        return kind if real else Slot.PAD

    def kinds(self, begin: int, count: int, kind: Slot) -> tuple[Slot, ...]:
        """The kinds of `count` tokens from `begin` on."""
        if not self.lead and not self.trail:
            return (kind,) * count
        return tuple(self.kind(begin + i, kind) for i in range(count))


@dataclass(frozen=True, slots=True)
class Treatment:
    """What an algorithm does to one chunk of a prompt.

    `linked` are the token indices within the chunk that are recomputed with the whole logical
    prefix in view, ascending; `private` copies the canonical KV into blocks of the request's own.
    """

    linked: Sequence[int] = ()
    anchor: Anchor = Anchor.NONE
    private: bool = False


#: An algorithm as `lay_out` sees it: (chunk index, chunk length) -> treatment.
Policy = Callable[[int, int], Treatment]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a plan needs to know of the engine.

    `scope` separates tenants and models. `pad_token` fills visible pads (`Pad.PAPER`); masked pads
    repeat a token of the chunk, so that they never add one to the prompt. `bos_token` fills
    discarded BOS anchors.
    """

    block_size: int = 16
    scope: str = ""
    pad: Pad = Pad.MASKED
    pad_token: int = 0
    bos_token: int | None = None


class PageCache:
    """Chunks' canonical pages, which are the same in every request, least recently used out first.

    Hashing them is most of the work of a plan; a scheduler plans on the engine's critical path.
    """

    def __init__(self, tokens: int = 1 << 21) -> None:
        self._room = tokens
        self._pages: OrderedDict[Any, tuple[Page, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def tokens(self) -> int:
        """Tokens of the chunks that it knows."""
        return sum(len(tokens) for tokens, *_ in self._pages)

    def find(self, piece: Piece, anchor: tuple[int, ...], layout: Layout) -> tuple[Page, ...]:
        """The pages of a chunk that is compiled behind `anchor`."""
        name = (piece.tokens, piece.lead, anchor, layout.scope, layout.block_size)
        pages = self._pages.get(name)
        if pages is not None:
            self._pages.move_to_end(name)
            return pages
        self._room -= len(piece.tokens)
        while self._room < 0 and self._pages:
            (tokens, *_), _ = self._pages.popitem(last=False)
            self._room += len(tokens)
        pages = self._pages[name] = _chunk_pages(piece, anchor, layout)
        return pages


def lay_out(
    pieces: Sequence[Piece],
    policy: Policy,
    layout: Layout,
    *,
    prefix_keys: Sequence[Key] = (),
    cache: PageCache | None = None,
) -> Plan:
    """Plan a prompt; with a `cache`, chunks that it knows are not hashed again.

    `prefix_keys` are the engine's own keys of the full blocks of the raw prompt; those inside the
    text before the first chunk are taken over, so that this text is shared with plain requests
    (its KV is the same). Raises ValueError for an empty prompt and for links outside a chunk.
    """
    count = sum(len(piece.tokens) for piece in pieces)
    if not count:
        raise ValueError("a plan needs at least one token")
    lead = len(_leading_text([piece for piece in pieces if piece.tokens]))
    keys = prefix_keys[: lead // layout.block_size]
    return _Builder(_padded(pieces, layout), policy, layout, keys, cache).build(count)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a plan will need: its `slots`, and `spare` blocks beside them.

    Spare are the blocks that its largest compile adds, and for private copies the canonical blocks
    that they are copied from: with no tier in reach, all must be resident at once.
    """

    slots: int
    spare: int


def measure(pieces: Sequence[Piece], policy: Policy, layout: Layout) -> Footprint:
    """The footprint of a plan without making it: microseconds a chunk. Raises as `lay_out`."""
    return _Builder(_padded(pieces, layout), policy, layout, ()).measure()


@dataclass(frozen=True, slots=True)
class _Token:
    """A token that the request computes."""

    token: int
    position: int
    kind: Slot


class _Builder:
    """Walks the pieces once and collects canonical pages, computed tokens and chunk events."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        policy: Policy,
        layout: Layout,
        prefix_keys: Sequence[Key],
        cache: PageCache | None = None,
    ) -> None:
        self._pages = _chunk_pages if cache is None else cache.find
        self._pieces = pieces
        self._policy = policy
        self._layout = layout
        self._end = sum(len(piece.tokens) for piece in self._pieces)
        self._lead = _leading_text(self._pieces)
        self._prefix_keys = prefix_keys
        self._mapped: list[Page] = []
        self._copied: list[Page] = []
        self._canonicals: dict[tuple[Key, tuple[int, ...]], Canonical] = {}
        self._computed: list[_Token] = []
        self._events: list[ChunkEvent] = []

    def build(self, prompt_tokens: int) -> Plan:
        position = chunks = 0
        for piece in self._pieces:
            if piece.chunk:
                self._add_chunk(piece, position, chunks)
                chunks += 1
            else:
                self._compute(piece, range(len(piece.tokens)), position, Slot.PROMPT)
            position += len(piece.tokens)
        computed = self._computed_pages()
        full = [page for page in computed if page.key is not None]
        covered = max((p for page in full for p in page.positions), default=-1)
        return Plan(
            pages=(*self._mapped, *self._copied, *computed),
            canonicals=tuple(self._canonicals.values()),
            prompt_tokens=prompt_tokens,
            end=self._end,
            block_size=self._layout.block_size,
            tail_key=full[-1].name if full else self._root(),
            tail_events=tuple(event for event in self._events if event.start > covered),
        )

    def measure(self) -> Footprint:
        size, position, index = self._layout.block_size, 0, 0
        slots = spare = held = 0
        for piece in self._pieces:
            if not piece.chunk:
                slots += len(piece.tokens)
            else:
                treatment = self._policy(index, len(piece.tokens))
                linked = self._links(treatment, piece, position)
                pages = -(-len(piece.tokens) // size)
                used = len(_used_pages(len(piece.tokens), frozenset(linked), size))
                anchor = -(-len(self._anchor_tokens(treatment.anchor)) // size)
                slots += used * size + len(linked)
                held += used if treatment.private else 0
                spare = max(spare, anchor + pages - used if used else 0)
                index += 1
            position += len(piece.tokens)
        return Footprint(slots, spare + held)

    def _compute(self, piece: Piece, indices: Iterable[int], start: int, kind: Slot) -> None:
        self._computed += [_Token(piece.tokens[i], start + i, piece.kind(i, kind)) for i in indices]

    def _add_chunk(self, piece: Piece, start: int, index: int) -> None:
        treatment = self._policy(index, len(piece.tokens))
        linked = self._links(treatment, piece, start)
        canonical = self._canonical(piece, treatment.anchor, frozenset(linked))
        self._events.append(ChunkEvent(start, canonical.key, linked))
        self._compute(piece, linked, start, Slot.LINKED)
        if canonical.used:
            self._canonicals.setdefault((canonical.key, canonical.used), canonical)
        pages = self._copied if treatment.private else self._mapped
        for used in canonical.used:
            page = canonical.pages[used]
            offset = used * self._layout.block_size
            pages.append(
                _in_view(page, start + offset, offset, frozenset(linked), treatment.private)
            )

    def _links(self, treatment: Treatment, piece: Piece, start: int) -> tuple[int, ...]:
        length = len(piece.tokens)
        links = set(treatment.linked)
        if start + length == self._end:
            links.add(length - 1)  # the prompt's last token is always computed
        if links and not (min(links) >= 0 and max(links) < length):
            raise ValueError(f"links {sorted(links)} leave a chunk of {length} tokens")
        return tuple(sorted(links))

    def _canonical(self, piece: Piece, anchor: Anchor, linked: frozenset[int]) -> Canonical:
        anchor_tokens = self._anchor_tokens(anchor)
        pages = self._pages(piece, anchor_tokens, self._layout)
        used = _used_pages(len(piece.tokens), linked, self._layout.block_size)
        anchor_pages = self._anchor_pages(anchor_tokens, anchor)
        return Canonical(pages[-1].name, anchor_pages, pages, used)

    def _anchor_tokens(self, anchor: Anchor) -> tuple[int, ...]:
        if anchor is Anchor.NONE:
            return ()
        if anchor is Anchor.PREFIX:
            return self._lead
        if self._layout.bos_token is None:
            raise ValueError("the model has no BOS token to compile behind")
        return (self._layout.bos_token,) * BOS_ANCHOR

    def _anchor_pages(self, tokens: tuple[int, ...], anchor: Anchor) -> tuple[Page, ...]:
        keys = self._prefix_keys if anchor is Anchor.PREFIX else ()
        lead = [_Token(token, i, Slot.PROMPT) for i, token in enumerate(tokens)]
        fill = -len(lead) % self._layout.block_size
        lead += [_Token(tokens[-1], GAP, Slot.PAD)] * fill if tokens else []
        return tuple(_chain_pages(lead, (), self._root(), keys, self._layout.block_size))

    def _computed_pages(self) -> list[Page]:
        size = self._layout.block_size
        return list(
            _chain_pages(self._computed, self._events, self._root(), self._prefix_keys, size)
        )

    def _root(self) -> Key:
        return root_key(self._layout.scope)


def _leading_text(pieces: Sequence[Piece]) -> tuple[int, ...]:
    texts = takewhile(lambda piece: not piece.chunk, pieces)
    return tuple(token for piece in texts for token in piece.tokens)


def _used_pages(length: int, linked: frozenset[int], size: int) -> tuple[int, ...]:
    """Pages of a chunk that hold a token which is not linked."""
    starts = range(0, length, size)
    return tuple(
        index
        for index, start in enumerate(starts)
        if not linked.issuperset(range(start, min(start + size, length)))
    )


def _padded(pieces: Sequence[Piece], layout: Layout) -> list[Piece]:
    pieces = [piece for piece in pieces if piece.tokens]
    return list(_pad_as_paper(pieces, layout)) if layout.pad is Pad.PAPER else pieces


def _pad_as_paper(pieces: Sequence[Piece], layout: Layout) -> Iterator[Piece]:
    for index, piece in enumerate(pieces):
        pads = (layout.pad_token,) * (-len(piece.tokens) % layout.block_size)
        if piece.chunk:
            yield Piece(pads + piece.tokens, chunk=True, lead=len(pads))
        elif index + 1 < len(pieces):
            yield Piece(piece.tokens + pads, trail=len(pads))
        else:
            yield piece


def _chunk_pages(piece: Piece, anchor: tuple[int, ...], layout: Layout) -> tuple[Page, ...]:
    """A chunk's canonical pages, at the positions that they are compiled at."""
    tokens, size = piece.tokens, layout.block_size
    key = anchor_key(layout.scope, anchor)
    pages = []
    for begin in range(0, len(tokens), size):
        part = tokens[begin : begin + size]
        key = canonical_key(key, part)
        first = len(anchor) + begin
        fill = size - len(part)
        pages.append(
            Page(
                tokens=part + (tokens[-1],) * fill,
                positions=(*range(first, first + len(part)), *(GAP,) * fill),
                kinds=piece.kinds(begin, len(part), Slot.CHUNK) + (Slot.PAD,) * fill,
                key=key,
                canonical=True,
            )
        )
    return tuple(pages)


def _in_view(page: Page, start: int, offset: int, linked: frozenset[int], private: bool) -> Page:
    """A canonical page as one request sees it: at its position there, without linked tokens."""
    size, own = len(page.tokens), Slot.PRIVATE if private else Slot.CHUNK
    kinds = tuple(own if k is Slot.CHUNK else k for k in page.kinds) if private else page.kinds
    positions = tuple(range(start, start + size))
    # Most pages of a long chunk are mapped as they are; a plan may have thousands.
    if not linked.isdisjoint(range(offset, offset + size)) or GAP in page.positions:
        hidden = [p == GAP or offset + i in linked for i, p in enumerate(page.positions)]
        positions = tuple(GAP if gone else start + i for i, gone in enumerate(hidden))
        kinds = tuple(Slot.PAD if gone else k for gone, k in zip(hidden, kinds, strict=True))
    return Page(
        tokens=page.tokens,
        positions=positions,
        kinds=kinds,
        key=None if private else page.key,
        canonical=True,
        copy_of=page.key if private else None,
    )


def _chain_pages(
    tokens: Sequence[_Token],
    events: Sequence[ChunkEvent],
    root: Key,
    prefix_keys: Sequence[Key],
    size: int,
) -> Iterator[Page]:
    """Pack computed tokens into pages; full ones are keyed by the whole logical prefix."""
    key, seen = root, 0
    for index, begin in enumerate(range(0, len(tokens), size)):
        part = tokens[begin : begin + size]
        last = max(t.position for t in part if t.position != GAP)
        upto = bisect_right(events, last, lo=seen, key=_start)
        ids, positions = [t.token for t in part], [t.position for t in part]
        if index < len(prefix_keys):
            key = prefix_keys[index]
        else:
            key = computed_key(key, ids, positions, events[seen:upto])
        seen = upto
        kinds = tuple(t.kind for t in part)
        yield Page(tuple(ids), tuple(positions), kinds, key if len(part) == size else None)


def _start(event: ChunkEvent) -> int:
    return event.start

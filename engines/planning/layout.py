"""From segments to a plan: where each token of a prompt sits, and what has to be compiled.

An algorithm is a policy that turns each chunk of a prompt into a `ChunkPolicy`; `lay_out` is the
mechanism that all of them share. Nothing here imports torch or vllm.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from picbench.engines.planning.chunk_pages import ChunkPages, PageCache, used_pages
from picbench.engines.planning.keys import ChunkEvent, Key, computed_key, root_key
from picbench.engines.planning.plan import GAP, Canonical, Page, Placed, Plan, Slot
from picbench.engines.planning.policy import (
    BOS_ANCHOR,
    Anchor,
    ChunkPolicy,
    Layout,
    Pad,
    Policy,
    Segment,
)


def lay_out(
    pieces: Sequence[Segment],
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


def measure(pieces: Sequence[Segment], policy: Policy, layout: Layout) -> Footprint:
    """The footprint of a plan without making it: microseconds a chunk. Raises as `lay_out`."""
    return _Builder(_padded(pieces, layout), policy, layout, ()).measure()


class _Token(NamedTuple):
    """A token that the request computes."""

    token: int
    position: int
    kind: Slot


class _Builder:
    """Walks the pieces once and collects canonical pages, computed tokens and chunk events."""

    def __init__(
        self,
        pieces: Sequence[Segment],
        policy: Policy,
        layout: Layout,
        prefix_keys: Sequence[Key],
        cache: PageCache | None = None,
    ) -> None:
        self._chunk_pages = ChunkPages.of if cache is None else cache.find
        self._pieces = pieces
        self._policy = policy
        self._layout = layout
        self._end = sum(len(piece.tokens) for piece in self._pieces)
        self._lead = _leading_text(self._pieces)
        self._prefix_keys = prefix_keys
        self._mapped: list[Placed] = []
        self._copied: list[Placed] = []
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
            placed=(*self._mapped, *self._copied),
            rest=tuple(computed),
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
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        for piece in self._pieces:
            if not piece.chunk:
                slots += len(piece.tokens)
            else:
                treatment = self._policy(index, len(piece.tokens))
                linked = self._links(treatment, piece, position)
                pages = -(-len(piece.tokens) // size)
                name = len(piece.tokens), linked
                if name not in known:
                    known[name] = len(used_pages(*name, size))
                used = known[name]
                anchor = -(-len(self._anchor_tokens(treatment.anchor)) // size)
                slots += used * size + len(linked)
                held += used if treatment.private else 0
                spare = max(spare, anchor + pages - used if used else 0)
                index += 1
            position += len(piece.tokens)
        return Footprint(slots, spare + held)

    def _compute(self, piece: Segment, indices: Sequence[int], start: int, kind: Slot) -> None:
        tokens = piece.tokens
        if piece.lead or piece.trail:
            kinds = (piece.kind(i, kind) for i in indices)
            pairs = zip(indices, kinds, strict=True)
            self._computed += [_Token(tokens[i], start + i, slot) for i, slot in pairs]
        else:
            self._computed += [_Token(tokens[i], start + i, kind) for i in indices]

    def _add_chunk(self, piece: Segment, start: int, index: int) -> None:
        treatment = self._policy(index, len(piece.tokens))
        linked = self._links(treatment, piece, start)
        anchor = self._anchor_tokens(treatment.anchor)
        chunk = self._chunk_pages(piece, anchor, self._layout)
        view = chunk.view(linked, private=treatment.private)
        anchor_pages = self._anchor_pages(anchor, treatment.anchor)
        canonical = Canonical(chunk.pages[-1].name, anchor_pages, chunk.pages, view.used)
        self._events.append(ChunkEvent(start, canonical.key, linked))
        self._compute(piece, linked, start, Slot.LINKED)
        if canonical.used:
            self._canonicals.setdefault((canonical.key, canonical.used), canonical)
        if view.pages:
            placed = self._copied if treatment.private else self._mapped
            placed.append(Placed(view, start))

    def _links(self, treatment: ChunkPolicy, piece: Segment, start: int) -> tuple[int, ...]:
        length = len(piece.tokens)
        links = set(treatment.linked)
        if start + length == self._end:
            links.add(length - 1)  # the prompt's last token is always computed
        if links and not (min(links) >= 0 and max(links) < length):
            raise ValueError(f"links {sorted(links)} leave a chunk of {length} tokens")
        return tuple(sorted(links))

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


def _leading_text(pieces: Sequence[Segment]) -> tuple[int, ...]:
    texts = takewhile(lambda piece: not piece.chunk, pieces)
    return tuple(token for piece in texts for token in piece.tokens)


def _padded(pieces: Sequence[Segment], layout: Layout) -> list[Segment]:
    pieces = [piece for piece in pieces if piece.tokens]
    return list(_pad_as_paper(pieces, layout)) if layout.pad is Pad.PAPER else pieces


def _pad_as_paper(pieces: Sequence[Segment], layout: Layout) -> Iterator[Segment]:
    for index, piece in enumerate(pieces):
        pads = (layout.pad_token,) * (-len(piece.tokens) % layout.block_size)
        if piece.chunk:
            yield Segment(pads + piece.tokens, chunk=True, lead=len(pads))
        elif index + 1 < len(pieces):
            yield Segment(piece.tokens + pads, trail=len(pads))
        else:
            yield piece


def _chain_pages(
    tokens: Sequence[_Token],
    events: Sequence[ChunkEvent],
    root: Key,
    prefix_keys: Sequence[Key],
    size: int,
) -> Iterator[Page]:
    """Pack computed tokens into pages; full ones are keyed by the whole logical prefix."""
    key, seen = root, 0
    ids, positions, kinds = zip(*tokens, strict=True) if tokens else ((), (), ())
    for index, begin in enumerate(range(0, len(tokens), size)):
        part = slice(begin, begin + size)
        upto = bisect_right(events, _last(positions[part]), lo=seen, key=_start)
        if index < len(prefix_keys):
            key = prefix_keys[index]
        else:
            key = computed_key(key, ids[part], positions[part], events[seen:upto])
        seen = upto
        full = begin + size <= len(tokens)
        yield Page(ids[part], positions[part], kinds[part], key if full else None)


def _last(positions: Sequence[int]) -> int:
    """The last visible one of some positions, which ascend; gaps stand behind."""
    return positions[-1] if positions[-1] != GAP else max(p for p in positions if p != GAP)


def _start(event: ChunkEvent) -> int:
    return event.start

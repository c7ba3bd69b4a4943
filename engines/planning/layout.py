"""From a prompt's segments to a plan: one mechanism for all algorithms.

An algorithm gives each chunk a `ChunkPolicy`; `lay_out` decides from those which slot holds which
token, at which position, and which chunks must be compiled. Nothing here imports torch or vllm.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from picbench.engines.planning.chunk_pages import ChunkPages, PageCache, used_pages
from picbench.engines.planning.keys import ChunkEvent, Key, computed_key, root_key
from picbench.engines.planning.pages import GAP, Page, PlacedChunk, SlotKind
from picbench.engines.planning.plan import Canonical, Plan
from picbench.engines.planning.policy import (
    BOS_ANCHOR,
    Anchor,
    ChunkPolicy,
    LayoutConfig,
    Pad,
    PlanChunk,
    Segment,
)


def lay_out(
    segments: Sequence[Segment],
    plan_chunk: PlanChunk,
    layout: LayoutConfig,
    *,
    prefix_keys: Sequence[Key] = (),
    cache: PageCache | None = None,
) -> Plan:
    """Plan a prompt; the pages of chunks in `cache` are not derived again.

    `prefix_keys` are the engine's own keys of the full blocks of the raw prompt. Those of the text
    before the first chunk are used, so that plain requests share these blocks (their KV is the
    same). Raises ValueError for an empty prompt and for linked indices outside a chunk.
    """
    count = sum(len(segment.tokens) for segment in segments)
    if not count:
        raise ValueError("a plan needs at least one token")
    lead = len(_leading_text([segment for segment in segments if segment.tokens]))
    keys = prefix_keys[: lead // layout.block_size]
    return _Builder(_padded(segments, layout), plan_chunk, layout, keys, cache).build(count)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a plan needs: `slots` of the KV pool, `spare` blocks besides, and positions up to `end`.

    Spare are the blocks that its largest compile adds and, for private copies, the canonical blocks
    that they are copied from: without a tier all of these must be resident at once. `end` is the
    logical position of the first generated token; visible pads have positions, too.
    """

    slots: int
    spare: int
    end: int


def measure(segments: Sequence[Segment], plan_chunk: PlanChunk, layout: LayoutConfig) -> Footprint:
    """The footprint of a plan without making it: microseconds a chunk. Raises as `lay_out`."""
    return _Builder(_padded(segments, layout), plan_chunk, layout, ()).measure()


class _Token(NamedTuple):
    """A token that the request computes."""

    token: int
    position: int
    kind: SlotKind


class _Builder:
    """Goes through the segments once; collects chunk views, computed tokens and chunk events."""

    def __init__(
        self,
        segments: Sequence[Segment],
        plan_chunk: PlanChunk,
        layout: LayoutConfig,
        prefix_keys: Sequence[Key],
        cache: PageCache | None = None,
    ) -> None:
        self._chunk_pages = ChunkPages.of if cache is None else cache.find
        self._segments = segments
        self._plan_chunk = plan_chunk
        self._layout = layout
        self._end = sum(len(segment.tokens) for segment in self._segments)
        self._lead = _leading_text(self._segments)
        self._prefix_keys = prefix_keys
        self._mapped: list[PlacedChunk] = []
        self._copied: list[PlacedChunk] = []
        self._canonicals: dict[tuple[Key, tuple[int, ...]], Canonical] = {}
        self._computed: list[_Token] = []
        self._events: list[ChunkEvent] = []

    def build(self, prompt_tokens: int) -> Plan:
        position = chunks = 0
        for segment in self._segments:
            if segment.chunk:
                self._add_chunk(segment, position, chunks)
                chunks += 1
            else:
                self._compute(segment, range(len(segment.tokens)), position, SlotKind.PROMPT)
            position += len(segment.tokens)
        computed = list(self._pack(self._computed, self._events, self._prefix_keys))
        full = [page for page in computed if page.key is not None]
        covered = max((p for page in full for p in page.positions), default=-1)
        return Plan(
            placed=(*self._mapped, *self._copied),
            computed=tuple(computed),
            canonicals=tuple(self._canonicals.values()),
            prompt_tokens=prompt_tokens,
            end=self._end,
            block_size=self._layout.block_size,
            tail_key=full[-1].name if full else root_key(self._layout.scope),
            tail_events=tuple(event for event in self._events if event.start > covered),
            foreign=self._foreign(),
        )

    def measure(self) -> Footprint:
        size, position, index = self._layout.block_size, 0, 0
        slots = spare = held = 0
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        for segment in self._segments:
            if not segment.chunk:
                slots += len(segment.tokens)
            else:
                policy = self._plan_chunk(index, len(segment.tokens))
                linked = self._linked(policy, segment, position)
                pages = -(-len(segment.tokens) // size)
                name = len(segment.tokens), linked
                if name not in known:
                    known[name] = len(used_pages(*name, size))
                used = known[name]
                anchor = -(-len(self._anchor_tokens(policy.anchor)) // size)
                slots += used * size + len(linked)
                held += used if policy.private else 0
                spare = max(spare, anchor + pages - used if used else 0)
                index += 1
            position += len(segment.tokens)
        return Footprint(slots, spare + held, position)

    def _foreign(self) -> tuple[int, ...]:
        """The id of visible pads, if no token of the user's is one; hidden pads repeat a token."""
        if not any(segment.lead or segment.trail for segment in self._segments):
            return ()
        pad = self._layout.pad_token
        return () if any(pad in segment.own for segment in self._segments) else (pad,)

    def _compute(
        self, segment: Segment, indices: Sequence[int], start: int, kind: SlotKind
    ) -> None:
        tokens = segment.tokens
        if segment.lead or segment.trail:
            kinds = (segment.kind(i, kind) for i in indices)
            pairs = zip(indices, kinds, strict=True)
            self._computed += [_Token(tokens[i], start + i, slot) for i, slot in pairs]
        else:
            self._computed += [_Token(tokens[i], start + i, kind) for i in indices]

    def _add_chunk(self, segment: Segment, start: int, index: int) -> None:
        policy = self._plan_chunk(index, len(segment.tokens))
        linked = self._linked(policy, segment, start)
        anchor = self._anchor_tokens(policy.anchor)
        chunk = self._chunk_pages(segment, anchor, self._layout)
        view = chunk.view(linked, private=policy.private)
        anchor_pages = self._anchor_pages(anchor, policy.anchor)
        canonical = Canonical(chunk.pages[-1].name, anchor_pages, chunk.pages, view.used)
        self._events.append(ChunkEvent(start, canonical.key, linked))
        self._compute(segment, linked, start, SlotKind.LINKED)
        if canonical.used:
            self._canonicals.setdefault((canonical.key, canonical.used), canonical)
        if view.pages:
            placed = self._copied if policy.private else self._mapped
            placed.append(PlacedChunk(view, start))

    def _linked(self, policy: ChunkPolicy, segment: Segment, start: int) -> tuple[int, ...]:
        length = len(segment.tokens)
        links = set(policy.linked)
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
            raise ValueError("the model has no BOS token to compile after")
        return (self._layout.bos_token,) * BOS_ANCHOR

    def _anchor_pages(self, tokens: tuple[int, ...], anchor: Anchor) -> tuple[Page, ...]:
        keys = self._prefix_keys if anchor is Anchor.PREFIX else ()
        lead = [_Token(token, i, SlotKind.PROMPT) for i, token in enumerate(tokens)]
        fill = -len(lead) % self._layout.block_size
        lead += [_Token(tokens[-1], GAP, SlotKind.PAD)] * fill if tokens else []
        return tuple(self._pack(lead, (), keys))

    def _pack(
        self, tokens: Sequence[_Token], events: Sequence[ChunkEvent], prefix_keys: Sequence[Key]
    ) -> Iterator[Page]:
        """Pack computed tokens into pages; full ones are keyed by the whole logical prefix."""
        key, seen, size = root_key(self._layout.scope), 0, self._layout.block_size
        ids, positions, kinds = zip(*tokens, strict=True) if tokens else ((), (), ())
        for index, begin in enumerate(range(0, len(tokens), size)):
            page = slice(begin, begin + size)
            last = _last(positions[page])
            upto = bisect_right(events, last, lo=seen, key=lambda event: event.start)
            if index < len(prefix_keys):
                key = prefix_keys[index]
            else:
                key = computed_key(key, ids[page], positions[page], events[seen:upto])
            seen = upto
            full = begin + size <= len(tokens)
            yield Page(ids[page], positions[page], kinds[page], key if full else None)


def _leading_text(segments: Sequence[Segment]) -> tuple[int, ...]:
    texts = takewhile(lambda segment: not segment.chunk, segments)
    return tuple(token for segment in texts for token in segment.tokens)


def _padded(segments: Sequence[Segment], layout: LayoutConfig) -> list[Segment]:
    segments = [segment for segment in segments if segment.tokens]
    return list(_pad_as_paper(segments, layout)) if layout.pad is Pad.PAPER else segments


def _pad_as_paper(segments: Sequence[Segment], layout: LayoutConfig) -> Iterator[Segment]:
    for index, segment in enumerate(segments):
        pads = (layout.pad_token,) * (-len(segment.tokens) % layout.block_size)
        if segment.chunk:
            yield Segment(pads + segment.tokens, chunk=True, lead=len(pads))
        elif index + 1 < len(segments):
            yield Segment(segment.tokens + pads, trail=len(pads))
        else:
            yield segment


def _last(positions: Sequence[int]) -> int:
    """The last visible position; they ascend, and gaps come last."""
    return positions[-1] if positions[-1] != GAP else max(p for p in positions if p != GAP)

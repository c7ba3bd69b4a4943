"""From a prompt's segments to a plan: one mechanism for all algorithms.

An algorithm gives each chunk a `ChunkPolicy`; `lay_out` decides from those which slot holds which
token, at which position, and which chunks must be compiled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from picbench.engines.planning.chunk_pages import ChunkPages, PageCache, used_pages
from picbench.engines.planning.documents import Context
from picbench.engines.planning.keys import ChunkEvent, Key, anchor_key, root_key
from picbench.engines.planning.packing import AnchorText, ComputedTokens, pack, pack_picked
from picbench.engines.planning.pages import Page, PlacedChunk, SlotKind
from picbench.engines.planning.plan import Canonical, Plan
from picbench.engines.planning.policy import (
    Anchor,
    ChunkPolicy,
    DeviationSelection,
    LayoutConfig,
    Pad,
    Picks,
    PlanChunk,
    QuestionSelection,
    Segment,
    answered,
)
from picbench.errors import ConfigError


class PlacedSegment(NamedTuple):
    """A segment and the logical position of its first token."""

    segment: Segment
    start: int

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.segment.tokens)


def place(segments: Sequence[Segment], layout: LayoutConfig) -> list[PlacedSegment]:
    """The segments that have tokens, padded as the layout says, at their positions.

    Raises ConfigError for positions that overlap, or that come with visible pads, which move them.
    """
    segments = [segment for segment in segments if segment.tokens]
    if layout.pad is Pad.PAPER:
        segments = list(_pad_as_paper(segments, layout))
    placed, at = [], 0
    for segment in segments:
        start = at if segment.position is None else segment.position
        if start < at:
            raise ConfigError(
                f"positions overlap: a segment of {len(segment.tokens)} tokens is at position "
                f"{start}, the one before it ends before {at}",
                hint="give positions in the prompt's order, each after the segment before it",
            )
        placed.append(PlacedSegment(segment, start))
        at = placed[-1].end
    return placed


def leading_text(placed: Sequence[PlacedSegment]) -> tuple[int, ...]:
    """The tokens before the first chunk, pads included."""
    texts = takewhile(lambda found: not found.segment.chunk, placed)
    return tuple(token for found in texts for token in found.segment.tokens)


def plain_tokens(placed: Sequence[PlacedSegment]) -> int:
    """The user's tokens that a prompt starts with at positions 0, 1, ...: KV as without a plan."""
    count = 0
    for segment, start in placed:
        if segment.chunk or segment.lead or start != count:
            break
        count += len(segment.own)
        if segment.trail:
            break
    return count


def foreign_tokens(placed: Sequence[PlacedSegment]) -> tuple[int, ...]:
    """Ids of added tokens that none of the user's has; hidden pads repeat one of the user's."""
    added = {token for segment, _ in placed if not segment.plain for token in segment.added}
    for segment, _ in placed:
        added = added and added.difference(segment.own)
    return tuple(sorted(added))


def _pad_as_paper(segments: Sequence[Segment], layout: LayoutConfig) -> Iterator[Segment]:
    for index, segment in enumerate(segments):
        if segment.position is not None:
            raise ConfigError("visible pads move positions", hint="use pad=masked")
        pads = (layout.pad_token,) * (-len(segment.tokens) % layout.block_size)
        if segment.chunk:
            yield segment.framed(lead=pads)
        elif index + 1 < len(segments):
            yield segment.framed(trail=pads)
        else:
            yield segment


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
    same). Raises ValueError for an empty prompt, for linked indices outside a chunk and for what
    `plan_chunk` raises, ConfigError as `place`.
    """
    placed = place(segments, layout)
    count = sum(len(segment.own) for segment, _ in placed)
    if not count:
        raise ValueError("a plan needs at least one token")
    keys = prefix_keys[: plain_tokens(placed) // layout.block_size]
    return _Builder(placed, plan_chunk, layout, keys, cache).build(count)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a plan needs: `slots` of the KV pool, `spare` blocks besides, and positions up to `end`.

    Spare are the blocks that its largest compile adds and, for private copies, the canonical blocks
    that they are copied from: without a tier all must be resident at once. `end` is the position of
    the first generated token; visible pads have positions, too. The largest compile needs
    `compile_slots` and positions up to `compile_end`. `compares` says that a worker picks tokens by
    their deviation, for which the model needs a check layer.
    """

    slots: int
    spare: int
    end: int
    compile_slots: int = 0
    compile_end: int = 0
    compares: bool = False

    @classmethod
    def of(cls, plan: Plan) -> "Footprint":
        """The footprint of a plan that was made."""
        compiles = [c.anchor.blocks + len(c.pages) for c in plan.canonicals]
        added = [n - len(c.used) for n, c in zip(compiles, plan.canonicals, strict=True)]
        return cls(
            slots=len(plan.tokens),
            spare=max(added, default=0) + len(plan.copies),
            end=plan.end,
            compile_slots=max((c.compile_slots for c in plan.canonicals), default=0),
            compile_end=max((c.compile_end for c in plan.canonicals), default=0),
            compares=_compares(plan.picks),
        )


def measure(segments: Sequence[Segment], plan_chunk: PlanChunk, layout: LayoutConfig) -> Footprint:
    """The footprint of a plan without making it: microseconds a chunk. Raises as `lay_out`."""
    return _Builder(place(segments, layout), plan_chunk, layout, ()).measure()


def _compares(picks: Picks | None) -> bool:
    return picks is not None and picks.deviation is not None


class _Builder:
    """Goes through the segments once; collects chunk views, computed tokens and chunk events."""

    def __init__(
        self,
        placed: Sequence[PlacedSegment],
        plan_chunk: PlanChunk,
        layout: LayoutConfig,
        prefix_keys: Sequence[Key],
        cache: PageCache | None = None,
    ) -> None:
        self._chunk_pages = ChunkPages.of if cache is None else cache.find
        self._placed = placed
        self._plan_chunk = answered(plan_chunk)
        self._layout = layout
        self._end = placed[-1].end if placed else 0
        self._lead = leading_text(placed)
        self._prefix_keys = prefix_keys
        self._mapped: list[PlacedChunk] = []
        self._copied: list[PlacedChunk] = []
        self._canonicals: dict[tuple[Key, tuple[int, ...]], Canonical] = {}
        self._computed = ComputedTokens()
        self._anchors: dict[Anchor, tuple[AnchorText, Key]] = {}
        self._events: list[ChunkEvent] = []
        self._selections: set[DeviationSelection | QuestionSelection | None] = set()
        self._lengths: list[int] = []
        self._pickable = 0

    def build(self, prompt_tokens: int) -> Plan:
        chunks = 0
        for segment, start in self._placed:
            if segment.chunk:
                self._add_chunk(segment, start, chunks)
                chunks += 1
            else:
                self._compute(segment, range(len(segment.tokens)), start, SlotKind.PROMPT)
        picks = self._picks()
        computed = self._pack(picks)
        full = [page for page in computed if page.key is not None]
        covered = full[-1].positions[-1] if full else -1  # they ascend
        return Plan(
            placed=(*self._mapped, *self._copied),
            computed=tuple(computed),
            canonicals=tuple(self._canonicals.values()),
            prompt_tokens=prompt_tokens,
            end=self._end,
            block_size=self._layout.block_size,
            tail_key=full[-1].name if full else root_key(self._layout.scope),
            tail_events=tuple(event for event in self._events if event.start > covered),
            foreign=foreign_tokens(self._placed),
            picks=picks,
            temperature=self._layout.temperature,
        )

    def measure(self) -> Footprint:
        size, index = self._layout.block_size, 0
        slots = spare = held = compiled = compile_end = 0
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        for segment, start in self._placed:
            if not segment.chunk:
                slots += len(segment.tokens)
                continue
            policy = self._plan_chunk(index, len(segment.tokens))
            computed, hidden = self._links(policy, segment, start)
            pages = -(-len(segment.tokens) // size)
            name = len(segment.tokens), hidden
            if name not in known:
                known[name] = len(used_pages(*name, size))
            used = known[name]
            self._count(policy, segment, len(computed))
            slots += used * size + len(computed)
            held += used if policy.private else 0
            if used:
                before, _ = self._before(policy, segment)
                spare = max(spare, before.blocks + pages - used)
                compiled = max(compiled, before.blocks * size + len(segment.tokens))
                end = (start if policy.fixed else len(before)) + len(segment.tokens)
                compile_end = max(compile_end, end)
            index += 1
        picks = self._picks()
        slots += picks.count if picks else 0
        sizes = slots, spare + held, self._end, compiled, compile_end
        return Footprint(*sizes, _compares(picks))

    def _pack(self, picks: Picks | None) -> list[Page]:
        size, scope = self._layout.block_size, self._layout.scope
        if picks is not None:
            first = next(segment.tokens[0] for segment, _ in self._placed if segment.chunk)
            return list(pack_picked(picks.count, first, self._computed, size))
        keys = self._prefix_keys
        return list(pack(self._computed, size, scope, events=self._events, prefix_keys=keys))

    def _compute(
        self, segment: Segment, indices: Sequence[int], start: int, kind: SlotKind
    ) -> None:
        tokens = segment.tokens
        if not indices:
            return
        first, after = indices[0], indices[-1] + 1
        if segment.plain and after - first == len(indices):
            self._computed.add_run(tokens[first:after], start + first, kind)
            return
        filled = segment.filled
        for i in indices:
            own = SlotKind.PROMPT if i in filled else segment.kinds(i, 1, kind)[0]
            self._computed.add(filled.get(i, tokens[i]), start + i, own)

    def _add_chunk(self, segment: Segment, start: int, index: int) -> None:
        policy = self._plan_chunk(index, len(segment.tokens))
        computed, hidden = self._links(policy, segment, start)
        self._count(policy, segment, len(computed))
        before, root = self._before(policy, segment)
        first = len(before)
        if policy.fixed:
            first, root = start, anchor_key(self._layout.scope, (), start)
        elif before.context:
            root = Context.of(before.context).key_after(root)
        chunk = self._chunk_pages(segment, root, first, self._layout)
        view, keys, unused = chunk.view(hidden, private=policy.private)
        pages = chunk.pages
        canonical = Canonical(pages[-1].name, before, pages, view.used, keys, unused)
        # What sees a chunk at another temperature is something else.
        seen = b"" if self._layout.temperature == 1 else repr(self._layout.temperature).encode()
        self._events.append(ChunkEvent(start, canonical.key + seen, hidden))
        self._compute(segment, computed, start, SlotKind.LINKED)
        if canonical.used:
            self._canonicals.setdefault((canonical.key, canonical.used), canonical)
        if view.pages:
            placed = self._copied if policy.private else self._mapped
            placed.append(PlacedChunk(view, start))

    def _count(self, policy: ChunkPolicy, segment: Segment, linked: int) -> None:
        """Count a chunk's tokens, of which a worker may pick all that are not linked yet."""
        selection = policy.selection
        if selection is not None and selection.deviation is not None and not policy.private:
            raise ValueError("a chunk whose tokens are picked by deviation must be private")
        if self._layout.temperature != 1 and (policy.private or selection is not None):
            raise ValueError("with a temperature, chunks are shared and their linked tokens known")
        self._selections.add(selection)
        self._lengths.append(len(segment.tokens))
        self._pickable += len(segment.tokens) - linked

    def _picks(self) -> Picks | None:
        """What a worker picks; None where the linked tokens are known, or no other is left."""
        if len(self._selections) > 1:
            raise ValueError("chunks of one prompt have different selections")
        selection = next(iter(self._selections), None)
        if selection is None or not self._pickable:
            return None
        at = 0
        for segment, start in self._placed:
            if start != at or not segment.plain:
                raise ValueError("tokens are picked in prompts without gaps, pads and empty slots")
            at += len(segment.tokens)
        count = min(selection.count(self._lengths), self._pickable)
        return Picks(count, selection.deviation, selection.share is not None)

    def _links(
        self, policy: ChunkPolicy, segment: Segment, start: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Indices of the chunk's tokens that are computed, and of those that are hidden."""
        length, ends_prompt = len(segment.tokens), start + len(segment.tokens) == self._end
        # Compiled after others, a chunk has no attention sink. The prompt's first token is one.
        begins = start == self._placed[0].start and len(self._before(policy, segment)[0]) > 0
        usual = policy.linked
        if isinstance(usual, range) and usual.step == 1 and usual.start >= 0:
            # Most algorithms link the first tokens of every chunk.
            plain = not (segment.dependent or segment.slots or ends_prompt or begins)
            if plain and usual.stop <= length:
                linked = tuple(usual)
                return linked, linked
        links = {*usual, *segment.dependent, *([0] if begins else ())}
        if links and not (min(links) >= 0 and max(links) < length):
            raise ValueError(f"links {sorted(links)} leave a chunk of {length} tokens")
        if not segment.slots:
            if ends_prompt:
                links.add(length - 1)  # the prompt's last token is always computed
            linked = tuple(sorted(links))
            return linked, linked
        placeholders, filled = segment.placeholders, segment.filled
        links -= placeholders
        if ends_prompt:
            seen = [i for i in range(length) if i in filled or i not in placeholders]
            if not seen:
                raise ValueError("the prompt ends in a chunk of empty slots")
            links.add(seen[-1])
        return tuple(sorted(links | filled.keys())), tuple(
            sorted(links - filled.keys() | placeholders)
        )

    def _before(self, policy: ChunkPolicy, segment: Segment) -> tuple[AnchorText, Key]:
        """What a chunk is compiled after, the anchor and its document so far; the anchor's key."""
        known = self._anchors.get(policy.anchor)
        anchor, root = known or self._make_anchor(policy.anchor)
        context = segment.context if self._layout.documents else ()
        if policy.fixed and (anchor.anchor or context):
            raise ValueError("a chunk at a fixed position has neither anchor nor document")
        return replace(anchor, context=context) if context else anchor, root

    def _make_anchor(self, given: Anchor) -> tuple[AnchorText, Key]:
        scope, keys, tokens = self._layout.scope, tuple[Key, ...](), tuple[int, ...]()
        if given.head:
            keys = tuple(self._prefix_keys)
            tokens = self._lead + self._layout.text(given)
        elif given.bos:
            tokens = (self._layout.bos,) * given.bos
        anchor = AnchorText(tokens, self._layout.block_size, scope, keys)
        found = self._anchors[given] = anchor, anchor_key(scope, tokens)
        return found

"""What a plan looks like: its blocks, and which token sees which.

All of it is read from the plan: from the positions of its slots, and from those of the compiles of
its chunks. So it holds for any algorithm.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from itertools import groupby
from typing import NamedTuple, Self

from picbench.engines.planning.layout import PlacedSegment, lay_out, place
from picbench.engines.planning.pages import GAP, Page, PlacedChunk, SlotKind
from picbench.engines.planning.plan import Canonical, Plan
from picbench.engines.planning.policy import LayoutConfig, PlanChunk, Segment


class TokenRole(StrEnum):
    """Where a request has a token's KV from, or that the token is none of the user's.

    `ADDED` tokens (visible pads, BOS, link tokens) are computed, shared or copied as their blocks.
    """

    TEXT = "text"
    LINKED = "linked"
    SHARED = "shared"
    COPIED = "copied"
    ADDED = "added"


_ROLES = {
    SlotKind.PROMPT: TokenRole.TEXT,
    SlotKind.LINKED: TokenRole.LINKED,
    SlotKind.CHUNK: TokenRole.SHARED,
    SlotKind.PRIVATE: TokenRole.COPIED,
    SlotKind.PAD: TokenRole.ADDED,
}


class Sight(IntEnum):
    """What a query sees of a key: the KV that the request has, too, or that only its chunk saw.

    `REPLACED` is canonical KV that the request replaces, `ANCHOR` what a chunk is compiled after.
    """

    NONE = 0
    SEEN = 1
    REPLACED = 2
    ANCHOR = 3


@dataclass(frozen=True, slots=True)
class PlannedToken:
    """A token in one of the ways in which it is computed.

    `position` is the logical one in the prompt; that of an anchor is before its chunk, and may be
    below 0. `compiled` is the index of the chunk (among those that are reused, duplicates apart) in
    whose compile it is computed; None: by the request. `role` is None if the request does not see
    it.
    """

    token: int
    position: int
    compiled: int | None
    role: TokenRole | None
    anchor: bool = False

    def sees(self, key: "PlannedToken") -> bool:
        """Whether it sees a key: one of the same compile, or of all that the request has."""
        if key.position > self.position:
            return False
        if self.compiled is not None:
            return key.compiled == self.compiled
        return key.role is not None


def planned_tokens(plan: Plan, picked: Collection[int] = ()) -> list[PlannedToken]:
    """Every token of a plan, once for each way in which it is computed.

    Those of compiles come first, chunk by chunk, then those that the request computes, in logical
    order. `picked` are the positions that a worker picks in a plan with `picks`, whose
    layers after the check layer this then describes.
    """
    canonicals = {canonical.keys: canonical for canonical in plan.canonicals}
    placed = sorted(plan.placed, key=lambda chunk: chunk.start)
    found: list[PlannedToken] = []
    for index, chunk in enumerate(placed):
        names = chunk.view.copies or tuple(page.name for page in chunk.view.pages)
        found += _compiled(canonicals[names], chunk, index)
    slots = [*_visible(plan.computed)]
    slots += [(t.token, t.position, TokenRole.LINKED) for t in found if t.position in picked]
    slots.sort(key=lambda slot: slot[1])
    found = [replace(t, role=None) if t.position in picked else t for t in found]
    return found + [PlannedToken(token, p, None, role) for token, p, role in slots]


def example_picks(plan: Plan) -> frozenset[int]:
    """Positions that a worker might pick: as many as the plan says, evenly spread over chunks.

    Where it does not pick single tokens, it picks block by block.
    """
    count = plan.picks.count if plan.picks else 0
    if plan.picks is not None and not plan.picks.single:
        pages = [page for view, start in plan.placed for page in view.pages_at(start)]
        blocks = [[p for p in page.positions if p != GAP] for page in pages]
        wanted = -(-count // plan.block_size)
        spread = [(2 * i + 1) * len(blocks) // (2 * wanted) for i in range(wanted)]
        others = [i for i in range(len(blocks)) if i not in spread]
        return frozenset([p for i in (*spread, *others) for p in blocks[i]][:count])
    found = [t.position for t in planned_tokens(plan) if t.role and t.compiled is not None]
    return frozenset(found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count))


def _compiled(canonical: Canonical, chunk: PlacedChunk, index: int) -> Iterator[PlannedToken]:
    roles = {position: role for _, position, role in _visible(chunk.view.pages_at(chunk.start))}
    shift = chunk.start - canonical.pages[0].positions[0]
    for page in canonical.compile_plan().pages:
        for token, position, _ in _visible([page]):
            at = shift + position
            role = roles.get(at) if page.canonical else None
            yield PlannedToken(token, at, index, role, anchor=not page.canonical)


def _visible(pages: Iterable[Page]) -> Iterator[tuple[int, int, TokenRole]]:
    for page in pages:
        for token, position, kind in zip(page.tokens, page.positions, page.kinds, strict=True):
            if position != GAP:
                yield token, position, _ROLES[kind]


class PicturedToken(NamedTuple):
    """A token as the request sees it, and the index of its segment."""

    planned: PlannedToken
    segment: int

    @property
    def role(self) -> TokenRole:
        """Where the request has its KV from."""
        assert self.planned.role is not None
        return self.planned.role


class PicturedSegment(NamedTuple):
    """A segment as it was planned: its name, and its positions [start, end).

    `compiled` of its tokens are compiled, and `fill` invisible pads with them.
    """

    name: str
    start: int
    end: int
    compiled: int
    fill: int


class PicturedBlock(NamedTuple):
    """A block of a plan: "shared", "copied" or "computed", and the tokens in its slots.

    None is a slot that the request does not see. Blocks that are `keyed` are found again.
    """

    kind: str
    keyed: bool
    slots: tuple[PicturedToken | None, ...]


class TokenGroup(NamedTuple):
    """Tokens of one segment and one role, which see the same: indices among a picture's keys."""

    name: str
    role: str
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanPicture:
    """A plan as pictures show it; `tokens` are in logical order, `blocks` in compute order.

    `picked` of the tokens are linked although a plan does not know which: they are an example. Keys
    are the `anchor` tokens that chunks are compiled after, aligned at their ends, then
    `tokens`; `mask` has a row for each token and a byte (`Sight`) for each key.
    """

    segments: tuple[PicturedSegment, ...]
    tokens: tuple[PicturedToken, ...]
    blocks: tuple[PicturedBlock, ...]
    anchor: int
    mask: tuple[bytes, ...]
    picked: int = 0

    @classmethod
    def of(cls, segments: Sequence[Segment], plan_chunk: PlanChunk, layout: LayoutConfig) -> Self:
        """The picture of the plan that `lay_out` makes. Raises as `lay_out`."""
        plan = lay_out(segments, plan_chunk, layout)
        picked = example_picks(plan)
        planned = planned_tokens(plan, picked)
        placed = place(segments, layout)
        tokens = _in_order(planned, placed)
        compiled = _compiled_counts(planned, plan, placed)
        anchors = Counter(token.compiled for token in planned if token.anchor)
        anchor = max(anchors.values(), default=0)
        return cls(
            segments=tuple(
                PicturedSegment(name, at.start, at.end, *counts)
                for name, at, counts in zip(_names(placed), placed, compiled, strict=True)
            ),
            tokens=tokens,
            blocks=tuple(_blocks(plan, tokens)),
            anchor=anchor,
            mask=tuple(_mask(tokens, planned, anchor)),
            picked=len(picked),
        )

    def count(self, role: TokenRole, segment: int | None = None) -> int:
        """Number of tokens of one role, in one segment or in all."""
        return sum(t.role is role and segment in (None, t.segment) for t in self.tokens)

    @property
    def computed(self) -> int:
        """Number of tokens that the request computes when its chunks are resident."""
        return sum(token.planned.compiled is None for token in self.tokens)

    def blocks_of(self, kind: str) -> list[PicturedBlock]:
        """The blocks of one kind."""
        return [block for block in self.blocks if block.kind == kind]

    def groups(self) -> list[TokenGroup]:
        """The tokens by segment, by role and by whether they are compiled, in logical order."""
        found: dict[tuple[int, TokenRole, bool], list[int]] = {}
        for index, token in enumerate(self.tokens):
            name = token.segment, token.role, token.planned.compiled is None
            found.setdefault(name, []).append(self.anchor + index)
        return [
            TokenGroup(self.segments[segment].name, role, tuple(keys))
            for (segment, role, _), keys in found.items()
        ]

    def sights(self, queries: TokenGroup, keys: Iterable[int]) -> set[Sight]:
        """All that the tokens of a group see of some keys."""
        rows = [self.mask[query - self.anchor] for query in queries.keys]
        return {Sight(row[key]) for key in keys for row in rows}


def _in_order(
    planned: Sequence[PlannedToken], placed: Sequence[PlacedSegment]
) -> tuple[PicturedToken, ...]:
    seen = sorted((t for t in planned if t.role), key=lambda token: token.position)
    owners = iter(enumerate(placed))
    index, owner = next(owners)
    tokens = []
    for token in seen:
        while token.position >= owner.end:
            index, owner = next(owners)
        tokens.append(PicturedToken(token, index))
    return tuple(tokens)


def _names(placed: Sequence[PlacedSegment]) -> Iterator[str]:
    """Chunks are numbered; segments without a token of the user's are called added."""
    chunks = 0
    for segment, _ in placed:
        chunks += segment.chunk
        if segment.chunk:
            yield f"chunk {chunks}"
        else:
            yield "text" if segment.own else "added"


def _compiled_counts(
    planned: Sequence[PlannedToken], plan: Plan, placed: Sequence[PlacedSegment]
) -> Iterator[tuple[int, int]]:
    """(tokens, invisible pads) of each segment's compile."""
    starts = {chunk.start for chunk in plan.placed}
    counts = Counter(t.compiled for t in planned if not t.anchor and t.compiled is not None)
    index = 0
    for segment, start in placed:
        if segment.chunk and start in starts:
            yield counts[index], -counts[index] % plan.block_size
            index += 1
        else:
            yield 0, 0


def _blocks(plan: Plan, tokens: Sequence[PicturedToken]) -> Iterator[PicturedBlock]:
    reused = {t.planned.position: t for t in tokens if t.planned.compiled is not None}
    computed = [token for token in tokens if token.planned.compiled is None]
    for page in plan.pages:
        kind = "copied" if page.copy_of else "shared" if page.canonical else "computed"
        slots = tuple(reused.get(position) for position in page.positions)
        if kind == "computed":
            # In logical order; a worker puts what it picks there, too.
            slots = tuple(computed.pop(0) for _ in page.positions)
        yield PicturedBlock(kind, page.key is not None, slots)


def _mask(
    tokens: Sequence[PicturedToken], planned: Sequence[PlannedToken], anchor: int
) -> Iterator[bytes]:
    """A row for each token, a byte (`Sight`) for each key."""
    index = {token.planned.position: anchor + i for i, token in enumerate(tokens)}
    request = [token for token in planned if token.role]
    compiles = {
        compiled: list(run) for compiled, run in groupby(planned, lambda token: token.compiled)
    }
    starts = {
        compiled: next(token.position for token in run if not token.anchor)
        for compiled, run in compiles.items()
    }
    for query, _ in tokens:
        row = bytearray(anchor + len(tokens))
        for key in request if query.compiled is None else compiles[query.compiled]:
            if query.sees(key):
                column, sight = index.get(key.position), Sight.SEEN if key.role else Sight.REPLACED
                if key.anchor:
                    column, sight = anchor + key.position - starts[key.compiled], Sight.ANCHOR
                if column is not None:
                    row[column] = sight
        yield bytes(row)

"""Plans: what sits in every KV slot of a request, where it is seen, and where it comes from.

A plan is all that an engine knows of an algorithm (`layout.py` makes plans). It lists the
request's blocks in *compute order*:

1. canonical pages: the chunks' KV, first those that are mapped (shared with other requests), then
   those that are copied into blocks of the request's own, each in logical order;
2. computed pages: linked tokens and prompt text, packed, in logical order, the last token last.

Canonical pages are resident before a request runs (missing ones are compiled as requests of their
own), and a computed page can only hit if the one before it does, because its key covers the whole
logical prefix. So the hits are a prefix of the compute order whatever the cache holds, the order
never depends on it, and a preempted request keeps its plan.

Every slot has a logical position, or `GAP` if nobody may see it. A key is visible to a query iff
its position is not larger; computed pages stand in logical order and canonical ones before them,
so no visible key ever has a larger compute index. Nothing here imports torch or vllm.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain, groupby, repeat, takewhile
from typing import NamedTuple, Self

from picbench.engines.planning.keys import ChunkEvent, Key, computed_key

#: Position of a slot that no query sees: larger than any position.
GAP = 1 << 30


class Slot(StrEnum):
    """What a slot holds, in the ledger's words."""

    CHUNK = "chunk"
    PRIVATE = "private"
    LINKED = "linked"
    PROMPT = "prompt"
    PAD = "pad"


@dataclass(frozen=True, slots=True)
class Page:
    """One block of a plan, in slots; only the last page of a plan may be short.

    `key` names the content (None: private, never shared). `copy_of` names the canonical block
    that a private page is copied from.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    kinds: tuple[Slot, ...]
    key: Key | None
    canonical: bool = False
    copy_of: Key | None = None

    @property
    def name(self) -> Key:
        """The key of a page that has one."""
        if self.key is None:
            raise ValueError("a private page has no key")
        return self.key

    @property
    def visible(self) -> int:
        """Number of slots that queries may see."""
        return len(self.positions) - self.positions.count(GAP)

    @property
    def real(self) -> int:
        """Number of slots that hold a token of the user's which queries may see."""
        return len(self.kinds) - self.kinds.count(Slot.PAD)


@dataclass(frozen=True, slots=True)
class View:
    """What a request maps of a chunk: `pages` as they are if the chunk begins the prompt.

    Where a chunk stands only adds to positions, and a prompt of 32k tokens has two thousand pages.
    So what a plan says of them slot by slot is worked out once, and plans are put together chunk
    by chunk: `tokens`; runs of `kinds` and their lengths; runs of consecutive `positions` as
    their first (GAP for a run of gaps) and their lengths.

    `used` are the indices of the pages among the chunk's, `anchor` is the position of the chunk's
    first token where it was compiled, `real` the number of slots that hold a token of the user's.
    """

    used: tuple[int, ...]
    pages: tuple[Page, ...]
    anchor: int
    tokens: tuple[int, ...]
    kinds: tuple[tuple[Slot, int], ...]
    positions: tuple[tuple[int, int], ...]
    keys: tuple[Key | None, ...]
    copies: tuple[Key, ...]
    real: int

    @classmethod
    def of(cls, used: tuple[int, ...], pages: tuple[Page, ...], anchor: int) -> Self:
        """A view of some pages of a chunk."""
        return cls(
            used=used,
            pages=pages,
            anchor=anchor,
            tokens=tuple(token for page in pages for token in page.tokens),
            kinds=tuple(_kinds(pages)),
            positions=tuple(_stretches(p for page in pages for p in page.positions)),
            keys=tuple(page.key for page in pages),
            copies=tuple(page.copy_of for page in pages if page.copy_of is not None),
            real=sum(page.real for page in pages),
        )

    def pages_at(self, start: int) -> Iterator[Page]:
        """The pages in a prompt in which the chunk starts at this position."""
        for page in self.pages:
            moved = tuple(p if p == GAP else start + p for p in page.positions)
            yield replace(page, positions=moved)


class Placed(NamedTuple):
    """A chunk's view in a prompt in which the chunk starts at this position."""

    view: View
    start: int


@dataclass(frozen=True, slots=True)
class Canonical:
    """A chunk's canonical KV as one object: compiled, looked up and evicted as a whole.

    `anchor` are the tokens it is compiled behind; the pages of `anchor_pages` hold them and are
    no part of the object. `used` are the indices of the pages that a request maps.
    """

    key: Key
    anchor_pages: tuple[Page, ...]
    pages: tuple[Page, ...]
    used: tuple[int, ...]

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys of the blocks that a request needs resident."""
        return tuple(self.pages[index].name for index in self.used)

    @property
    def unused(self) -> tuple[Key, ...]:
        """Keys of the blocks that belong to the object, but that a request does not map."""
        if len(self.used) == len(self.pages):
            return ()
        spare = sorted(set(range(len(self.pages))).difference(self.used))
        return tuple(self.pages[index].name for index in spare)

    def resident(self, resident: Callable[[Key], bool]) -> bool:
        """Whether a request may use the object: as a whole or not at all."""
        return all(map(resident, self.keys))

    def compile_plan(self) -> "Plan":
        """The plan of the request that computes this object, alone or behind its anchor."""
        pages = (*self.anchor_pages, *self.pages)
        tokens = sum(page.real for page in pages)
        return Plan(
            placed=(),
            rest=pages,
            canonicals=(),
            prompt_tokens=tokens,
            end=sum(page.visible for page in pages),
            block_size=len(pages[0].tokens),
            tail_key=self.key,
        )

    def fetch_plan(self) -> "Plan":
        """The plan of a request whose blocks a remote tier fills; it computes nothing."""
        return replace(self, anchor_pages=()).compile_plan()


@dataclass(frozen=True)
class Plan:
    """A request's blocks in compute order, and the canonical objects that must exist before it.

    First come the pages of the chunks in `placed`, mapped ones before copied ones, then the `rest`.
    `prompt_tokens` is the user's count, `end` the logical position of the first generated token
    (they differ only if pads take positions). Generated tokens fill up the last page and continue
    the chain of keys from `tail_key`, the last full computed page's; `tail_events` are the chunks
    that no full page has accounted for yet.
    """

    placed: tuple[Placed, ...]
    rest: tuple[Page, ...]
    canonicals: tuple[Canonical, ...]
    prompt_tokens: int
    end: int
    block_size: int
    tail_key: Key
    tail_events: tuple[ChunkEvent, ...] = ()

    @cached_property
    def pages(self) -> tuple[Page, ...]:
        """All pages, in compute order."""
        placed = (view.pages_at(start) for view, start in self.placed)
        return (*chain.from_iterable(placed), *self.rest)

    @cached_property
    def keys(self) -> list[Key | None]:
        """The keys of all pages."""
        placed = chain.from_iterable(view.keys for view, _ in self.placed)
        return [*placed, *(page.key for page in self.rest)]

    @cached_property
    def tokens(self) -> list[int]:
        """Token ids slot by slot, in compute order."""
        placed = (view.tokens for view, _ in self.placed)
        rest = (page.tokens for page in self.rest)
        return list(chain.from_iterable(chain(placed, rest)))

    @cached_property
    def positions(self) -> list[int]:
        """Logical positions slot by slot, in compute order."""
        runs = (
            repeat(GAP, count) if first == GAP else range(first, first + count)
            for first, count in self.position_runs()
        )
        return list(chain.from_iterable(runs))

    def position_runs(self) -> Iterator[tuple[int, int]]:
        """Runs of consecutive positions, in compute order: the first and how many; GAP for gaps."""
        for view, start in self.placed:
            yield from ((p if p == GAP else start + p, count) for p, count in view.positions)
        yield from _stretches(position for page in self.rest for position in page.positions)

    @cached_property
    def kinds(self) -> list[Slot]:
        """Slot kinds in compute order."""
        return list(chain.from_iterable(repeat(kind, count) for kind, count in self.kind_runs))

    @cached_property
    def kind_runs(self) -> tuple[tuple[Slot, int], ...]:
        """Slot kinds in compute order, as runs of slots."""
        placed = chain.from_iterable(view.kinds for view, _ in self.placed)
        return (*placed, *_kinds(self.rest))

    @cached_property
    def shared(self) -> int:
        """Number of leading pages that are mapped canonical ones: these must never be computed."""
        if self.placed:
            return sum(len(view.pages) for view, _ in self.placed if not view.copies)
        return sum(1 for _ in takewhile(lambda page: page.canonical, self.rest))

    @property
    def canonical(self) -> int:
        """Number of leading pages that hold canonical KV, mapped or copied."""
        return self.shared + len(self.copies)

    @cached_property
    def copies(self) -> tuple[Key, ...]:
        """Names of the canonical blocks that the pages behind the shared ones are copied from."""
        return tuple(chain.from_iterable(view.copies for view, _ in self.placed))

    @property
    def canonical_slots(self) -> tuple[int, int]:
        """First and behind the last slot of the canonical pages, which stand together."""
        if self.placed:
            return 0, self.canonical * self.block_size
        flags = [page.canonical for page in self.rest]
        first = flags.index(True) if any(flags) else 0
        return first * self.block_size, (first + sum(flags)) * self.block_size

    @cached_property
    def real(self) -> int:
        """Number of slots that hold a token of the user's which queries may see."""
        return sum(v.real for v, _ in self.placed) + sum(page.real for page in self.rest)

    def behind(self, pages: int) -> tuple[Page, ...]:
        """All pages but the first ones."""
        placed = len(self.keys) - len(self.rest)
        return self.rest[pages - placed :] if pages >= placed else self.pages[pages:]

    def count(self, kind: Slot) -> int:
        """Number of slots of one kind."""
        return sum(count for slot, count in self.kind_runs if slot is kind)

    def generated_keys(self, tokens: Sequence[int], known: Sequence[Key]) -> list[Key]:
        """Keys of the pages that generated tokens have filled since `known` were made.

        `tokens` are all of the request's, in compute order: the plan's and the generated ones.
        """
        size = self.block_size
        full = len(self.tokens) // size
        key, events = self.tail_key, self.tail_events
        if len(known) > full:
            key, events = known[-1], ()
        keys = []
        for begin in range(len(known) * size, len(tokens) - size + 1, size):
            positions = [self._position(slot) for slot in range(begin, begin + size)]
            key = computed_key(key, tokens[begin : begin + size], positions, events)
            events = ()
            keys.append(key)
        return keys

    def _position(self, slot: int) -> int:
        planned = len(self.tokens)
        if slot >= planned:
            return self.end + slot - planned
        page, offset = divmod(slot, self.block_size)
        return self.behind(page)[0].positions[offset]


def _kinds(pages: Iterable[Page]) -> Iterator[tuple[Slot, int]]:
    """Runs of one kind, and their lengths."""
    slots = chain.from_iterable(page.kinds for page in pages)
    return ((kind, sum(1 for _ in run)) for kind, run in groupby(slots))


def _stretches(positions: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive positions, and of gaps: the first and how many."""
    first, count = 0, 0
    for position in positions:
        if count and position == (GAP if first == GAP else first + count):
            count += 1
            continue
        if count:
            yield first, count
        first, count = position, 1
    if count:
        yield first, count

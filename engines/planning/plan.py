"""Plans: which KV blocks a request has, and what every slot of them holds.

An algorithm decides what to recompute in each chunk (`policy.py`), `layout.py` turns that into a
plan, and the engine carries out plans without knowing any algorithm. A plan lists the request's
blocks in *compute order*:

1. canonical pages: the chunks' KV, first those mapped from shared blocks, then those copied into
   private ones, each in logical order;
2. computed pages: linked tokens and prompt text, packed, in logical order, the last token last.

    prompt:  text, chunk A = a A, chunk B = b B, question     (a and b are linked)
    plan:    A, B | text, a, b, question                      (canonical | computed)

Canonical pages are resident before the request runs (missing chunks are compiled by requests of
their own). A computed page can only be a cache hit if the page before it is one, because its key
covers the whole logical prefix. So hits are always a prefix of the compute order, whatever the
cache holds: vLLM's "computed tokens are a prefix" stays true, the order does not depend on the
cache, and a preempted request keeps its plan.

Every slot has a logical position, or `GAP` if no query may see it. A key is visible to a query if
its position is not larger. Computed pages are in logical order and canonical ones come before
them, so no visible key has a larger compute index.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, repeat, takewhile
from typing import NamedTuple, Self

from picbench.engines.planning.keys import ChunkEvent, Key, computed_key, pack_numbers
from picbench.engines.planning.packing import AnchorText
from picbench.engines.planning.pages import (
    GAP,
    Page,
    PlacedChunk,
    SlotKind,
    TokenIds,
    kind_runs,
    names_of,
    page_runs,
)
from picbench.engines.planning.policy import Picks


class Canonical(NamedTuple):
    """A chunk's canonical KV: compiled, looked up and evicted as a whole.

    `key` is that of its last page, which covers all of its tokens. `anchor` is in view while it is
    compiled. `used` are the indices of the pages that a request maps or copies, `keys` those of the
    blocks that it needs resident, `unused` those of the others, whose tokens are all linked.
    """

    key: Key
    anchor: AnchorText
    pages: tuple[Page, ...]
    used: tuple[int, ...]
    keys: tuple[Key, ...]
    unused: tuple[Key, ...]

    @classmethod
    def of(cls, anchor: AnchorText, pages: tuple[Page, ...], used: tuple[int, ...]) -> Self:
        """A chunk's canonical KV with the keys that follow from its pages."""
        needed, spare = names_of(pages, used)
        return cls(pages[-1].name, anchor, pages, used, needed, spare)

    @property
    def compile_end(self) -> int:
        """The position after those at which the chunk is compiled."""
        return 1 + self.pages[-1].visible.positions[-1]

    @property
    def compile_slots(self) -> int:
        """Slots that the request which compiles the chunk computes."""
        *first, last = self.pages
        own = sum(len(page.tokens) for page in first) + len(last.visible.tokens)
        return self.anchor.blocks * self.anchor.size + own

    def resident(self, resident: Callable[[Key], bool]) -> bool:
        """Whether all blocks that a request needs are resident: a chunk is used whole or not."""
        return all(map(resident, self.keys))

    def compile_plan(self) -> "Plan":
        """The plan of the request that compiles the chunk after its anchor, to its last token."""
        *first, last = self.pages
        return self._plan((*self.anchor.pages(), *first, last.visible))

    def fetch_plan(self) -> "Plan":
        """The plan of a request whose blocks a tier fills; it computes nothing."""
        return self._plan(self.pages)

    def _plan(self, pages: tuple[Page, ...]) -> "Plan":
        tokens = sum(page.real for page in pages)
        return Plan(
            placed=(),
            computed=pages,
            canonicals=(),
            prompt_tokens=tokens,
            end=self.compile_end,
            block_size=len(self.pages[0].tokens),
            tail_key=self.key,
        )


@dataclass(frozen=True)
class Plan:
    """A request's blocks in compute order, and the chunks that must be resident before it runs.

    First come the pages of the chunks in `placed`, mapped ones before copied ones, then the
    `computed` pages; a request that compiles or fetches a chunk has only the latter. `canonicals`
    names each chunk once. `prompt_tokens` is the user's count, `end` the logical position of the
    first generated token (they differ only if pads take positions). Generated tokens fill up the
    last page and continue the chain of keys from `tail_key`, that of the last full computed page;
    `tail_events` are the chunks that no full page's key covers yet. `foreign` are the token ids
    that only pads have: no token of the user's prompt is one of them.

    With `picks` a worker decides which tokens are linked. The plan reserves as many slots, the
    first computed ones, with the position GAP and a token that stands for any other. The worker
    gives all computed slots their tokens, again in logical order, and hides as many canonical
    slots. No computed page has a key, as none of its content is known before.

    The scores of canonical keys are divided by the `temperature` (`LayoutConfig`).
    """

    placed: tuple[PlacedChunk, ...]
    computed: tuple[Page, ...]
    canonicals: tuple[Canonical, ...]
    prompt_tokens: int
    end: int
    block_size: int
    tail_key: Key
    tail_events: tuple[ChunkEvent, ...] = ()
    foreign: tuple[int, ...] = ()
    picks: Picks | None = None
    temperature: float = 1.0

    @cached_property
    def pages(self) -> tuple[Page, ...]:
        """All pages, in compute order."""
        placed = (view.pages_at(start) for view, start in self.placed)
        return (*chain.from_iterable(placed), *self.computed)

    @cached_property
    def keys(self) -> list[Key | None]:
        """The keys of all pages."""
        placed = chain.from_iterable(view.keys for view, _ in self.placed)
        return [*placed, *(page.key for page in self.computed)]

    @cached_property
    def tokens(self) -> TokenIds:
        """Token ids slot by slot, in compute order."""
        tokens = TokenIds()
        for view, _ in self.placed:
            tokens += view.tokens
        for page in self.computed:
            tokens.extend(page.tokens)
        return tokens

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
        yield from page_runs(self.computed)

    def cached_at_runs(self) -> Iterator[tuple[int, int]]:
        """Runs of positions at which canonical keys were compiled, as `position_runs`.

        GAP for runs of computed slots. Hidden slots of a chunk were compiled at a position, too.
        """
        for view, _ in self.placed:
            yield from view.cached_at
        for canonical, run in groupby(self.computed, key=lambda page: page.canonical):
            pages = list(run)
            first = pages[0].positions[0] if canonical else GAP
            yield first, sum(len(page.tokens) for page in pages)

    @cached_property
    def kinds(self) -> list[SlotKind]:
        """Kinds slot by slot, in compute order."""
        return list(chain.from_iterable(repeat(kind, count) for kind, count in self.kind_runs))

    @cached_property
    def kind_runs(self) -> tuple[tuple[SlotKind, int], ...]:
        """Runs of slots of one kind, in compute order: the kind and how many.

        For each token that a worker picks it hides a canonical slot; here the first ones stand for
        those.
        """
        placed = chain.from_iterable(view.kinds for view, _ in self.placed)
        runs = (*placed, *kind_runs(self.computed))
        return runs if self.picks is None else tuple(_hidden(runs, self.picks.count))

    @property
    def filled(self) -> int:
        """Number of leading pages that are complete once the plan's slots are computed.

        A chunk's last page is, however few tokens it has.
        """
        if self.computed and self.computed[-1].canonical:
            return len(self.keys)
        return len(self.tokens) // self.block_size

    @cached_property
    def shared(self) -> int:
        """Number of leading pages mapped from shared blocks: these are never computed."""
        if self.placed:
            return sum(len(view.pages) for view, _ in self.placed if not view.copies)
        return sum(1 for _ in takewhile(lambda page: page.canonical, self.computed))

    @property
    def canonical(self) -> int:
        """Number of leading pages that hold canonical KV, mapped or copied."""
        return self.shared + len(self.copies)

    @cached_property
    def copies(self) -> tuple[Key, ...]:
        """Keys of the canonical blocks that the pages after the shared ones are copied from."""
        return tuple(chain.from_iterable(view.copies for view, _ in self.placed))

    @cached_property
    def real(self) -> int:
        """Number of slots that hold a visible token of the user's."""
        placed = sum(view.real for view, _ in self.placed)
        hidden = self.picks.count if self.picks else 0
        return placed + sum(page.real for page in self.computed) - hidden

    def pages_from(self, index: int) -> tuple[Page, ...]:
        """The pages from an index on, in compute order."""
        placed = len(self.keys) - len(self.computed)
        return self.computed[index - placed :] if index >= placed else self.pages[index:]

    def count(self, kind: SlotKind) -> int:
        """Number of slots of one kind."""
        return sum(count for slot, count in self.kind_runs if slot is kind)

    def generated_keys(self, tokens: Sequence[int], known: Sequence[Key]) -> list[Key]:
        """Keys of the full pages after those of `known`, which generated tokens have filled.

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
            ids = tokens[begin : begin + size]
            key = computed_key(key, pack_numbers(ids), pack_numbers(positions), events)
            events = ()
            keys.append(key)
        return keys

    def _position(self, slot: int) -> int:
        planned = len(self.tokens)
        if slot >= planned:
            return self.end + slot - planned
        page, offset = divmod(slot, self.block_size)
        return self.pages_from(page)[0].positions[offset]


def _hidden(runs: tuple[tuple[SlotKind, int], ...], count: int) -> Iterator[tuple[SlotKind, int]]:
    """Runs of kinds in which the first `count` slots of chunks count as pads."""
    for kind, length in runs:
        pads = min(count, length) if kind in (SlotKind.PRIVATE, SlotKind.CHUNK) else 0
        count -= pads
        yield from ((k, n) for k, n in ((SlotKind.PAD, pads), (kind, length - pads)) if n)

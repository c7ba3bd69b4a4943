"""The blocks of a plan, slot by slot: single pages, and a chunk's pages as a request maps them.

A page is the content of one KV block.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Self

from picbench.engines.planning.keys import Key

if TYPE_CHECKING:
    Ids = array[int]
else:
    Ids = array  # has no item type at run time


class TokenIds(Ids):
    """Token ids of four bytes each, where vLLM has a list of them and appends what it generates.

    A prompt of 32k tokens is joined, copied, sent and read as bytes, not one object after another.
    Raises OverflowError for an id that does not fit.
    """

    __slots__ = ()

    def __new__(cls, ids: Iterable[int] = ()) -> Self:
        """Of other `TokenIds`, a copy."""
        return super().__new__(cls, "i", ids)  # type: ignore[return-value]

    def copy(self) -> list[int]:
        """The ids as a list, which vLLM may extend and pass on."""
        return self.tolist()

    def clear(self) -> None:
        """Remove all ids."""
        del self[:]


#: Position of a slot that no query sees: larger than any position.
GAP = 1 << 30

_KIND = itemgetter(0)


class SlotKind(StrEnum):
    """What a slot holds; the names are the block ledger's."""

    CHUNK = "chunk"
    PRIVATE = "private"
    LINKED = "linked"
    PROMPT = "prompt"
    PAD = "pad"


class Page(NamedTuple):
    """One block of a plan, in slots; only the last page of a plan may be short.

    `key` names the content (None: never shared), `copy_of` the block that it is copied from.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    kinds: tuple[SlotKind, ...]
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
    def real(self) -> int:
        """Number of slots that hold a visible token of the user's."""
        return len(self.kinds) - self.kinds.count(SlotKind.PAD)

    @property
    def visible(self) -> "Page":
        """A canonical page without the slots at its end that no query sees."""
        end = bisect_left(self.positions, GAP)  # they ascend, and gaps come last
        if end == len(self.positions):
            return self
        return self._replace(
            tokens=self.tokens[:end], positions=self.positions[:end], kinds=self.kinds[:end]
        )


@dataclass(frozen=True, slots=True)
class ChunkView:
    """The pages that a request maps or copies of a chunk, as if the chunk began the prompt.

    A chunk's place in a prompt only shifts its positions, and a prompt of 32k tokens has two
    thousand pages. So everything that a plan lists by slot is derived once for each view, and a
    plan is put together chunk by chunk: `tokens` by slot, `kinds` as runs (kind, length), and
    `positions` as runs of consecutive ones (first, length), where a first of GAP means gaps. In
    the same form `cached_at` are the positions at which the chunk was compiled.

    `used` are the indices of `pages` among the chunk's, `real` is the number of slots that hold a
    token of the user's.
    """

    used: tuple[int, ...]
    pages: tuple[Page, ...]
    tokens: TokenIds
    kinds: tuple[tuple[SlotKind, int], ...]
    positions: tuple[tuple[int, int], ...]
    cached_at: tuple[tuple[int, int], ...]
    keys: tuple[Key | None, ...]
    copies: tuple[Key, ...]
    real: int

    @classmethod
    def of(cls, used: tuple[int, ...], pages: tuple[Page, ...], anchor: int) -> Self:
        """Derive the view from its pages; the chunk's first token was compiled at `anchor`."""
        size = len(pages[0].tokens) if pages else 0
        return cls(
            used=used,
            pages=pages,
            tokens=TokenIds(chain.from_iterable(page.tokens for page in pages)),
            kinds=tuple(kind_runs(pages)),
            positions=tuple(page_runs(pages)),
            cached_at=tuple((anchor + i * size, n * size) for i, n in position_runs(used)),
            keys=tuple(page.key for page in pages),
            copies=tuple(page.copy_of for page in pages if page.copy_of is not None),
            real=sum(page.real for page in pages),
        )

    def pages_at(self, start: int) -> Iterator[Page]:
        """The pages in a prompt in which the chunk starts at position `start`."""
        for page in self.pages:
            moved = tuple(p if p == GAP else start + p for p in page.positions)
            yield page._replace(positions=moved)


class PlacedChunk(NamedTuple):
    """A chunk's view in a prompt in which the chunk starts at position `start`."""

    view: ChunkView
    start: int


def names_of(
    pages: Sequence[Page], used: tuple[int, ...]
) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """Keys of the pages with these indices, and of the others."""
    spare = [] if len(used) == len(pages) else sorted(set(range(len(pages))).difference(used))
    return tuple(pages[i].name for i in used), tuple(pages[i].name for i in spare)


def kind_runs(pages: Iterable[Page]) -> Iterator[tuple[SlotKind, int]]:
    """Runs of slots of one kind: the kind and how many."""
    runs = chain.from_iterable(_kinds(page.kinds) for page in pages)
    return ((kind, sum(count for _, count in same)) for kind, same in groupby(runs, key=_KIND))


def _kinds(kinds: tuple[SlotKind, ...]) -> Iterable[tuple[SlotKind, int]]:
    one_kind = kinds.count(kinds[0]) == len(kinds)
    return ((kinds[0], len(kinds)),) if one_kind else ((kind, 1) for kind in kinds)


def position_runs(positions: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive positions: the first and how many; GAP for a run of gaps."""
    return _joined((position, 1) for position in positions)


def page_runs(pages: Iterable[Page]) -> Iterator[tuple[int, int]]:
    """Runs of the positions of pages, as `position_runs`; those of a page ascend, but for gaps."""
    return _joined(chain.from_iterable(map(_runs, pages)))


def _runs(page: Page) -> Iterable[tuple[int, int]]:
    positions, count = page.positions, len(page.positions)
    whole = positions[-1] - positions[0] == count - 1 and GAP not in positions
    return ((positions[0], count),) if whole else ((position, 1) for position in positions)


def _joined(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Runs of which none continues the one before it."""
    first, count = 0, 0
    for begin, length in runs:
        if count and begin == (GAP if first == GAP else first + count):
            count += length
            continue
        if count:
            yield first, count
        first, count = begin, length
    if count:
        yield first, count

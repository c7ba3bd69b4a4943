"""The record of a chunk, its states, and what the chunk store needs of the block pool."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from picbench.engines.planning.keys import Key, pack_numbers
from picbench.engines.planning.plan import Canonical
from picbench.errors import EngineError


class ChunkState(StrEnum):
    """Where a chunk is, or how it is on its way; see the picture in `ChunkStore`."""

    UNKNOWN = "unknown"
    LOOKUP = "lookup"  # being looked up in the tiers
    MISSING = "missing"  # neither in the pool nor in a tier
    REMOTE = "remote"  # in a tier only
    COMPILING = "compiling"  # a request of its own computes it
    FETCHING = "fetching"  # a request of its own waits for a tier to load it
    STORING = "storing"  # compiled for copies, in the pool until a tier takes it
    RESIDENT = "resident"  # in the pool, with or without a copy in a tier


#: The states that may follow each state.
TRANSITIONS = {
    "unknown": {"lookup", "missing", "remote", "compiling"},
    "lookup": {"unknown", "missing", "remote"},
    "missing": {"unknown", "remote", "compiling"},
    "remote": {"unknown", "missing", "fetching"},
    "compiling": {"unknown", "missing", "remote", "storing", "resident"},
    "fetching": {"unknown", "missing", "remote", "storing", "resident"},
    "storing": {"unknown", "lookup", "missing", "remote", "compiling", "fetching", "resident"},
    "resident": {"unknown", "lookup", "missing", "remote", "compiling", "fetching", "storing"},
}


class PagePool(Protocol):
    """The block pool; keys are those of canonical pages."""

    @property
    def usable(self) -> int:
        """Blocks that requests can use."""

    def resident(self, key: Key) -> bool:
        """Whether a block holds the page."""

    def in_use(self, key: Key) -> bool:
        """Whether the page's block is referenced."""

    def block_id(self, key: Key) -> int:
        """The block of a resident page."""

    def refresh(self, keys: Iterable[Key]) -> None:
        """Make idle pages the last to be evicted."""

    def discard(self, keys: Iterable[Key]) -> None:
        """Forget idle pages, and make their blocks the first to be reused."""

    def hold(self, key: Key) -> Any:
        """Reference the page's block and return it; None if it is not resident."""

    def release(self, blocks: list[Any]) -> None:
        """Drop references."""


@dataclass(slots=True)
class ChunkRecord:
    """What is known of one chunk. Only `ChunkStore` changes it.

    `content` is a digest of its tokens alone: chunks of other tenants and algorithms have the same.
    `pages` are resident; they are fewer than `size` if a page that no request maps was evicted
    while others were in use. `size` is 0 unless the chunk is resident. `owner` is the id of the
    request that compiles or fetches it, `pins` are blocks referenced for `pin`, `tiers` is what is
    known of the tiers (UNKNOWN, LOOKUP, MISSING or REMOTE). `storing` is set while a chunk that was
    compiled for copies waits for a tier. `missed` is why it was compiled last: it was new, was
    evicted before, or a tier lost it. `last_use` and `lost_at` are in seconds of the clock.
    """

    key: Key
    state: ChunkState = ChunkState.UNKNOWN
    pages: tuple[Key, ...] = ()
    owner: str | None = None
    pins: tuple[Any, ...] = ()
    tiers: ChunkState = ChunkState.UNKNOWN
    storing: Canonical | None = None
    size: int = 0
    tokens: int = 0
    hits: int = 0
    last_use: float = 0.0
    missed: str = ""
    losses: int = 0
    lost_at: float = 0.0
    content: bytes = b""

    def enter(self, state: ChunkState) -> None:
        """Change the state; nothing else does. Raises EngineError for one that must not follow."""
        if state is not self.state and state not in TRANSITIONS[self.state]:
            raise EngineError(f"chunk {self.name} is {self.state}, it cannot become {state}")
        self.state = state

    @property
    def name(self) -> str:
        """The start of the key, in hexadecimal."""
        return self.key.hex()[2:14]

    @property
    def whole(self) -> bool:
        """Whether the chunk is resident with all of its pages."""
        return 0 < self.size == len(self.pages)


def content_of(canonical: Canonical) -> bytes:
    """A digest of a chunk's tokens, whatever it is compiled after and for whom."""
    tokens = [token for page in canonical.pages for token in page.visible.tokens]
    return hashlib.sha256(pack_numbers(tokens)).digest()[:16]

"""Which chunks lie in a remote tier, as far as the scheduler knows."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum

from picbench.engines.chunk_cache.transfers import TransferResults
from picbench.engines.planning.keys import Key

#: Chunks that are remembered at most: 100 bytes each.
_MOST = 1 << 20

#: A chunk that was lost so often is no longer looked for in tiers, for so many seconds.
_CHANCES, _BAN = 2, 60.0


class Place(Enum):
    """What is known of a chunk that is not resident."""

    REMOTE = "remote"
    MISSING = "missing"
    ASKED = "asked"
    UNKNOWN = "unknown"


class TierIndex:
    """Answers where a chunk is, without waiting for a tier.

    With `asks`, a chunk that nothing is known of is asked for, because others may have stored it;
    otherwise the tiers hold what this engine stored, and nothing else. What the directory says may
    be out of date: a load that fails says so, and the chunk counts as missing. A chunk that is lost
    again and again counts as missing for a while, whatever the tiers say: a tier that takes values
    and gives none must not keep a request going round between compiling and loading.
    """

    def __init__(self, *, asks: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._asks = asks
        self._clock = clock
        self._known: OrderedDict[Key, Place] = OrderedDict()
        self._lost: OrderedDict[Key, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return sum(place is Place.REMOTE for place in self._known.values())

    def where(self, key: Key) -> Place:
        """Where a chunk is."""
        return self._known.get(key, Place.UNKNOWN if self._asks else Place.MISSING)

    def asked(self, key: Key) -> None:
        """The tiers are being asked for a chunk."""
        self._set([key], Place.ASKED)

    def settle(self, key: Key) -> None:
        """A chunk that was missing is being compiled: ask again when it is gone next time."""
        if self._known.get(key) is Place.MISSING:
            del self._known[key]

    def update(self, reports: TransferResults) -> None:
        """Take over what the workers found."""
        for key in reports.lost:
            self._lose(key)
        found = reports.present | reports.stored
        banned = {key for key in found if self._banned(key)}
        self._set(found - banned, Place.REMOTE)
        self._set(reports.absent | reports.lost | banned, Place.MISSING)

    def clear(self) -> None:
        """The tiers were emptied."""
        self._known.clear()
        self._lost.clear()

    def _set(self, keys: Iterable[Key], place: Place) -> None:
        for key in keys:
            self._known[key] = place
            self._known.move_to_end(key)
        while len(self._known) > _MOST:
            self._known.popitem(last=False)

    def _lose(self, key: Key) -> None:
        times, _ = self._lost.pop(key, (0, 0.0))
        self._lost[key] = (times + 1, self._clock())
        while len(self._lost) > _MOST:
            self._lost.popitem(last=False)

    def _banned(self, key: Key) -> bool:
        times, last = self._lost.get(key, (0, 0.0))
        if times and self._clock() - last > _BAN:
            del self._lost[key]
            return False
        return times >= _CHANCES

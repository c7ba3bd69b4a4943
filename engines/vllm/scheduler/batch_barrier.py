"""The barrier of `compile_order` batch: all missing chunks first, then the requests."""

from collections.abc import Collection, Mapping

from picbench.engines.planning.keys import Key


class BatchBarrier:
    """Holds waiting requests back until the missing chunks of all of them were compiled.

    A batch is what waits when every request of the batch before it has been scheduled or has gone.
    Requests that arrive later are held back until theirs begins. The barrier waits once for each
    chunk: one that is evicted again is compiled for the first request that needs it, as without a
    barrier, so that every batch ends in a pool of any size.
    """

    def __init__(self) -> None:
        self._members: set[str] = set()
        self._pending: set[Key] = set()
        self._later: set[str] = set()

    def update(self, waiting: Mapping[str, Collection[Key]]) -> None:
        """Note which requests wait that were never scheduled, and the chunks that each misses."""
        self._members &= waiting.keys()
        if not self._members:
            self._members = set(waiting)
            self._pending = {key for keys in waiting.values() for key in keys}
        else:
            self._pending &= {key for name in self._members for key in waiting[name]}
        self._later = waiting.keys() - self._members

    def waits_for(self, key: Key) -> bool:
        """Whether the batch waits for a chunk, which is compiled before all of its requests."""
        return key in self._pending

    def is_later(self, request_id: str) -> bool:
        """Whether a request waits for a batch that has not begun."""
        return request_id in self._later

    def holds_back(self, request_id: str) -> bool:
        """Whether a request must not be scheduled yet."""
        return self.is_later(request_id) or (bool(self._pending) and request_id in self._members)

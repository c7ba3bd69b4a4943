"""How many blocks requests hold together that run at the same time."""

from collections import Counter

from picbench.profile.reuse.reuse_counts import RequestReuse


class HeldBlocks:
    """The blocks of the requests that were added and not dropped: shared ones count once."""

    def __init__(self) -> None:
        self.peak = 0
        self._users: Counter[int | bytes] = Counter()
        self._blocks = 0

    def add(self, request: RequestReuse) -> None:
        """A request begins."""
        self._blocks += request.own_blocks
        for key, blocks in request.shared:
            if not self._users[key]:
                self._blocks += blocks
            self._users[key] += 1

    def note(self, others: int = 0) -> None:
        """A step: the requests hold all their blocks, and `others`, which may be negative."""
        self.peak = max(self.peak, self._blocks + others)

    def drop(self, request: RequestReuse) -> None:
        """A request that was added has ended."""
        self._blocks -= request.own_blocks
        for key, blocks in request.shared:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._blocks -= blocks

"""How many blocks requests hold together, when so many run at a time."""

from collections import Counter, deque

from picbench.profile.reuse.reuse_counts import RequestReuse


class HeldBlocks:
    """The blocks of the last `running` requests: shared ones count once."""

    def __init__(self, running: int) -> None:
        self.peak = 0
        self._running = running
        self._last: deque[RequestReuse] = deque()
        self._users: Counter[int | bytes] = Counter()
        self._blocks = 0

    def add(self, request: RequestReuse) -> None:
        """A request begins, and the one that began `running` requests before it has ended."""
        self._last.append(request)
        self._blocks += request.own_blocks
        for key, blocks in request.shared:
            if not self._users[key]:
                self._blocks += blocks
            self._users[key] += 1
        if len(self._last) > self._running:
            self._drop(self._last.popleft())
        self.peak = max(self.peak, self._blocks)

    def _drop(self, request: RequestReuse) -> None:
        self._blocks -= request.own_blocks
        for key, blocks in request.shared:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._blocks -= blocks

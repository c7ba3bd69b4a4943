"""Tiers with something wrong: each wraps a good one and spoils one thing."""

from collections.abc import Sequence
from threading import Event
from typing import ClassVar, Self

from picbench.engines.chunk_cache.tiers.backends.host import Host
from picbench.engines.chunk_cache.tiers.tier import Allocate, Buffer, Key, Tier, TierSpec


class Far(Tier):
    """A host that counts as a far tier: calls go through deadlines, and they are recorded."""

    kind: ClassVar[str] = "far"
    summary: ClassVar[str] = "a host, for tests"
    notation: ClassVar[str] = "far"

    def __init__(self, name: str = "far", capacity: int = 1 << 20) -> None:
        self.name = name
        self.inner = Host(capacity)
        self.calls: list[str] = []

    @classmethod
    def open(cls, spec: TierSpec, allocate: Allocate) -> Self:
        return cls()

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        self.calls.append("exists")
        return self.inner.exists(keys)

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        self.calls.append("put")
        return self.inner.put(items)

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        self.calls.append("get")
        return self.inner.get(keys)

    def delete(self, keys: Sequence[Key]) -> None:
        self.calls.append("delete")
        self.inner.delete(keys)

    def close(self) -> None:
        self.calls.append("close")


class Dead(Far):
    """Raises on every call while `dead`."""

    dead = True

    def _check(self) -> None:
        if self.dead:
            raise ConnectionRefusedError("connection refused")

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        answer = super().exists(keys)
        self._check()
        return answer

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        answer = super().put(items)
        self._check()
        return answer

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        answer = super().get(keys)
        self._check()
        return answer


class ReadOnly(Far):
    """Raises on every write while `locked`."""

    locked = True

    def _refuse(self, call: str) -> None:
        self.calls.append(call)
        raise OSError(30, "Read-only file system")

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        if self.locked:
            self._refuse("put")
        return super().put(items)

    def delete(self, keys: Sequence[Key]) -> None:
        if self.locked:
            self._refuse("delete")
        super().delete(keys)


class Stuck(Far):
    """Answers nothing until `released` is set, be it ten seconds or a day."""

    def __init__(self, name: str = "stuck") -> None:
        super().__init__(name)
        self.released = Event()
        self.entered = 0

    def _wait(self) -> None:
        self.entered += 1
        self.released.wait()

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        self._wait()
        return super().exists(keys)

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        self._wait()
        return super().put(items)

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        self._wait()
        return super().get(keys)


class Lying(Far):
    """Says that it holds everything, and holds nothing."""

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        return [True] * len(keys)

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        return [None] * len(keys)


class Miscounting(Far):
    """Forgets an answer."""

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        return super().get(keys)[1:]


class Flipping(Far):
    """Changes a bit of every value on its way out."""

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        return [None if value is None else _flip(bytes(value)) for value in super().get(keys)]


class Swapping(Far):
    """Answers with the values of other keys."""

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        return super().get(keys)[::-1]


class Torn(Far):
    """Loses the end of every value."""

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        return [None if value is None else bytes(value)[:-1] for value in super().get(keys)]


class Full(Far):
    """Keeps nothing."""

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        return [False] * len(items)


def _flip(value: bytes) -> bytes:
    middle = len(value) // 2
    return value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]

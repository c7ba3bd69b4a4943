"""Host memory as a tier of bytes by key, after other tiers or without an engine.

Where it is an engine's nearest tier, workers copy rows of the KV pool straight to and from memory
that is allocated once (`Arena` in engines/chunk_cache/arena.py): no value leaves the process, so
none is sealed.
"""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import ClassVar, Self

from picbench.engines.chunk_cache.tiers.envelope import copy_bytes
from picbench.engines.chunk_cache.tiers.tier import Allocate, Buffer, Key, Tier, TierSpec, pageable
from picbench.engines.config import physical_memory


class Host(Tier):
    """A bounded pool of this process's memory, least recently used out first.

    Each value is an allocation of its own, so an evicted one stays valid for its readers: memory in
    use is at most `capacity`, values that are being copied included, plus what readers hold.
    """

    kind: ClassVar[str] = "host"
    summary: ClassVar[str] = "memory of this machine, pinned where a GPU reads it"
    notation: ClassVar[str] = "host:4GiB"
    immediate: ClassVar[bool] = True

    def __init__(self, capacity: int, allocate: Allocate = pageable) -> None:
        self.name = self.kind
        self._capacity = capacity
        self._allocate = allocate
        self._lock = Lock()
        self._values: OrderedDict[Key, memoryview] = OrderedDict()
        self._bytes = 0

    @classmethod
    def open(cls, spec: TierSpec, allocate: Allocate) -> Self:
        """``host:4GiB``: the capacity is required."""
        return cls(cls.capacity_of(spec), allocate)

    @classmethod
    def check(cls, spec: TierSpec) -> None:
        """Refuse all but a capacity."""
        cls.capacity_of(spec)

    @classmethod
    def probe(cls, spec: TierSpec) -> None:
        """Refuse a capacity beyond the machine's memory."""
        if cls.capacity_of(spec) > (size := physical_memory()):
            spec.reject(f"this machine has {size >> 20:,} MiB of memory", "lower the capacity")

    @classmethod
    def capacity_of(cls, spec: TierSpec) -> int:
        """The capacity in bytes that a spec gives; raises ConfigError for any other spec."""
        if spec.location:  # A malformed size ends up there.
            spec.reject(f"{spec.location!r} is not a size", f"write {cls.notation}, with a unit")
        spec.check_options()
        return spec.require_capacity()

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether a value is there, per key."""
        with self._lock:
            return [key in self._values for key in keys]

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        """Copy values into fresh memory; False for what exceeds the capacity or memory."""
        return [self._put(key, memoryview(value)) for key, value in items]

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        """Read-only views of the values; no copies."""
        with self._lock:
            return [self._touch(key) for key in keys]

    def delete(self, keys: Sequence[Key]) -> None:
        """Drop values."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._values.clear()
            self._bytes = 0

    def _put(self, key: Key, value: memoryview) -> bool:
        if not self._reserve(key, value.nbytes):
            return False
        try:
            copy = self._allocate(value.nbytes)
            copy_bytes(copy, value)
        except MemoryError:
            with self._lock:
                self._bytes -= value.nbytes
            return False
        with self._lock:
            self._drop(key)
            self._values[key] = copy
        return True

    def _reserve(self, key: Key, nbytes: int) -> bool:
        """Count `nbytes` as held, at the cost of the values used least recently."""
        with self._lock:
            if nbytes <= self._capacity:
                self._drop(key)
                while self._values and self._bytes + nbytes > self._capacity:
                    self._drop(next(iter(self._values)))
            # With nothing left to evict, other threads may still be copying what they reserved.
            fits = self._bytes + nbytes <= self._capacity
            self._bytes += nbytes if fits else 0
            return fits

    def _drop(self, key: Key) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= value.nbytes

    def _touch(self, key: Key) -> memoryview | None:
        value = self._values.get(key)
        if value is None:
            return None
        self._values.move_to_end(key)
        return value.toreadonly()

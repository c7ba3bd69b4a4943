"""A Mooncake Store: the pooled memory of many machines."""

from collections.abc import Sequence
from threading import Lock
from typing import Any, ClassVar, Self

from picbench.engines.chunk_cache.tiers.tier import Allocate, Buffer, Key, Tier, TierSpec

_OPTIONS = ("host", "metadata", "protocol", "device", "buffer")
_SEGMENT = 256 << 20
_BUFFER = 256 << 20

# Codes of the store (mooncake-store/include/types.h): no room for an object, invalid (too large).
_NO_ROOM = frozenset({-200, -600, -10})


class Mooncake(Tier):
    """Values under ``picbench-<hexadecimal key>`` in a Mooncake Store.

    Every process that opens the tier adds `segment` bytes of its memory to the pool, and the pool's
    master evicts. `buffer` bytes are kept for transfers and bound the size of a value.
    """

    kind: ClassVar[str] = "mooncake"
    summary: ClassVar[str] = "Mooncake Store, the pooled memory of many machines"
    notation: ClassVar[str] = "mooncake:master:50051:4GiB?host=10.0.0.2&protocol=tcp&buffer=256MiB"

    def __init__(self, library: Any, arguments: Sequence[str | int], *, name: str) -> None:
        self.name = name
        self._library = library
        self._arguments = arguments
        self._lock = Lock()
        self._store: Any = None

    @classmethod
    def open(cls, spec: TierSpec, allocate: Allocate) -> Self:
        """``mooncake:master:port[:segment][?...]``; the segment is this process's share."""
        master = cls.check(spec)
        options = spec.options
        arguments = (
            options.get("host", "127.0.0.1"),
            options.get("metadata", "P2PHANDSHAKE"),
            spec.capacity or _SEGMENT,
            spec.size("buffer", _BUFFER),
            options.get("protocol", "tcp"),
            options.get("device", ""),
            master,
        )
        library = spec.import_client("mooncake.store")
        return cls(library, arguments, name=f"{cls.kind}:{master}")

    @classmethod
    def check(cls, spec: TierSpec) -> str:
        """The master; refuse what has none, and sizes that are none."""
        spec.check_options(*_OPTIONS)
        spec.size("buffer", _BUFFER)
        master = spec.require_location("the master's address", cls.notation)
        # A malformed segment ends up after the port; in a URL, masters are elected.
        if "://" not in master and not master.rpartition(":")[2].isdecimal():
            spec.reject(f"{master!r} does not end in a port", f"write {cls.notation}")
        return master

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether the master lists a value, per key; raises OSError if it does not answer."""
        codes = self._connected().batch_is_exist([_name(key) for key in keys])
        if any(code < 0 for code in codes):
            raise OSError(f"the store answers {min(codes)}")
        return [code == 1 for code in codes]

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        """Write values one by one; False for those that the pool has no room for."""
        return [self._put(key, value) for key, value in items]

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        """Read the values that exist."""
        there = self.exists(keys)
        store = self._connected()
        return [
            (store.get(_name(key)) or None) if held else None
            for key, held in zip(keys, there, strict=True)
        ]

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove values, even those that are being read."""
        store = self._connected()
        for key in keys:
            store.remove(_name(key), force=True)

    def close(self) -> None:
        """Leave the pool, with the values in this process's share."""
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _put(self, key: Key, value: Buffer) -> bool:
        code: int = self._connected().upsert(_name(key), value)
        if code and code not in _NO_ROOM:
            raise OSError(f"the store answers {code}")
        return code == 0

    def _connected(self) -> Any:
        """The store, joined when it is first needed, so that the master may start later."""
        with self._lock:
            if self._store is None:
                store = self._library.MooncakeDistributedStore()
                code = store.setup(*self._arguments)
                if code:
                    raise OSError(f"cannot join the store: code {code}")
                self._store = store
            return self._store


def _name(key: Key) -> str:
    return f"picbench-{key.hex()}"

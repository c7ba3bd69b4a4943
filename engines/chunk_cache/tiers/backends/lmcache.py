"""LMCache's cache server (``lmcache_server``, the server of LMCache's ``lm://`` addresses)."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from threading import Lock
from typing import Any, ClassVar, Self

from picbench.engines.chunk_cache.tiers.tier import Allocate, Buffer, Key, Tier, TierSpec

#: The protocol's lengths are 32-bit.
LARGEST_VALUE = (1 << 31) - 1


class LMCache(Tier):
    """Values under LMCache cache keys of a model called ``picbench``.

    Messages are LMCache's own (lmcache/v1/protocol.py), values its binary format. The server keeps
    everything in memory, without a bound, and cannot delete: a deleted value is replaced by an
    empty one, and empty ones count as missing.
    """

    kind: ClassVar[str] = "lmcache"
    summary: ClassVar[str] = "LMCache's cache server (lm://); unbounded"
    notation: ClassVar[str] = "lmcache:host:65432"

    def __init__(self, protocol: Any, address: tuple[str, int], timeout: float) -> None:
        self.name = f"{self.kind}:{address[0]}:{address[1]}"
        self._protocol = protocol
        self._address = address
        self._timeout = timeout
        self._lock = Lock()
        self._idle: list[socket.socket] = []

    @classmethod
    def open(cls, spec: TierSpec, allocate: Allocate) -> Self:
        """``lmcache:host:port``; the client is LMCache's, which imports torch."""
        address = cls.check(spec)
        spec.import_client("lmcache")
        protocol = spec.import_client("lmcache.v1.protocol")
        return cls(protocol, address, spec.deadline)

    @classmethod
    def check(cls, spec: TierSpec) -> tuple[str, int]:
        """The host and the port; refuse all else."""
        spec.check_options()
        if spec.capacity is not None:
            spec.reject("the server has no bound", "leave the capacity out")
        location = spec.require_location("the server's address", cls.notation)
        host, _, port = location.removeprefix("//").rpartition(":")
        if not host or not port.isdecimal():
            spec.reject(f"{location!r} is not host:port", f"write {cls.notation}")
        return host, int(port)

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether the server holds a value, per key; deleted ones count until they are read."""
        with self._connection() as connection:
            return [self._exists(connection, key) for key in keys]

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        """Send values; the server acknowledges nothing, so it is asked whether they are there."""
        with self._connection() as connection:
            return [self._put(connection, key, memoryview(value)) for key, value in items]

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        """Read values, one request each."""
        with self._connection() as connection:
            return [self._get(connection, key) for key in keys]

    def delete(self, keys: Sequence[Key]) -> None:
        """Replace values by empty ones."""
        with self._connection() as connection:
            for key in keys:
                if self._exists(connection, key):
                    connection.sendall(self._message("PUT", key))

    def close(self) -> None:
        """Close the connections; values stay."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def _exists(self, connection: socket.socket, key: Key) -> bool:
        connection.sendall(self._message("EXIST", key))
        return self._reply(connection) is not None

    def _put(self, connection: socket.socket, key: Key, value: memoryview) -> bool:
        if not 0 < value.nbytes <= LARGEST_VALUE:
            return False
        connection.sendall(self._message("PUT", key, value.nbytes))
        connection.sendall(value)
        return self._exists(connection, key)

    def _get(self, connection: socket.socket, key: Key) -> bytearray | None:
        connection.sendall(self._message("GET", key))
        length = self._reply(connection)
        return _receive(connection, length) if length else None

    def _reply(self, connection: socket.socket) -> int | None:
        """Length of the value that follows, None where the server has none."""
        kind = self._protocol.ServerMetaMessage
        message = kind.deserialize(_receive(connection, kind.packlength()))
        found = message.code == self._protocol.ServerReturnCode.SUCCESS
        return int(message.length) if found else None

    def _message(self, command: str, key: Key, nbytes: int = 0) -> bytes:
        """LMCache's message about a value of bytes."""
        torch, utils = import_module("torch"), import_module("lmcache.utils")
        message = self._protocol.ClientMetaMessage(
            getattr(self._protocol.ClientCommand, command),
            # The leading byte distinguishes keys that differ in leading zeros.
            utils.CacheEngineKey("picbench", 1, 0, int.from_bytes(b"\1" + key), torch.uint8),
            nbytes,
            self._protocol.MemoryFormat.BINARY,
            torch.uint8,
            torch.Size([nbytes, 0, 0, 0]),
        )
        return bytes(message.serialize())

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """A connection for one batch; after an error its stream is out of step, so it is closed."""
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        connection = idle or socket.create_connection(self._address, self._timeout)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)


def _receive(connection: socket.socket, nbytes: int) -> bytearray:
    received = bytearray(nbytes)
    left = memoryview(received)
    while left.nbytes:
        count = connection.recv_into(left)
        if not count:
            raise ConnectionError("the server closed the connection")
        left = left[count:]
    return received

"""A Redis or Valkey server: a tier that engines on several machines share."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from picbench.engines.chunk_cache.tiers.tier import Allocate, Buffer, Key, Tier, TierSpec, pageable
from picbench.engines.config import secret

#: Servers close the connection on longer strings (proto-max-bulk-len's default).
LARGEST_VALUE = 512 << 20

_VALUES = b"picbench:v:"
_DOCUMENT = b"picbench:d:"
_ERASED = b"picbench:erased"
_MOST_ERASED = 10_000
_READ_BYTES = 1 << 20  # values are megabytes; the client's default is 64 KiB

# KEYS: order, sizes, state. ARGV: key, value, capacity, prefix of values, milliseconds to live or
# nothing.
_SET = """
local order, sizes, state = KEYS[1], KEYS[2], KEYS[3]
local key, nbytes, capacity = ARGV[1], #ARGV[2], tonumber(ARGV[3])
-- A server without memory refuses a script's first write, so this comes before any change.
local clock = redis.call('HINCRBY', state, 'clock', 1)
local held = tonumber(redis.call('HGET', state, 'bytes') or 0)
held = held - tonumber(redis.call('HGET', sizes, key) or 0)
redis.call('ZREM', order, key)
while held + nbytes > capacity do
    local victim = redis.call('ZPOPMIN', order)[1]
    if not victim then held = 0 break end
    held = held - tonumber(redis.call('HGET', sizes, victim) or 0)
    redis.call('HDEL', sizes, victim)
    redis.call('DEL', ARGV[4] .. victim)
end
redis.call('HSET', sizes, key, nbytes)
redis.call('HSET', state, 'bytes', held + nbytes)
redis.call('ZADD', order, clock, key)
if ARGV[5] == '' then
    redis.call('SET', ARGV[4] .. key, ARGV[2])
else
    redis.call('SET', ARGV[4] .. key, ARGV[2], 'PX', ARGV[5])
end
return 0
"""

# KEYS: as above. ARGV: keys that were used.
_TOUCH = """
for _, key in ipairs(ARGV) do
    redis.call('ZADD', KEYS[1], 'XX', redis.call('HINCRBY', KEYS[3], 'clock', 1), key)
end
return 0
"""

# KEYS: as above. ARGV: keys whose values are gone.
_FORGET = """
for _, key in ipairs(ARGV) do
    local nbytes = redis.call('HGET', KEYS[2], key)
    redis.call('ZREM', KEYS[1], key)
    if nbytes then
        redis.call('HDEL', KEYS[2], key)
        redis.call('HINCRBY', KEYS[3], 'bytes', -tonumber(nbytes))
    end
end
return 0
"""


class Redis(Tier):
    """Values as strings under ``picbench:v:<key>`` in one server.

    With a capacity, all clients keep it together, least recently used out first; without, bounding
    is left to the server's ``maxmemory`` and to `ttl` (seconds since the last write). What the
    server has no memory for is not kept. Every batch is a round trip or two.
    """

    kind: ClassVar[str] = "redis"
    summary: ClassVar[str] = "a Redis or Valkey server, shared by engines on any machine"
    notation: ClassVar[str] = "redis://host:6379/0:10GiB?ttl=1h&tls=on"

    def __init__(
        self,
        url: str,
        *,
        name: str,
        client_library: Any,
        capacity: int | None = None,
        ttl: float | None = None,
        timeout: float = 2.0,
    ) -> None:
        self.name = name
        self._client = _connect(client_library, url, timeout)
        self._bound = RedisBound(self._client, _VALUES, capacity) if capacity else None
        self._largest = min(capacity or LARGEST_VALUE, LARGEST_VALUE)
        self._expiry = max(1, round(ttl * 1000)) if ttl else None
        self._error: type[Exception] = client_library.exceptions.ResponseError

    @classmethod
    def check(cls, spec: TierSpec) -> str:
        """The address; refuse what has none, a port that is none, and options without a meaning."""
        spec.check_options("ttl", "tls")
        address = spec.require_location("a server", cls.notation)
        if spec.options.get("tls", "off") not in ("on", "off"):
            spec.reject(f"tls={spec.options['tls']} is not possible", "write tls=on or tls=off")
        spec.seconds("ttl")
        try:
            urlsplit(f"redis:{address}").port  # noqa: B018
            if not address.startswith("//"):
                raise ValueError("it does not begin with //")
        except ValueError as error:
            # What the error quotes may be of a password.
            why = "" if "@" in spec.location else f": {error}"
            spec.reject(f"cannot read the address{why}", f"write {cls.notation}")
        return address

    @classmethod
    def probe(cls, spec: TierSpec) -> None:
        """Refuse what does not answer, and a cluster: its nodes have some of the keys each."""
        tier, mode = cls.open(spec, pageable), None
        with suppress(Exception):
            mode = tier._client.info("server").get("redis_mode")
        tier.close()
        if mode == "cluster":
            spec.reject("is a node of a Redis Cluster", "use a server that is not in cluster mode")
        super().probe(spec)

    @classmethod
    def open(cls, spec: TierSpec, allocate: Allocate) -> Self:
        """``redis://[user:password@]host[:port][/database][:capacity][?ttl=1h&tls=on]``."""
        address = cls.check(spec)
        scheme = "rediss" if spec.options.get("tls") == "on" else "redis"
        return cls(
            f"{scheme}:{address}",
            name=f"{scheme}://{address.rpartition('@')[2].lstrip('/')}",
            client_library=spec.import_client("redis"),
            capacity=spec.capacity,
            ttl=spec.seconds("ttl"),
            timeout=spec.deadline,
        )

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether the server holds a value, per key."""
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(_VALUES + key)
            return [bool(count) for count in pipeline.execute()]

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        """Set values; False for what the capacity, the server's memory or the protocol refuses."""
        sizes = [memoryview(value).nbytes for _, value in items]
        fitting = [i for i, size in enumerate(sizes) if size <= self._largest]
        kept = [False] * len(items)
        for i, stays in zip(fitting, self._set([items[i] for i in fitting]), strict=True):
            kept[i] = stays
        return kept

    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        """Read values in one round trip."""
        if not keys:
            return []
        values: list[Buffer | None] = self._client.mget([_VALUES + key for key in keys])
        self._touch([k for k, value in zip(keys, values, strict=True) if value])
        return values

    def delete(self, keys: Sequence[Key]) -> None:
        """Delete values."""
        if not keys:
            return
        self._client.delete(*(_VALUES + key for key in keys))
        if self._bound:
            self._bound.forget(keys)

    def note(self, document: bytes, chunks: Collection[bytes]) -> None:
        """Note chunks of a document, under the digest of its id."""
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.sadd(_DOCUMENT + document, *chunks)
            if self._expiry:
                pipeline.pexpire(_DOCUMENT + document, self._expiry)
            pipeline.execute()

    def erase(self, document: bytes, chunks: Collection[bytes]) -> tuple[bytes, set[bytes]]:
        """Tell all engines to erase chunks, and those noted of the document; the entry, and all."""
        every = {*chunks, *self._client.smembers(_DOCUMENT + document)}
        told = {b"chunks": b"".join(sorted(every))}
        entry: bytes = self._client.xadd(_ERASED, told, maxlen=_MOST_ERASED)
        self._client.delete(_DOCUMENT + document)
        return entry, every

    def erased(self, after: bytes | None) -> list[tuple[bytes, bytes]]:
        """What engines were told since an entry: further entries, and their chunks joined.

        Without one, the last entry, as if it told nothing.
        """
        if after is None:
            last = self._client.xrevrange(_ERASED, count=1)
            return [(last[0][0] if last else b"0", b"")]
        found = self._client.xread({_ERASED: after}, count=1000)
        return [(entry, told[b"chunks"]) for _, entries in found for entry, told in entries]

    def close(self) -> None:
        """Close the connections; values stay."""
        self._client.close()

    def _set(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        """Whether the server kept each value; raises what is not about its memory."""
        with self._client.pipeline(transaction=False) as pipeline:
            for key, value in items:
                if self._bound:
                    self._bound.set(pipeline, key, value, self._expiry)
                else:
                    pipeline.set(_VALUES + key, value, px=self._expiry)
            replies = pipeline.execute(raise_on_error=False)
        refused = [reply for reply in replies if isinstance(reply, Exception)]
        for error in refused:
            if not _is_full(error):
                raise error
        return [not isinstance(reply, Exception) for reply in replies]

    def _touch(self, keys: Sequence[Key]) -> None:
        """Note the use of values, which takes memory that the server may not have."""
        if self._bound is None:
            return
        try:
            self._bound.touch(keys)
        except self._error as error:
            if not _is_full(error):
                raise


class RedisBound:
    """Keeps the values under `prefix` within `capacity` bytes, least recently used out first.

    All clients share the capacity. Three keys besides the values are for bookkeeping: a sorted set
    of keys by last use (a logical clock), a hash of sizes, and a hash with the sum of sizes and the
    clock. Scripts change them atomically. A value that the server drops on its own (expiry,
    maxmemory) stays counted until it is the least recently used, so less than `capacity` may be
    used.
    """

    def __init__(self, client: Any, prefix: bytes, capacity: int) -> None:
        self._prefix = prefix
        self._capacity = capacity
        self._keys = [b"picbench:" + name for name in (b"order", b"sizes", b"state")]
        self._set = client.register_script(_SET)
        self._touch = client.register_script(_TOUCH)
        self._forget = client.register_script(_FORGET)

    def set(self, pipeline: Any, key: Key, value: Buffer, expiry: int | None) -> None:
        """Queue setting a value, with milliseconds to live."""
        arguments = [key, value, self._capacity, self._prefix, expiry or b""]
        self._set(keys=self._keys, args=arguments, client=pipeline)

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark values as used."""
        if keys:
            self._touch(keys=self._keys, args=keys)

    def forget(self, keys: Sequence[Key]) -> None:
        """Stop counting values."""
        if keys:
            self._forget(keys=self._keys, args=keys)


def _is_full(error: Exception) -> bool:
    """Whether a server is out of memory; from within a script it says so by its text alone."""
    return "when used memory > 'maxmemory'" in str(error)


def _connect(library: Any, url: str, timeout: float) -> Any:
    """A client that never waits longer than `timeout` seconds and never retries on its own."""
    return library.Redis.from_url(
        url,
        password=secret("REDIS_PASSWORD") or None,  # that of an address comes first
        protocol=2,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        socket_read_size=_READ_BYTES,
        retry=library.retry.Retry(library.backoff.NoBackoff(), 0),
    )

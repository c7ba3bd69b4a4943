"""A capacity that all clients of a Redis server share.

Three keys besides the values hold the bookkeeping: a sorted set of keys by last use (a logical
clock), a hash of sizes, and a hash with the sum of sizes and the clock. Scripts change them
atomically. A value that the server drops on its own (expiry, maxmemory) stays counted until it is
the least recently used: the bound errs towards fewer bytes.
"""

from collections.abc import Sequence
from typing import Any

from picbench.engines.chunk_cache.tiers.tier import Buffer, Key

# KEYS: order, sizes, state. ARGV: key, value, capacity, prefix of values, milliseconds to live or
# nothing. Returns evictions.
_SET = """
local order, sizes, state = KEYS[1], KEYS[2], KEYS[3]
local key, nbytes, capacity = ARGV[1], #ARGV[2], tonumber(ARGV[3])
-- A server without memory refuses a script's first write, so this stands before any change.
local clock = redis.call('HINCRBY', state, 'clock', 1)
local held = tonumber(redis.call('HGET', state, 'bytes') or 0)
held = held - tonumber(redis.call('HGET', sizes, key) or 0)
redis.call('ZREM', order, key)
local evicted = 0
while held + nbytes > capacity do
    local victim = redis.call('ZPOPMIN', order)[1]
    if not victim then held = 0 break end
    held = held - tonumber(redis.call('HGET', sizes, victim) or 0)
    redis.call('HDEL', sizes, victim)
    redis.call('DEL', ARGV[4] .. victim)
    evicted = evicted + 1
end
redis.call('HSET', sizes, key, nbytes)
redis.call('HSET', state, 'bytes', held + nbytes)
redis.call('ZADD', order, clock, key)
if ARGV[5] == '' then
    redis.call('SET', ARGV[4] .. key, ARGV[2])
else
    redis.call('SET', ARGV[4] .. key, ARGV[2], 'PX', ARGV[5])
end
return evicted
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


class RedisBound:
    """Keeps the values under `prefix` within `capacity` bytes, least recently used out first."""

    def __init__(self, client: Any, prefix: bytes, capacity: int) -> None:
        self._prefix = prefix
        self._capacity = capacity
        self._keys = [b"picbench:" + name for name in (b"order", b"sizes", b"state")]
        self._set = client.register_script(_SET)
        self._touch = client.register_script(_TOUCH)
        self._forget = client.register_script(_FORGET)

    def set(self, pipeline: Any, key: Key, value: Buffer, expiry: int | None) -> None:
        """Queue setting a value, with milliseconds to live; replies the number of evictions."""
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

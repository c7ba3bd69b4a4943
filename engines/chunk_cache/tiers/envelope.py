"""Sealed values: a payload after a header with a checksum of both.

The header is 64 bytes, so that the payload starts on a cache line: magic, version, payload length,
and XXH3-128 over magic, version, length, key and payload. The key is included to detect a store
that returns another key's intact value. The checksum finds accidents. Where the operator has given
a secret, HMAC-SHA-256 with it takes its place, which who does not know the secret cannot make.
"""

import hashlib
import hmac
import struct

import numpy as np
import xxhash

from picbench.engines.chunk_cache.tiers.tier import Allocate, Buffer, Key, Payload, pageable

HEADER_BYTES = 64

_MAGIC = b"PICBCHNK"
_VERSION = 1
_FIELDS = struct.Struct("<8sIQ")


def seal(key: Key, payload: Payload, secret: bytes = b"") -> memoryview:
    """A sealed copy of `payload` under `key`."""
    return stamp(key, enclose(payload), secret)


def enclose(payload: Payload, allocate: Allocate = pageable) -> memoryview:
    """A copy of `payload` after room for the header, which `stamp` fills in."""
    sealed = allocate(HEADER_BYTES + payload_bytes(payload))
    begin = HEADER_BYTES
    for part in _parts(payload):
        end = begin + part.nbytes
        copy_bytes(sealed[begin:end], part)
        begin = end
    return sealed


def payload_bytes(payload: Payload) -> int:
    """The length of a payload, of all of its parts."""
    return sum(part.nbytes for part in _parts(payload))


def stamp(key: Key, enclosed: memoryview, secret: bytes = b"") -> memoryview:
    """Seal an enclosed payload in place; returns it."""
    enclosed[:HEADER_BYTES] = _header(key, enclosed[HEADER_BYTES:], secret)
    return enclosed


def unseal(key: Key, sealed: Buffer, secret: bytes = b"") -> memoryview | None:
    """The payload, read-only; None unless it is intact and was sealed under `key` and `secret`."""
    view = memoryview(sealed).toreadonly().cast("B")
    payload = view[HEADER_BYTES:]
    if len(view) < HEADER_BYTES:
        return None
    intact = hmac.compare_digest(bytes(view[:HEADER_BYTES]), _header(key, payload, secret))
    return payload if intact else None


def copy_bytes(target: memoryview, source: Buffer) -> None:
    """Copy bytes of equal length; unlike slice assignment, numpy releases the GIL."""
    if target.nbytes:  # numpy refuses empty buffers
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _parts(payload: Payload) -> list[memoryview]:
    parts = [payload] if isinstance(payload, Buffer) else payload
    return [memoryview(part).cast("B") for part in parts]


def _header(key: Key, payload: memoryview, secret: bytes) -> bytes:
    fields = _FIELDS.pack(_MAGIC, _VERSION, len(payload))
    digest = hmac.new(secret, fields, hashlib.sha256) if secret else xxhash.xxh3_128(fields)
    digest.update(len(key).to_bytes(8, "little") + key)
    digest.update(payload)
    return (fields + digest.digest()).ljust(HEADER_BYTES, b"\0")

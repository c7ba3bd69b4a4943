"""Keys of KV blocks: hashes of everything that a block's content depends on.

A canonical block depends on its chunk's tokens so far, on the tokens that the chunk was compiled
after (an anchor, the text of its document) and on the tenant. A computed block (linked tokens,
prompt text, generated tokens) depends on the whole logical prefix: on the computed tokens before it
and on every chunk before it, together with the tokens of each that were linked. Keys are SHA-256
and equal in every process, so that they name values in remote tiers.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

Key = bytes

#: Bytes of a packed number.
NUMBER = 8

_CANONICAL = b"c"
_CANONICAL_LENGTH = 33


class ChunkEvent(NamedTuple):
    """A chunk in the chain of computed blocks: its first position, its key, its linked indices.

    `key` is the key of the chunk's last canonical block, which covers all of its tokens.
    """

    start: int
    key: Key
    linked: tuple[int, ...]


def root_key(scope: str) -> Key:
    """Start of the chain of computed blocks of a prompt; `scope` names the tenant."""
    return _digest(b"root", scope.encode())


def anchor_key(scope: str, anchor: Sequence[int], position: int | None = None) -> Key:
    """Start of a chunk's chain: the scope, and the anchor that the chunk is compiled after.

    What stands before it in its document follows (`context_hash`).

    A chunk that is compiled at a fixed `position` is another one elsewhere.
    """
    fields = [b"anchor", scope.encode(), pack_numbers(anchor)]
    return _digest(*fields if position is None else [*fields, pack_numbers([position])])


def context_hash(root: Key) -> Any:
    """The start of a hash over packed text of a document, after what has the key `root`."""
    return hashlib.sha256(_framed(b"context", root))


def canonical_key(parent: Key, tokens: Sequence[int]) -> Key:
    """Key of a canonical block; `tokens` are its real tokens, without pads."""
    return _CANONICAL + _digest(b"chunk", parent, pack_numbers(tokens))


def is_canonical(key: Key) -> bool:
    """Whether a key names a canonical block; any engine's own keys have other lengths."""
    return len(key) == _CANONICAL_LENGTH and key.startswith(_CANONICAL)


def computed_key(
    parent: Key, tokens: bytes, positions: bytes, events: Sequence[ChunkEvent] = ()
) -> Key:
    """Key of a computed block; `events` are the chunks that start before its end.

    Its tokens and their positions are those of `pack_numbers`, `NUMBER` bytes each.
    """
    fields = [b"computed", parent, tokens, positions]
    for event in events:
        fields += [pack_numbers([event.start]), event.key, pack_numbers(event.linked)]
    return _digest(*fields)


def pack_numbers(values: Sequence[int]) -> bytes:
    """Numbers in bytes, as they are hashed: little-endian, `NUMBER` bytes each."""
    packed = array("q", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _digest(*fields: bytes) -> Key:
    return hashlib.sha256(_framed(*fields)).digest()


def _framed(*fields: bytes) -> bytes:
    # Each field follows its length, so that no two different lists hash the same bytes.
    parts: list[bytes] = []
    for field in fields:
        parts += len(field).to_bytes(8, "little"), field
    return b"".join(parts)

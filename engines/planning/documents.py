"""Where chunks stand in their documents.

A request with many sections of long documents has far more document text than prompt, of which a
plan needs lengths and hashes only. So that text is kept in bytes: token ids of four bytes each,
little-endian. Sections of one document follow beginnings of it, which are kept and hashed once.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from picbench.engines.planning.keys import Key, context_hash

_ITEM, WIDTH = "i", 4


def pack_ids(ids: Sequence[int]) -> bytes | None:
    """Token ids in bytes; None if one is negative, too large for 31 bits, or no integer."""
    try:
        values = array(_ITEM, ids)
    except (OverflowError, TypeError):
        return None
    if sys.byteorder == "big":
        values.byteswap()
    packed = values.tobytes()
    return packed if are_ids(packed) else None


def are_ids(packed: bytes) -> bool:
    """Whether bytes are token ids: whole ones, none of them negative."""
    # The sign is the first bit of the last byte of each.
    return len(packed) % WIDTH == 0 and packed[WIDTH - 1 :: WIDTH].isascii()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """The token ids in bytes."""
    values = array(_ITEM)
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return tuple(values)


def preceding(document: bytes, chunk: bytes) -> bytes | None:
    """What stands before a chunk in a document, all of them packed; None if it is not in there.

    Of several places it is the last one: who means another cuts the document off after that.
    """
    if document.endswith(chunk):
        return document[: len(document) - len(chunk)]
    # Python searches forward in time that grows with both, but backward in their product for some
    # that clients may send. So what is searched is reversed.
    whole, part = (text[::-1] for text in _texts(document, chunk))
    after = whole.find(part)
    return document[: len(document) - after * WIDTH - len(chunk)] if after >= 0 else None


def _texts(*packed: bytes) -> list[str]:
    """Token ids as texts of as many characters, equal ones where ids are."""
    try:
        return [ids.decode("utf-32-le", "surrogatepass") for ids in packed]
    except UnicodeDecodeError:
        # There is an id that is no code point, and in no model's vocabulary.
        codes = dict[int, int]()
        numbered = ([codes.setdefault(i, len(codes)) for i in unpack_ids(ids)] for ids in packed)
        return ["".join(map(chr, numbers)) for numbers in numbered]


class DocumentText:
    """The packed text of a document, whose beginnings are hashed along the text."""

    __slots__ = ("_hashed", "packed")

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        # By the key that a hash starts from: how many bytes it covers, ascending, and the hashes.
        self._hashed: dict[Key, tuple[list[int], list[Any]]] = {}

    def key_after(self, root: Key, size: int) -> Key:
        """The key of the first `size` bytes after what has the key `root`."""
        sizes, hashes = self._hashed.setdefault(root, ([0], [context_hash(root)]))
        place = bisect_right(sizes, size)
        found = hashes[place - 1]
        if sizes[place - 1] < size:
            found = found.copy()
            found.update(self.packed[sizes[place - 1] : size])
            sizes.insert(place, size)
            hashes.insert(place, found)
        key: Key = found.digest()
        return key


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What stands before a chunk in its document: the first `length` tokens of a text."""

    text: DocumentText
    length: int

    @classmethod
    def of(cls, ids: "Context | Sequence[int]") -> "Context":
        """Token ids as a context. Raises ValueError for values that are none."""
        if isinstance(ids, cls):
            return ids
        packed = pack_ids(tuple(ids))
        if packed is None:
            raise ValueError("a context has a value that is no token id")
        return cls(DocumentText(packed), len(packed) // WIDTH)

    @property
    def packed(self) -> bytes:
        """The token ids in bytes."""
        return self.text.packed[: self.length * WIDTH]

    def key_after(self, root: Key) -> Key:
        """The key of the context after what has the key `root`."""
        return self.text.key_after(root, self.length * WIDTH)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(unpack_ids(self.packed))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.packed == other.packed

    def __hash__(self) -> int:
        return hash(self.packed)


@dataclass(frozen=True, slots=True)
class ChunkContexts:
    """The contexts of a request's chunks, as they are sent between processes.

    `ids` are texts one after the other, packed. `places` has the [start, end) token ids of each
    chunk's context, which begins a text; an empty one where a chunk has no document. Without
    `places` no chunk has one.
    """

    ids: bytes = b""
    places: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, contexts: Sequence[bytes]) -> Self:
        """Packed contexts, of which those that begin others are not kept again."""
        if not any(contexts):
            return cls()
        texts: list[bytes] = []
        starts: dict[bytes, int] = {}
        end = 0
        # In this order a text comes right before all that begin it.
        for context in sorted(set(contexts), reverse=True):
            if not texts or not texts[-1].startswith(context):
                texts.append(context)
                end += len(context)
            starts[context] = (end - len(texts[-1])) // WIDTH
        places = tuple((starts[c], starts[c] + len(c) // WIDTH) for c in contexts)
        return cls(b"".join(texts), places)

    @classmethod
    def sent(cls, given: Mapping[str, Any], chunks: int) -> Self | None:
        """What came from another process, for as many chunks; None for anything else."""
        try:
            ids, rows = given["ids"], given["places"]
            places = tuple((int(start), int(end)) for start, end in rows)
        except (KeyError, TypeError, ValueError):
            return None
        right = isinstance(ids, bytes) and are_ids(ids) and len(places) in (0, chunks)
        inside = right and all(0 <= start <= end <= len(ids) // WIDTH for start, end in places)
        return cls(ids, places) if inside else None

    def contexts(self) -> list[Context]:
        """The contexts, chunk by chunk; those of one text share it."""
        ends: dict[int, int] = {}
        for start, end in self.places:
            ends[start] = max(ends.get(start, 0), end)
        texts = {
            start: DocumentText(self.ids[start * WIDTH : end * WIDTH])
            for start, end in ends.items()
        }
        return [Context(texts[start], end - start) for start, end in self.places]

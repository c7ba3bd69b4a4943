"""Contents of a trace: numbers for names and tokens, lengths that must agree."""

import hashlib
from array import array
from collections.abc import Sequence

from picbench.profile.traces.traced_request import TraceSegment

#: From here on ids stand for tokens of content of which only the length is known.
INVENTED = 1 << 40


class ContentTable:
    """Makes segments; in an `exact` table each has token ids, invented ones where none are known.

    Raises ValueError where a name has two lengths or two contents, or has none yet.
    """

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact
        self._named: dict[tuple[str, str], TraceSegment] = {}
        self._by_tokens: dict[bytes, int] = {}
        self._told: set[int] = set()
        self._numbers = 0
        self._unique = 0

    def of_tokens(self, ids: Sequence[int], *, chunk: bool) -> TraceSegment:
        """A segment of known tokens."""
        tokens = array("q", ids).tobytes()
        digest = hashlib.blake2b(tokens, digest_size=16).digest()
        content = self._by_tokens.get(digest)
        if content is None:
            content = self._by_tokens[digest] = self._next()
            self._told.add(content)
        return TraceSegment(content, len(ids), chunk, tokens if self.exact else None)

    def of_length(self, length: int, *, chunk: bool) -> TraceSegment:
        """A segment that no other prompt has, of which only the length is known."""
        if not self.exact:
            return TraceSegment(None, length, chunk)
        return TraceSegment(self._next(), length, chunk, self._invented(length))

    def name(self, kind: str, name: str, segment: TraceSegment) -> TraceSegment:
        """The segment that a name stands for from its first occurrence on."""
        known = self._named.get((kind, name))
        if known is None:
            content = segment.content if segment.content is not None else self._next()
            known = self._named[kind, name] = segment._replace(content=content)
        elif known.length != segment.length:
            raise ValueError(
                f"field {kind!r}: {name!r} has {segment.length} tokens here and had "
                f"{known.length} before"
            )
        elif known.content != segment.content and {known.content, segment.content} <= self._told:
            raise ValueError(f"field {kind!r}: {name!r} has other tokens here than before")
        return known

    def named(self, kind: str, name: str) -> TraceSegment:
        """A segment that was named before."""
        known = self._named.get((kind, name))
        if known is None:
            raise ValueError(
                f"field {kind!r}: {name!r} has no 'text' and no 'tokens', and had none before"
            )
        return known

    def length(self, kind: str, name: str) -> int | None:
        """The length of what was named before; None for a new name."""
        known = self._named.get((kind, name))
        return known.length if known else None

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _invented(self, length: int) -> bytes:
        begin = INVENTED + self._unique
        self._unique += length
        return array("q", range(begin, begin + length)).tobytes()

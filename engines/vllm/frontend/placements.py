"""The values of a request's arguments, which come from JSON: spans, positions, slots, documents."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from operator import itemgetter
from typing import Any

from picbench.engines.planning.documents import ChunkContexts, pack_ids, preceding
from picbench.errors import ConfigError


def rows_of_integers(given: Any, name: str, width: int, hint: str) -> Iterator[tuple[int, ...]]:
    """Rows of `width` integers, checked as they are read, so that too long a list costs no more.

    Raises ConfigError, with `hint`, for anything else.
    """
    if not is_list(given):
        raise ConfigError(f"{name} are {given!r}, not a list", hint=hint)
    for index, row in enumerate(given):
        if not is_list(row) or len(row) != width or not all(map(is_integer, row)):
            raise ConfigError(f"{name}[{index}] is {row!r}", hint=hint)
        yield tuple(map(int, row))


def rows_of_flat(flat: Any, name: str, width: int, hint: str) -> list[tuple[Any, ...]]:
    """A flat list as rows of `width`. Raises ConfigError, with `hint`, if it has no whole rows."""
    if not is_list(flat) or len(flat) % width:
        number = "an even number" if width == 2 else f"a multiple of {width}"
        raise ConfigError(f"{name} needs {number} of integers", hint=hint)
    return [tuple(flat[begin : begin + width]) for begin in range(0, len(flat), width)]


def is_list(value: Any) -> bool:
    """Whether a value is a list, not text."""
    # Nearly all are one of these, and asking an abstract class takes far longer.
    if type(value) in (list, tuple):
        return True
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, not a truth value."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


Span = tuple[int, int]

#: (index of a prompt token, its logical position); the tokens after it follow.
Position = tuple[int, int]

#: (chunk, start, end, length): the prompt tokens [start, end) fill a slot of `length` positions in
#: the chunk of that index.
SlotSpan = tuple[int, int, int, int]


def ordered_spans(
    rows: Iterable[tuple[int, ...]], name: str, prompt_tokens: int
) -> tuple[Span, ...]:
    """Spans of a prompt. Raises ConfigError if one is empty, leaves it or overlaps another."""
    spans: list[Span] = []
    for index, (start, end) in enumerate(rows):
        named = f"{name}[{index}] = [{start}, {end}]"
        if not 0 <= start < end <= prompt_tokens:
            raise ConfigError(
                f"{named} leaves the prompt of {prompt_tokens} tokens",
                hint="0 <= start < end <= prompt length, end exclusive",
            )
        if spans and start < spans[-1][1]:
            raise ConfigError(
                f"{named} overlaps [{spans[-1][0]}, {spans[-1][1]}]",
                hint="list spans in order, without overlap",
            )
        spans.append((start, end))
    return tuple(spans)


def overlapping(spans: Sequence[Span], start: int, end: int) -> Sequence[Span]:
    """Those of some spans, in order and without overlap, that have tokens of [start, end)."""
    first = bisect_right(spans, start, key=itemgetter(1))
    return spans[first : bisect_left(spans, end, lo=first, key=itemgetter(0))]


def read_dependent(given: Any, spans: Sequence[Span], prompt_tokens: int) -> tuple[Span, ...]:
    """Parse spans that see all before them. Raises ConfigError also if partly in a chunk."""
    rows = rows_of_integers(given, "dependent", 2, "each is [start, end] in prompt tokens")
    dependent = ordered_spans(rows, "dependent", prompt_tokens)
    for index, (start, end) in enumerate(dependent):
        for first, last in overlapping(spans, start, end):
            if not first <= start < end <= last:
                raise ConfigError(
                    f"dependent[{index}] = [{start}, {end}] is partly inside the chunk "
                    f"[{first}, {last}]",
                    hint="divide it where the chunk begins or ends",
                )
    return dependent


def read_positions(given: Any, spans: Sequence[Span], prompt_tokens: int) -> tuple[Position, ...]:
    """Parse positions. Raises ConfigError if they are not in order, or inside chunks, or beyond."""
    rows = rows_of_integers(given, "positions", 2, "each is [prompt token, its position]")
    positions: list[Position] = []
    for index, (token, position) in enumerate(rows):
        named = f"positions[{index}] = [{token}, {position}]"
        after = positions[-1][0] if positions else -1
        if not after < token < prompt_tokens or position < 0:
            raise ConfigError(
                f"{named} leaves the prompt of {prompt_tokens} tokens, or its order",
                hint="prompt tokens ascend, and positions are 0 or more",
            )
        inside = [span for span in overlapping(spans, token, token + 1) if span[0] < token]
        if inside:
            raise ConfigError(
                f"{named} is inside the chunk {list(inside[0])}",
                hint="a chunk has one position, that of its first token",
            )
        positions.append((token, position))
    return tuple(positions)


def read_slots(given: Any, spans: Sequence[Span]) -> tuple[SlotSpan, ...]:
    """Parse slots. Raises ConfigError if they overlap, leave their chunk, or are too short."""
    rows = rows_of_integers(given, "slots", 4, "each is [chunk, start, end, positions that it has]")
    slots: list[SlotSpan] = []
    at = 0
    for index, (chunk, start, end, length) in enumerate(rows):
        named = f"slots[{index}] = {[chunk, start, end, length]}"
        first, last = spans[chunk] if 0 <= chunk < len(spans) else (0, -1)
        if not first <= start <= end <= last:
            hint = "the index of a span, and prompt tokens of that span"
            raise ConfigError(f"{named} is not in its chunk", hint=hint)
        if start < at:
            raise ConfigError(f"{named} overlaps the one before it", hint="list slots in order")
        if not 0 < length >= end - start:
            raise ConfigError(
                f"{named} has {end - start} tokens for {length} positions",
                hint="shorten what fills the slot, or give it more positions",
            )
        slots.append((chunk, start, end, length))
        at = end
    return tuple(slots)


def read_documents(given: Any, spans: Sequence[Span], prompt: Sequence[int]) -> ChunkContexts:
    """What stands before each span in its document.

    Documents come from users as lists of token ids, from another process as `ChunkContexts`. Raises
    ConfigError for values that are neither, for too many or too few documents, and for one that
    does not contain its chunk.
    """
    if given is None:
        return ChunkContexts()
    if isinstance(given, Mapping):
        found = ChunkContexts.sent(given, len(spans))
        if found is None:
            raise ConfigError("documents are a mapping", hint="send a list of token ids a span")
        return found
    if not is_list(given) or len(given) not in (0, len(spans)):
        raise ConfigError(
            f"documents has no entry for each of the {len(spans)} spans",
            hint="one list of token ids a span, null for a chunk without a document",
        )
    pairs = enumerate(zip(given, spans, strict=False))
    return ChunkContexts.of(
        [_context(n, document, prompt[slice(*span)]) for n, (document, span) in pairs]
    )


def documents_of_flat(flat: Any, name: str) -> list[Any] | None:
    """Documents of a flat list, each after its length. Raises ConfigError if these are wrong."""
    if flat is None:
        return None
    documents: list[Any] = []
    at = 0
    while is_list(flat) and at < len(flat) and is_integer(flat[at]) and flat[at] >= 0:
        length = int(flat[at])
        documents.append(flat[at + 1 : at + 1 + length])
        at += 1 + length
    if not is_list(flat) or at != len(flat):
        raise ConfigError(
            f"{name} needs the length of each document and then its token ids",
            hint="0 for a chunk without a document: 0, 3, 7, 8, 9, ...",
        )
    return documents


def _context(index: int, given: Any, chunk: Sequence[int]) -> bytes:
    if given is None:
        return b""
    # Documents are long and nearly always lists of int, which is seen fastest like this.
    integers = is_list(given) and (set(map(type, given)) <= {int} or all(map(is_integer, given)))
    document = pack_ids(given) if integers else None
    if document is None:
        raise ConfigError(
            f"documents[{index}] is no list of token ids",
            hint="the token ids of the text that contains the chunk",
        )
    if not document:
        return document
    packed = pack_ids(chunk)
    found = None if packed is None else preceding(document, packed)
    if found is None:
        raise ConfigError(
            f"documents[{index}] does not contain its chunk, spans[{index}]",
            hint="a document has the chunk's own token ids after those of the text before it",
        )
    return found

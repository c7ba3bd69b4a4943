"""Where the segments of a request are, what chunks leave to be filled, and what is recomputed."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from picbench.engines.vllm.frontend.lists import rows_of_integers
from picbench.errors import ConfigError

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
    """Parse the spans of tokens that see the whole prompt before them.

    Raises ConfigError as `ordered_spans`, and if one is partly inside a chunk.
    """
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
    """Parse a request's positions.

    Raises ConfigError if they are not in the prompt's order, leave the prompt, or are of tokens
    inside chunks.
    """
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
    """Parse the slots of a request's chunks.

    Raises ConfigError if they overlap, if one is not in a chunk, or if it has fewer positions than
    tokens.
    """
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

"""Positions and slots of a request: where its segments are, and what chunks leave to be filled."""

from collections.abc import Sequence
from typing import Any

from picbench.engines.vllm.frontend.lists import rows_of_integers
from picbench.errors import ConfigError

Span = tuple[int, int]

#: (index of a prompt token, its logical position); the tokens after it follow.
Position = tuple[int, int]

#: (chunk, start, end, length): the prompt tokens [start, end) fill a slot of `length` positions in
#: the chunk of that index.
SlotSpan = tuple[int, int, int, int]


def read_positions(given: Any, spans: Sequence[Span], prompt_tokens: int) -> tuple[Position, ...]:
    """Parse a request's positions.

    Raises ConfigError if they are not in the prompt's order, leave the prompt, or are of tokens
    inside chunks.
    """
    rows = rows_of_integers(given, "positions", 2, "each is [prompt token, its position]")
    for index, (token, position) in enumerate(rows):
        named = f"positions[{index}] = [{token}, {position}]"
        after = rows[index - 1][0] if index else -1
        if not after < token < prompt_tokens or position < 0:
            raise ConfigError(
                f"{named} leaves the prompt of {prompt_tokens} tokens, or its order",
                hint="prompt tokens ascend, and positions are 0 or more",
            )
        inside = [span for span in spans if span[0] < token < span[1]]
        if inside:
            raise ConfigError(
                f"{named} is inside the chunk {list(inside[0])}",
                hint="a chunk has one position, that of its first token",
            )
    return tuple((token, position) for token, position in rows)


def read_slots(given: Any, spans: Sequence[Span]) -> tuple[SlotSpan, ...]:
    """Parse the slots of a request's chunks.

    Raises ConfigError if they overlap, if one is not in a chunk, or if it has fewer positions than
    tokens.
    """
    rows = rows_of_integers(given, "slots", 4, "each is [chunk, start, end, positions that it has]")
    at = 0
    for index, (chunk, start, end, length) in enumerate(rows):
        named = f"slots[{index}] = {list(rows[index])}"
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
        at = end
    return tuple((chunk, start, end, length) for chunk, start, end, length in rows)

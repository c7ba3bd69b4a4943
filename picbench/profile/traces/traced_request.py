"""Requests of a trace, as far as caches can tell them apart."""

from dataclasses import dataclass
from typing import NamedTuple


class TraceSegment(NamedTuple):
    """A run of prompt tokens: a chunk or text.

    Segments of one `content` are equal. None is content that never occurs again. `tokens` are
    the ids, eight bytes each, where they are known. Without them segments of different contents
    count as different from their first token on.
    """

    content: int | None
    length: int
    chunk: bool
    tokens: bytes | None = None


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace.

    `arrival` is in seconds from the start, None where the trace has no times. `output` is the
    number of tokens that are generated; `reply` is what they are, None where that is not known.
    `source` is where the request stands, for messages.
    """

    segments: tuple[TraceSegment, ...]
    output: int
    arrival: float | None = None
    reply: TraceSegment | None = None
    source: str = ""

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return sum(segment.length for segment in self.segments)

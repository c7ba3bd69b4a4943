"""A request to an engine: a prompt in segments, already tokenized."""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal


@dataclass(frozen=True, slots=True)
class SampleSegment:
    """A run of prompt tokens: reusable content (``chunk``) or text of this prompt (``text``).

    Engines get `tokens`; `text` is for readers. `before` is what precedes a chunk in its
    document, which the prompt may not show: for algorithms with ``context=document``.
    """

    kind: Literal["text", "chunk"]
    text: str
    tokens: tuple[int, ...]
    before: "SampleSegment | None" = None

    @property
    def context(self) -> tuple[int, ...]:
        """The token ids before a chunk in its document."""
        return self.before.tokens if self.before else ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a workload, the same for every arm.

    `max_tokens` is how many tokens may be generated. `truncated` is set when the middle of
    the prompt was left out to fit the context. `source` is the row's ``file:line``. Chunks of an
    `ordered` sample are consecutive text, which no other order would be.
    """

    id: str
    dataset: str
    segments: tuple[SampleSegment, ...]
    answers: tuple[str, ...]
    max_tokens: int
    source: str = ""
    truncated: bool = False
    ordered: bool = False

    def without_documents(self) -> "Sample":
        """The same prompt; its chunks are from no document."""
        return replace(self, segments=tuple(replace(s, before=None) for s in self.segments))

    def without_chunks(self) -> "Sample":
        """The texts of the prompt alone."""
        return replace(self, segments=tuple(s for s in self.segments if s.kind == "text"))

    @property
    def parts(self) -> tuple[SampleSegment, ...]:
        """The segments, under their name in request files (`traffic/file.py`)."""
        return self.segments

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids of the whole prompt."""
        return tuple(chain.from_iterable(segment.tokens for segment in self.segments))

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt in tokens."""
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def chunks(self) -> tuple[SampleSegment, ...]:
        """The segments that are chunks."""
        return tuple(segment for segment in self.segments if segment.kind == "chunk")

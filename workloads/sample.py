"""What an engine is asked: a prompt in parts, already tokenized."""

from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Literal


@dataclass(frozen=True, slots=True)
class SampleSegment:
    """A run of prompt tokens: reusable content (``chunk``) or text of this prompt (``text``).

    `tokens` is what counts; `text` is there to be read.
    """

    kind: Literal["text", "chunk"]
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a workload, the same for every arm.

    `max_tokens` is how many tokens may be generated. `truncated` says that the middle of the
    prompt was left out to fit the context. `source` is the row's ``file:line``.
    """

    id: str
    dataset: str
    parts: tuple[SampleSegment, ...]
    answers: tuple[str, ...]
    max_tokens: int
    source: str = ""
    truncated: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids of the whole prompt."""
        return tuple(chain.from_iterable(part.tokens for part in self.parts))

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt in tokens."""
        return sum(len(part.tokens) for part in self.parts)

    @property
    def chunks(self) -> tuple[SampleSegment, ...]:
        """The parts that are chunks."""
        return tuple(part for part in self.parts if part.kind == "chunk")

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where the chunks lie in `tokens`, as (start, end) pairs."""
        ends = accumulate(len(part.tokens) for part in self.parts)
        return tuple(
            (end - len(part.tokens), end)
            for part, end in zip(self.parts, ends, strict=True)
            if part.kind == "chunk"
        )

"""The interface of an algorithm: a name, options, and a policy for each chunk of a prompt.

Every algorithm states the same three things: how its chunks are compiled (their `anchor`), which
tokens are linked, and whether requests share the chunks' blocks or copy them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from math import isfinite
from typing import Any, ClassVar

from picbench.engines.algorithms.anchors import Anchors
from picbench.engines.planning.policy import Anchor, ChunkPolicy, LayoutConfig, Marks, Pad, Segment
from picbench.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Numbers from `low` to `high` (None: unbounded) inclusive; whole ones if `low` is an int."""

    low: int | float
    high: int | float | None = None

    def parse(self, text: str) -> int | float | None:
        """The number that `text` is; None if it is none of these."""
        try:
            value = type(self.low)(text)
            finite = isfinite(value)
        except (ValueError, OverflowError):  # the latter for whole numbers of hundreds of digits
            return None
        above = self.high is not None and value > self.high
        return None if above or value < self.low or not finite else value

    def __str__(self) -> str:
        kind = "a whole number" if isinstance(self.low, int) else "a number"
        if self.high is None:
            return f"{kind} of at least {self.low}"
        return f"{kind} from {self.low} to {self.high}"


class Reuse(Enum):
    """What an algorithm reuses of earlier requests."""

    NOTHING = "nothing"
    PREFIX = "prefix"
    CHUNKS = "chunks"


def option(
    default: Any,
    text: str,
    choices: tuple[Any, ...] | NumberRange | Anchors,
    *,
    named: bool = False,
) -> Any:
    """A dataclass field that users can set: ``name:field=value``, to one of its choices.

    Specs leave out default values, but always name a field that is `named`, and name it first.
    """
    metadata = {"help": text, "choices": choices, "named": named}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Algorithm(ABC):
    """A frozen dataclass whose fields are its options.

    A subclass sets `name` and `summary` and implements `plan_chunk`; one that changes the prompt
    itself overrides `arrange`, too. Register it in the entry-point
    group ``picbench.algorithms``; the name of the entry point is what users type.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    reuse: ClassVar[Reuse] = Reuse.CHUNKS
    #: Whether prompts are changed before an engine gets them: chunks in another order, each once.
    reorders: ClassVar[bool] = False

    @abstractmethod
    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """The policy for the chunk at `index` (0 is the prompt's first), of `length` tokens."""

    def arrange(self, segments: Sequence[Segment], layout: LayoutConfig) -> Sequence[Segment]:
        """The prompt as it is planned; `segments` are the user's, neighbouring texts are one.

        An algorithm may add tokens of its own (`Segment.framed`, or whole segments of added
        tokens), make chunks of texts and the other way round, and give segments positions. The
        user's tokens stay all the same and in their order (`Segment.own`). Raises ValueError for a
        prompt that the algorithm cannot serve.
        """
        return segments

    def added(self, chunks: int) -> int:
        """Tokens that `arrange` adds at least for so many chunks; too many are refused before."""
        return 0

    @property
    def separators(self) -> tuple[int, ...]:
        """Ids of the tokens that divide a prompt; none where requests have to say what is where."""
        return ()

    def read_marks(self, tokens: Sequence[int], block_size: int) -> Marks:
        """What separators mark in a prompt without chunks. Raises ConfigError if misplaced."""
        return Marks()

    @property
    def pads(self) -> Pad:
        """How chunks fill whole blocks."""
        return Pad(getattr(self, "pad", Pad.MASKED))

    @property
    def documents(self) -> bool:
        """Whether chunks are compiled after the text of their own documents, where it is given."""
        return getattr(self, "context", "none") == "document"

    @property
    def anchor_text(self) -> str:
        """The name of the text that chunks are compiled after; "" for none."""
        return getattr(self, "anchor", Anchor()).text

    def layout(self, **given: Any) -> LayoutConfig:
        """The layout of prompts: what the algorithm says of it, and the rest as `given`."""
        temperature = getattr(self, "temperature", 1.0)
        return LayoutConfig(
            pad=self.pads, documents=self.documents, temperature=temperature, **given
        )

    @property
    def spec(self) -> str:
        """The notation that `parse` reads, ``name:option=value``."""
        options = sorted(self.options(), key=_is_named, reverse=True)
        given = [f for f in options if _is_named(f) or getattr(self, f.name) != f.default]
        return ":".join([self.name, *(f"{f.name}={getattr(self, f.name)}" for f in given)])

    @property
    def served(self) -> str:
        """The spec that engines serve; another one where prompts are changed before."""
        return self.spec

    @property
    def label(self) -> str:
        """What tables and legends call it: the spec, unless that would mislead."""
        return self.spec

    @classmethod
    def options(cls) -> tuple[Field[Any], ...]:
        """The options that users may set."""
        return fields(cls)


def _is_named(option: Field[Any]) -> bool:
    return bool(option.metadata.get("named"))


@dataclass(frozen=True)
class ChunkAlgorithm(Algorithm):
    """An algorithm that compiles chunks, with their common options; requests share blocks."""

    pad: str = option("masked", "how chunks fill whole blocks", ("masked", "paper"))
    anchor: Anchor = option(Anchor(), "what chunks are compiled after", Anchors())  # noqa: RUF009
    context: str = option(
        "none", "compile a chunk after its document's text before it", ("none", "document")
    )

    def __post_init__(self) -> None:
        if self.pads is Pad.PAPER and self.plan_chunk(0, 1).selection is not None:
            otherwise = ", or use select=first" if hasattr(self, "select") else ""
            raise ConfigError(
                f"{self.spec!r}: tokens are picked, and visible pads would be among them",
                hint=f"leave pad=paper out{otherwise}",
            )


@dataclass(frozen=True)
class CopyingAlgorithm(ChunkAlgorithm):
    """A chunk algorithm that was published with a copy of chunk KV for every request.

    ``copy=private`` is that form: chunk KV is kept in a tier, and requests get blocks of their own.
    With ``copy=shared`` requests share blocks, and nothing else differs.
    """

    copy: str = option(
        "private", "each request gets copies of chunk KV, or shares it", ("private", "shared")
    )

    @property
    def private(self) -> bool:
        """Whether requests get blocks of their own."""
        return self.copy == "private"

"""What an algorithm is: a name, options, and a treatment for each chunk of a prompt."""

from abc import ABC, abstractmethod
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

from picbench.engines.planning.policy import Anchor, ChunkPolicy, Pad


class Reuse(Enum):
    """What of earlier requests an algorithm reuses at all."""

    NOTHING = "nothing"
    PREFIX = "prefix"
    CHUNKS = "chunks"


def option(default: Any, text: str, choices: tuple[Any, ...]) -> Any:
    """A dataclass field that the command line can set: ``name:field=value``."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class Algorithm(ABC):
    """A policy over chunks, as a frozen dataclass whose fields are its options.

    A subclass names itself, says in a line what it does, and treats chunks. Register it under the
    entry-point group ``picbench.algorithms``; the name of the entry point is what users type.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    reuse: ClassVar[Reuse] = Reuse.CHUNKS

    @abstractmethod
    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        """Treat the chunk at `index` (0 is the prompt's first chunk), of `length` tokens."""

    @property
    def pads(self) -> Pad:
        """How chunks fill whole blocks."""
        return Pad(getattr(self, "pad", Pad.MASKED))

    @property
    def spec(self) -> str:
        """The algorithm in the notation of the command line, without default options."""
        parts = [f"{f.name}={getattr(self, f.name)}" for f in self.options() if self._is_set(f)]
        return ":".join([self.name, *parts])

    @classmethod
    def options(cls) -> tuple[Field[Any], ...]:
        """The options that users may set."""
        return fields(cls)

    def _is_set(self, option: Field[Any]) -> bool:
        return option.default is MISSING or getattr(self, option.name) != option.default


@dataclass(frozen=True)
class ChunkAlgorithm(Algorithm):
    """An algorithm that compiles chunks; adds the options that all of these share."""

    pad: str = option("masked", "how chunks fill whole blocks", ("masked", "paper"))
    anchored: str = option("off", "compile chunks behind the prompt's first text", ("off", "on"))

    @property
    def anchor(self) -> Anchor:
        """What chunks are compiled behind."""
        return Anchor.PREFIX if self.anchored == "on" else Anchor.NONE


@dataclass(frozen=True)
class CopyingAlgorithm(ChunkAlgorithm):
    """A chunk algorithm whose publication copies chunk KV into every request.

    ``copy=private`` is that form: chunk KV lives in a tier outside the KV pool, and every request
    gets blocks of its own. ``copy=shared`` maps the same blocks into all requests, so that copying
    is the only difference between the two.
    """

    copy: str = option(
        "private", "each request gets copies of chunk KV, or shares it", ("private", "shared")
    )

    @property
    def private(self) -> bool:
        """Whether requests get blocks of their own."""
        return self.copy == "private"

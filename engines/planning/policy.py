"""What a prompt is made of, and what an algorithm may do to it: the words that plans are made in.

Nothing here imports torch or vllm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from picbench.engines.planning.plan import Slot

#: Discarded BOS tokens in front of a chunk that is compiled for LegoLink-0 (arXiv 2410.15332).
BOS_ANCHOR = 4


class Anchor(Enum):
    """What a chunk is compiled behind: nothing, discarded BOS tokens, the prompt's first text."""

    NONE = "none"
    BOS = "bos"
    PREFIX = "prefix"


class Pad(StrEnum):
    """How chunks fill whole blocks.

    `MASKED`: trailing pads that nobody sees and that take no position. `PAPER`: MEPIC's literal
    form (arXiv 2512.16822, section on segment alignment): visible pads in front of chunks and
    behind prompt text, which take positions.
    """

    MASKED = "masked"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of a prompt in tokens; the first `lead` and the last `trail` are visible pads."""

    tokens: tuple[int, ...]
    chunk: bool = False
    lead: int = 0
    trail: int = 0

    def kind(self, index: int, kind: Slot) -> Slot:
        """`kind`, or `Slot.PAD` if the token at `index` is a pad."""
        real = self.lead <= index < len(self.tokens) - self.trail
        return kind if real else Slot.PAD

    def kinds(self, begin: int, count: int, kind: Slot) -> tuple[Slot, ...]:
        """The kinds of `count` tokens from `begin` on."""
        if not self.lead and not self.trail:
            return (kind,) * count
        return tuple(self.kind(begin + i, kind) for i in range(count))


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """What an algorithm does to one chunk of a prompt.

    `linked` are the token indices within the chunk that are recomputed with the whole logical
    prefix in view, ascending; `private` copies the canonical KV into blocks of the request's own.
    """

    linked: Sequence[int] = ()
    anchor: Anchor = Anchor.NONE
    private: bool = False


#: An algorithm as `lay_out` sees it: (chunk index, chunk length) -> treatment.
Policy = Callable[[int, int], ChunkPolicy]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a plan needs to know of the engine.

    `scope` separates tenants and models. `pad_token` fills visible pads (`Pad.PAPER`); masked pads
    repeat a token of the chunk, so that they never add one to the prompt. `bos_token` fills
    discarded BOS anchors.
    """

    block_size: int = 16
    scope: str = ""
    pad: Pad = Pad.MASKED
    pad_token: int = 0
    bos_token: int | None = None

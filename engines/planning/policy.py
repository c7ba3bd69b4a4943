"""What goes into a plan: the prompt's segments, the engine's layout, and a policy for each chunk.

Nothing here imports torch or vllm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from picbench.engines.planning.pages import SlotKind

#: BOS tokens that a chunk is compiled after for LegoLink-0 (arXiv 2410.15332).
BOS_ANCHOR = 4


class Anchor(Enum):
    """Tokens in view before a chunk while it is compiled: none, BOS tokens, the prompt's text.

    BOS tokens are discarded afterwards; PREFIX is the prompt's text before its first chunk.
    """

    NONE = "none"
    BOS = "bos"
    PREFIX = "prefix"


class Pad(StrEnum):
    """How chunks fill whole blocks.

    `MASKED`: invisible pads after a chunk, which take no position. `PAPER`: MEPIC's literal form
    (arXiv 2512.16822, section on segment alignment): visible pads before chunks and after prompt
    text, which take positions.
    """

    MASKED = "masked"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt segment in tokens: a chunk or text. The first `lead` and last `trail` are pads."""

    tokens: tuple[int, ...]
    chunk: bool = False
    lead: int = 0
    trail: int = 0

    @property
    def own(self) -> tuple[int, ...]:
        """The tokens without pads."""
        return self.tokens[self.lead : len(self.tokens) - self.trail]

    def kind(self, index: int, kind: SlotKind) -> SlotKind:
        """`kind`, or `SlotKind.PAD` if the token at `index` is a pad."""
        real = self.lead <= index < len(self.tokens) - self.trail
        return kind if real else SlotKind.PAD

    def kinds(self, begin: int, count: int, kind: SlotKind) -> tuple[SlotKind, ...]:
        """The kinds of `count` tokens from `begin` on."""
        if not self.lead and not self.trail:
            return (kind,) * count
        return tuple(self.kind(begin + i, kind) for i in range(count))


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """How one chunk of a prompt is compiled and linked.

    `linked` are the indices, ascending, of the chunk's tokens that are recomputed with the whole
    logical prefix in view. `anchor` is what the chunk is compiled after. `private` copies its
    canonical KV into the request's own blocks; otherwise requests share blocks.
    """

    linked: Sequence[int] = ()
    anchor: Anchor = Anchor.NONE
    private: bool = False


#: An algorithm as `lay_out` sees it: (index of the chunk in the prompt, its length) -> policy.
PlanChunk = Callable[[int, int], ChunkPolicy]


@dataclass(frozen=True, slots=True)
class LayoutConfig:
    """What a plan depends on besides the prompt and the algorithm.

    `scope` separates tenants: plans of different scopes share no key. `pad_token` fills visible
    pads (`Pad.PAPER`); masked ones repeat a token of the chunk, so that they add none to the
    prompt. `bos_token` fills BOS anchors.
    """

    block_size: int = 16
    scope: str = ""
    pad: Pad = Pad.MASKED
    pad_token: int = 0
    bos_token: int | None = None

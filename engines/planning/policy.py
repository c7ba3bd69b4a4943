"""What goes into a plan: the prompt's segments, the engine's layout, a policy for each chunk."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from math import floor
from operator import attrgetter
from pathlib import Path
from traceback import extract_tb
from typing import SupportsIndex

from picbench.engines.planning.documents import Context
from picbench.engines.planning.pages import SlotKind
from picbench.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Anchor:
    """Tokens in view before a chunk while it is compiled, whose KV is then discarded.

    They are so many BOS tokens (`bos`), or the `head`: the prompt's text before its first chunk,
    and after it the text that `LayoutConfig.anchors` has under the name `text` ("" is none).
    """

    head: bool = False
    text: str = ""
    bos: int = 0

    def __str__(self) -> str:
        return self.text or ("head" if self.head else "off")


class Pad(StrEnum):
    """How chunks fill whole blocks.

    `MASKED`: invisible pads after a chunk, which take no position. `PAPER`: MEPIC's literal form
    (arXiv 2512.16822, section on segment alignment): visible pads before chunks and after prompt
    text, which take positions.
    """

    MASKED = "masked"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a chunk that each request fills with tokens of its own.

    The chunk is compiled with `length` placeholders from its token `index` on. A request does not
    see them: `tokens`, at most `length`, have the first of their positions, and nothing has the
    others. These are the parameters of Prompt Cache (arXiv 2311.04934, section 3.3).
    """

    index: int
    length: int
    tokens: tuple[int, ...]

    @property
    def indices(self) -> range:
        """The placeholders among the chunk's tokens."""
        return range(self.index, self.index + self.length)


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt segment in tokens: a chunk or text.

    The first `lead` and last `trail` tokens are none of the user's: pads, separators, link tokens.
    `position` is the logical position of the first token, these included; None: it follows the
    segment before it. `slots`, ascending, are those of the chunk's tokens that are placeholders.
    `context` is what stands before a chunk in its document, whether or not the prompt shows it.
    `dependent` are indices, ascending, of the chunk's tokens that the user wants recomputed with
    the whole logical prefix in view, whatever the algorithm recomputes besides.
    """

    tokens: tuple[int, ...]
    chunk: bool = False
    lead: int = 0
    trail: int = 0
    position: int | None = None
    slots: tuple[Slot, ...] = ()
    context: Context | tuple[int, ...] = ()
    dependent: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether all tokens are the user's, and all are seen."""
        return not (self.lead or self.trail or self.slots)

    @property
    def own(self) -> tuple[int, ...]:
        """The user's tokens."""
        if self.plain:
            return self.tokens
        at, end = self.lead, len(self.tokens) - self.trail
        own: list[int] = []
        for slot in self.slots:
            own += self.tokens[at : slot.index]
            own += slot.tokens
            at = slot.index + slot.length
        return (*own, *self.tokens[at:end])

    @property
    def placeholders(self) -> frozenset[int]:
        """Indices of the tokens that no request sees."""
        return frozenset(index for slot in self.slots for index in slot.indices)

    @property
    def filled(self) -> dict[int, int]:
        """What requests see in the place of placeholders: tokens by index."""
        pairs = (zip(slot.indices, slot.tokens, strict=False) for slot in self.slots)
        return dict(chain.from_iterable(pairs))

    @property
    def added(self) -> frozenset[int]:
        """Ids of the tokens that are none of the user's."""
        end = len(self.tokens) - self.trail
        outside = self.tokens[: self.lead] + self.tokens[end:]
        return frozenset(outside).union(self.tokens[slot.index] for slot in self.slots)

    def framed(self, lead: tuple[int, ...] = (), trail: tuple[int, ...] = ()) -> "Segment":
        """The segment with more added tokens before and after it."""
        if not lead and not trail:
            return self
        return replace(
            self,
            tokens=lead + self.tokens + trail,
            lead=self.lead + len(lead),
            trail=self.trail + len(trail),
            slots=tuple(replace(slot, index=slot.index + len(lead)) for slot in self.slots),
            dependent=tuple(index + len(lead) for index in self.dependent),
        )

    def kinds(self, begin: int, count: int, kind: SlotKind) -> tuple[SlotKind, ...]:
        """The kinds of `count` tokens from `begin` on: `kind`, or PAD where they are added."""
        if self.plain:
            return (kind,) * count
        end, last = len(self.tokens) - self.trail, begin + count
        # A chunk may have thousands of slots, and this is asked for each of its pages.
        first = bisect_right(self.slots, begin, key=lambda slot: slot.index + slot.length)
        over = bisect_left(self.slots, last, lo=first, key=attrgetter("index"))
        hidden = {index for slot in self.slots[first:over] for index in slot.indices}
        return tuple(
            kind if self.lead <= i < end and i not in hidden else SlotKind.PAD
            for i in range(begin, begin + count)
        )


class Deviation(StrEnum):
    """Of which KV at the check layer a token's deviation is measured: of its key or its value."""

    KEYS = "k"
    VALUES = "v"


@dataclass(frozen=True, slots=True)
class DeviationSelection:
    """Linked tokens that are known only once the request runs: those whose KV deviates most.

    They are the `share` of the tokens of all chunks, rounded down, whose KV at the check layer
    differs most from the canonical KV (CacheBlend, arXiv 2405.16444, section 4.3).
    """

    share: float
    deviation: Deviation

    def count(self, lengths: Sequence[int]) -> int:
        """How many tokens of chunks of such lengths are linked."""
        return _share_of(lengths, self.share)


@dataclass(frozen=True, slots=True)
class QuestionSelection:
    """Linked tokens that are known only once the request runs: what its question attends to.

    They are as many as the first `most` tokens of every chunk, from the blocks with the most
    attention a token; with a `share`, that part of the tokens of all chunks, rounded down, those
    with the most attention. The request's chunks stay as they are, so that requests may share them.
    """

    most: int = 0
    share: float | None = None

    @property
    def deviation(self) -> None:
        """Nothing is compared."""
        return None

    def count(self, lengths: Sequence[int]) -> int:
        """How many tokens of chunks of such lengths are linked."""
        if self.share is not None:
            return _share_of(lengths, self.share)
        return sum(min(self.most, length) for length in lengths)


def _share_of(lengths: Sequence[int], share: float) -> int:
    # The product has rounding errors: 0.29 * 100 must be 29, not 28.
    return floor(round(share * sum(lengths), 6))


@dataclass(frozen=True, slots=True)
class Picks:
    """A selection for one prompt: `count` tokens with the largest `deviation`.

    Without one, those that the question attends to most: `single` ones, or those of whole blocks.
    """

    count: int
    deviation: Deviation | None
    single: bool


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """How one chunk of a prompt is compiled and linked.

    `linked` are the indices, ascending, of the chunk's tokens that are recomputed with the whole
    logical prefix in view. `anchor` is what the chunk is compiled after. `private` copies its
    canonical KV into the request's own blocks; otherwise requests share blocks. A `fixed` chunk is
    compiled at the positions that it has in the prompt, and is another one at other positions; it
    has neither anchor nor document. With a `selection` the worker that computes the request links
    further tokens; all chunks of a prompt have the same one then. If it is by deviation they are
    private, because canonical KV of the first layers is replaced.
    """

    linked: Sequence[int] = ()
    anchor: Anchor = Anchor()
    private: bool = False
    fixed: bool = False
    selection: DeviationSelection | QuestionSelection | None = None


@dataclass(frozen=True, slots=True)
class Marks:
    """What separators in a prompt mark, as ``[start, end)`` spans of prompt tokens, in order.

    `spans` are chunks; `dependent` tokens, in them or between, see the whole logical prefix.
    """

    spans: tuple[tuple[int, int], ...] = ()
    dependent: tuple[tuple[int, int], ...] = ()


#: An algorithm as `lay_out` sees it: (index of the chunk in the prompt, its length) -> policy.
PlanChunk = Callable[[int, int], ChunkPolicy]


def answered(plan_chunk: PlanChunk) -> PlanChunk:
    """`plan_chunk` with ValueErrors for what else it raises, and for another answer."""

    def ask(index: int, length: int) -> ChunkPolicy:
        call = f"plan_chunk({index}, {length})"
        try:
            policy = plan_chunk(index, length)
        except ConfigError:
            raise
        except Exception as error:
            last = extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            what = f"{call} raised {type(error).__name__}: {error} ({place})"
            raise ValueError(what) from error
        if not isinstance(policy, ChunkPolicy):
            raise ValueError(f"{call} returned {policy!r}, which is no ChunkPolicy")
        linked = policy.linked
        # Most algorithms link a range, and this is asked for each chunk of each request.
        if not isinstance(linked, range) and not (
            isinstance(linked, Collection) and all(isinstance(i, SupportsIndex) for i in linked)
        ):
            raise ValueError(f"{call} links {linked!r}, which is no sequence of whole numbers")
        return policy

    return ask


@dataclass(frozen=True, slots=True)
class LayoutConfig:
    """What a plan depends on besides the prompt and the algorithm.

    `scope` separates tenants: plans of different scopes share no key. `pad_token` fills visible
    pads (`Pad.PAPER`) and is compiled in the place of what a request fills (`Slot`); masked pads
    repeat a token of the chunk, so that they add none to the prompt. `bos_token` fills BOS anchors,
    `link_tokens` are those that the model was trained to link chunks with, and `anchors` those of
    anchors' texts, by name. With `documents`, chunks are compiled after the text of their
    documents: first the anchor, then the chunk's `context`, then the chunk. A request's scores of
    canonical keys are divided by `temperature` (APE, arXiv 2502.05431).
    """

    block_size: int = 16
    scope: str = ""
    pad: Pad = Pad.MASKED
    pad_token: int = 0
    bos_token: int | None = None
    link_tokens: tuple[int, ...] = ()
    anchors: Mapping[str, Sequence[int]] = field(default_factory=dict)
    documents: bool = False
    temperature: float = 1.0

    @property
    def bos(self) -> int:
        """The model's BOS token. Raises ValueError if it has none."""
        if self.bos_token is None:
            raise ValueError("the model has no BOS token to compile after")
        return self.bos_token

    def text(self, anchor: Anchor) -> tuple[int, ...]:
        """The tokens of an anchor's text. Raises ConfigError for one that is not known."""
        if anchor.text and not self.anchors.get(anchor.text):
            raise ConfigError(
                f"the engine was not started with anchor={anchor.text}",
                hint="start it with an algorithm that has it, or with its tokens in `anchors`",
            )
        return tuple(self.anchors.get(anchor.text, ()))

"""Position-independent reuse as one forward pass over an expanded sequence.

The sequence of a request is [head][canonical chunk tokens][linked tokens][tail]: canonical tokens
see their own chunk only, linked tokens and the tail see everything before them, and a canonical
token that was linked again is hidden from both. This defines the result of an algorithm without a
cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from picbench.workloads.testbed.prompt import LINKS_EACH

#: Groups of tokens outside of chunks.
HEAD, TAIL = 0, -1
PAD = -2


@dataclass(frozen=True, slots=True)
class ReuseArm:
    """A way to reuse chunks.

    Without `reuse` everything is recomputed. `link` is the number of tokens at the start of every
    chunk that are recomputed with the whole prefix visible, except in the first chunk with
    `spare_first`. `anchored` chunks are compiled after the prompt's head. `trained_links` is the
    number of link tokens after every chunk; `shuffled` takes each chunk's keys and values from a
    chunk of another request.
    """

    name: str
    reuse: bool = True
    link: int = 0
    spare_first: bool = False
    anchored: bool = False
    trained_links: int = 0
    shuffled: bool = False


FULL = ReuseArm("full", reuse=False)
NAIVE = ReuseArm("naive")
#: MEPIC links the first block of sixteen slots of every chunk.
MEPIC = ReuseArm("mepic", link=16)
#: KVLink puts trained link tokens after every chunk.
KVLINK = ReuseArm("kvlink", trained_links=LINKS_EACH)
ARMS = (
    FULL,
    NAIVE,
    *(ReuseArm(f"epic-{k}", link=k, spare_first=True) for k in (8, 16, 32, 64)),
    MEPIC,
    ReuseArm("anchored", anchored=True),
    ReuseArm("mepic-anchored", link=16, anchored=True),
    ReuseArm("shuffled", shuffled=True),
)


class PromptTokens(NamedTuple):
    """A prompt as token ids: before the chunks, the chunks, after them."""

    head: Sequence[int]
    chunks: Sequence[Sequence[int]]
    tail: Sequence[int]


@dataclass(slots=True)
class ExpandedPrompt:
    """The expanded sequence, a list for each property of a slot.

    `group` is HEAD, TAIL or the number of the chunk from 1; `canonical` slots see their chunk
    only, `hidden` ones are seen by canonical slots only.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    canonical: list[bool] = field(default_factory=list)
    hidden: list[bool] = field(default_factory=list)

    def add(
        self, ids: Sequence[int], start: int, group: int, canonical: bool = False, hidden: int = 0
    ) -> int:
        """Append tokens at positions from `start`, the first `hidden` hidden; return the end."""
        self.ids += ids
        self.positions += range(start, start + len(ids))
        self.group += [group] * len(ids)
        self.canonical += [canonical] * len(ids)
        self.hidden += [index < hidden for index in range(len(ids))]
        return start + len(ids)


def expand(tokens: PromptTokens, arm: ReuseArm, links: Sequence[int] = ()) -> ExpandedPrompt:
    """Lay out a request for an arm; `links` are the ids of the trained link tokens."""
    slots, linked = ExpandedPrompt(), ExpandedPrompt()
    position = slots.add(tokens.head, 0, HEAD)
    for number, chunk in enumerate(tokens.chunks, start=1):
        again = arm.link if arm.reuse and not (arm.spare_first and number == 1) else 0
        linked.add(chunk[:again], position, TAIL)
        position = slots.add(chunk, position, number, canonical=arm.reuse, hidden=again)
        position = linked.add(links[: arm.trained_links], position, TAIL)
    linked.add(tokens.tail, position, TAIL)
    for name in PaddedBatch._fields:
        getattr(slots, name).extend(getattr(linked, name))
    return slots


class PaddedBatch(NamedTuple):
    """A batch of expanded sequences, padded on the right: (rows, slots) each."""

    ids: Tensor
    positions: Tensor
    group: Tensor
    canonical: Tensor
    hidden: Tensor

    @property
    def filled(self) -> Tensor:
        """Which slots hold a token."""
        return self.group != PAD

    def to(self, device: torch.device) -> "PaddedBatch":
        """Move to a device."""
        return PaddedBatch(*(tensor.to(device) for tensor in self))


def collate(batch: Sequence[ExpandedPrompt]) -> PaddedBatch:
    """Put sequences into one layout."""
    padded = []
    for name in PaddedBatch._fields:
        rows = [torch.tensor(getattr(slots, name)) for slots in batch]
        fill = PAD if name == "group" else 0
        padded.append(pad_sequence(rows, batch_first=True, padding_value=fill))
    return PaddedBatch(*padded)


def visible(layout: PaddedBatch, anchored: bool = False) -> Tensor:
    """Which slots a slot sees: (rows, 1, slots, slots)."""
    before = _as_key(layout.positions) <= _as_query(layout.positions)
    own = _as_query(layout.group) == _as_key(layout.group)
    isolated = own & _as_key(layout.canonical)
    if anchored:
        isolated = isolated | _as_key(layout.group == HEAD)
    free = ~_as_key(layout.hidden)
    seen = torch.where(_as_query(layout.canonical), isolated, free) & before
    # A pad sees itself, so that its softmax is not empty.
    itself = torch.eye(layout.ids.shape[1], dtype=torch.bool, device=layout.ids.device)
    return ((seen & _as_key(layout.filled)) | itself)[:, None]


def _as_query(x: Tensor) -> Tensor:
    return x[:, :, None]


def _as_key(x: Tensor) -> Tensor:
    return x[:, None, :]

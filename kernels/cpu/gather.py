"""The keys that each request of a step reads: in place, or gathered into scratch memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from picbench.kernels.paging import BLOCK_SIZE, GAP, flat_slots
from picbench.kernels.rope import RopeTable


@dataclass(frozen=True, slots=True)
class PagedRequest:
    """One request of a step, as the engine describes it (`AttentionBatch.build`).

    `start` and `stop` bound its queries in the packed batch and `qpos` are their logical
    positions. `table` [blocks] names its blocks, of which `length` slots are valid. `positions`
    is the logical position of each slot, None for an affine request. `row` is that of position 0 in
    the RopeTable, for keys that are rotated here.
    """

    start: int
    stop: int
    table: Tensor
    length: int
    positions: Tensor | None
    rotated: bool | Tensor
    qpos: Tensor
    row: int = 0

    @property
    def affine(self) -> bool:
        """Whether positions count up from 0 and the queries are the last slots."""
        return self.positions is None

    @property
    def decodes(self) -> bool:
        """Whether it has one query, and positions of its own."""
        return not self.affine and self.stop - self.start == 1

    @property
    def in_place(self) -> bool:
        """Whether its keys can be read from the cache itself."""
        return self.affine and self.rotated is True

    @property
    def kpos(self) -> Tensor:
        """Logical position of each slot [length]."""
        if self.positions is None:
            return torch.arange(self.length, dtype=torch.int32)
        return self.positions[: self.length]

    @property
    def rotate_by(self) -> Tensor:
        """Row by which each slot's key is still to be rotated [length]; -1: not at all."""
        if isinstance(self.rotated, Tensor):
            return torch.where(self.rotated[: self.length], -1, self.kpos + self.row)
        return torch.full((self.length,), -1) if self.rotated else self.kpos


@dataclass(frozen=True, slots=True)
class Gather:
    """Keys and values in the order in which queries see them, of one request or `several`.

    First the whole `blocks` [b] of the cache, then single `slots` [s], both int64. `pages` and
    `rows` are their cosines and sines (RopeTable), None where no key is to be rotated, and
    `is_neox` says which dimensions they rotate. Query i of the request sees the first visible[i]
    keys, none more than the first `length`. `blind` holds the packed indices of queries that see
    nothing, None if there are none. `several` has the number of queries of each request, and the
    blocks [int32] of what is gathered that its keys are in.
    """

    start: int
    stop: int
    blocks: Tensor
    pages: Tensor | None
    slots: Tensor
    rows: Tensor | None
    is_neox: bool
    visible: Tensor
    length: int
    blind: Tensor | None
    several: Sequence[tuple[int, Tensor]] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks of scratch memory that the keys take."""
        return len(self.blocks) + -(-len(self.slots) // BLOCK_SIZE)


def in_logical_order(requests: Sequence[PagedRequest], rope: RopeTable) -> Gather:
    """Gathers slot by slot in logical order, so that each query sees a prefix of the keys.

    Requests follow each other, and blocks that several read at the same positions are there once.
    A padding query (qpos GAP) is given at most one key, because its output is thrown away.
    """
    blocks: dict[tuple[int, ...], int] = {}
    tables, seen = [], []
    for request in requests:
        kpos, order = request.kpos.sort(stable=True)
        count = int(torch.searchsorted(kpos, GAP))
        visible = torch.searchsorted(kpos[:count], request.qpos.to(kpos.dtype), right=True)
        seen.append(torch.where(request.qpos == GAP, visible.clamp(max=1), visible))
        order = order[: int(seen[-1].max())]
        # The last key again, up to a whole block: no query sees it, and it is finite.
        order = torch.cat([order, order[-1:].expand(-len(order) % BLOCK_SIZE)])
        read = torch.stack([flat_slots(request.table, order), request.rotate_by[order]], 1)
        found = map(tuple, read.view(-1, 2 * BLOCK_SIZE).tolist())
        places = [blocks.setdefault(block, len(blocks)) for block in found]
        tables.append(torch.tensor(places, dtype=torch.int32))
    slots, by_slot = torch.tensor([*blocks], dtype=torch.int64).view(-1, 2).unbind(1)
    return replace(
        _gather(requests[0], rope, slots[:0], slots[:0], torch.cat(seen)),
        stop=requests[-1].stop,
        slots=slots,
        rows=rope.rows(by_slot) if _any_rotation(by_slot) else None,
        length=len(slots),
        several=[*zip(map(len, seen), tables, strict=True)],
    )


def in_slot_order(request: PagedRequest, rope: RopeTable) -> Gather:
    """Gathers the blocks of an affine request."""
    blocks = torch.arange(-(-request.length // BLOCK_SIZE))
    queries = request.stop - request.start
    visible = torch.arange(request.length - queries, request.length) + 1
    return _gather(request, rope, blocks, blocks[:0], visible)


def for_one_query(request: PagedRequest, rope: RopeTable) -> Gather:
    """Gathers what the only query sees, whole blocks where it sees all of a block.

    Attention does not depend on the order of keys, so nothing is sorted.
    """
    kpos = request.kpos
    seen = (kpos <= request.qpos) & (kpos != GAP)
    full = len(seen) // BLOCK_SIZE * BLOCK_SIZE
    whole = seen[:full].view(-1, BLOCK_SIZE).all(1)
    loose = seen.clone()
    loose[:full] &= ~whole.repeat_interleave(BLOCK_SIZE)
    count = seen.sum().view(1)
    return _gather(request, rope, whole.nonzero().flatten(), loose.nonzero().flatten(), count)


def runs(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts queries into runs in which each sees one key more than the one before.

    A run is an ordinary causal sequence. Returns where the runs begin (and the last one ends),
    [runs + 1], and how many keys the last query of each sees, [runs]; both int32.
    """
    cuts = (visible.diff() != 1).nonzero().flatten() + 1
    ends = torch.cat([cuts, cuts.new_tensor([len(visible)])])
    starts = torch.cat([ends.new_zeros(1), ends]).int()
    return starts, visible[ends - 1].int()


def _gather(
    request: PagedRequest, rope: RopeTable, blocks: Tensor, order: Tensor, visible: Tensor
) -> Gather:
    inside = (blocks.unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
    rotate_by = request.rotate_by
    by_block, by_slot = rotate_by[inside.clamp(max=request.length - 1)], rotate_by[order]
    blind = (visible == 0).nonzero().flatten() + request.start
    return Gather(
        start=request.start,
        stop=request.stop,
        blocks=request.table[blocks].long(),
        pages=rope.pages(by_block) if _any_rotation(by_block) else None,
        slots=flat_slots(request.table, order),
        rows=rope.rows(by_slot) if _any_rotation(by_slot) else None,
        is_neox=rope.is_neox,
        visible=visible,
        length=int(visible.max()),
        blind=blind if len(blind) else None,
    )


def _any_rotation(positions: Tensor) -> bool:
    return len(positions) > 0 and int(positions.max()) >= 0

"""Copies of what decoding requests read, with rotated keys, kept from step to step.

Keys that are cached without RoPE are rotated when they are read, and one query reads as many of
them as many queries do: gathering and rotating all keys of a request again for each of its tokens
takes longer than attention itself. So the first step that decodes gathers them into blocks of its
own, and later steps add the new token's key and value.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from picbench.kernels.cpu.gather import Gather, PagedRequest, for_one_query
from picbench.kernels.paging import BLOCK_SIZE, GAP
from picbench.kernels.rope import RopeTable


@dataclass(slots=True)
class KvCopy:
    """The copy of one request, whose logical `positions` tell it from other requests.

    It has all of the first `slots` slots that are visible, `count` of them, read from the blocks
    `sources`. They are in the blocks `table` [max_blocks] of the copies, in any order. `hidden` is
    the first position that no query has reached yet.
    """

    positions: Tensor
    sources: Tensor
    slots: int
    count: int
    hidden: int
    table: Tensor
    blocks: list[int]

    @property
    def full(self) -> bool:
        """Whether another slot needs another block."""
        return self.count == len(self.blocks) * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class CopyUpdate:
    """What one step does to a copy before it is read: `fill` it, or add one slot.

    Slot `source` of the KV cache becomes slot `target` of the copies, its key rotated by
    `rotate_by` positions (-1: not at all). `fresh` is a block that the copy did not have before.
    """

    copy: KvCopy
    fill: Gather | None = None
    source: int = -1
    target: int = -1
    rotate_by: int = -1
    fresh: int | None = None


class KvCopies:
    """The copies of one engine, in at most `capacity` blocks of each layer.

    A request without a copy is gathered in each step, as long as there is no room for it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free = list(reversed(range(capacity)))
        self._copies: dict[int, KvCopy] = {}
        self._layers: dict[int, Tensor] = {}
        self._touched = 0

    @property
    def free(self) -> int:
        """Blocks that no copy has."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Memory held: in all layers, the blocks that any copy has had so far.

        Blocks that were dropped stay with the process, and are the first to be taken again.
        """
        return sum(self._touched * layer[0].nbytes for layer in self._layers.values())

    def layer(self, kv_cache: Tensor) -> Tensor:
        """The copies of the layer with this cache, in blocks of the same shape."""
        found = self._layers.get(kv_cache.data_ptr())
        if found is None:
            # Not cleared: the system allocates pages of memory when a copy first writes them.
            found = kv_cache.new_empty((self._capacity, *kv_cache.shape[1:]))
            self._layers[kv_cache.data_ptr()] = found
        return found

    def retain(self, requests: Iterable[PagedRequest]) -> None:
        """Drop the copies of all but these requests."""
        alive = {id(request.positions) for request in requests}
        for key in [key for key in self._copies if key not in alive]:
            self._drop(key)

    def update(self, request: PagedRequest, rope: RopeTable) -> CopyUpdate | None:
        """Bring the copy of a request with one query up to date; None if it cannot have one."""
        copy = self._copies.get(id(request.positions))
        if copy is not None:
            if _continues(copy, request) and (self._free or not copy.full):
                return self._add(copy, request)
            self._drop(id(request.positions))
        return self._fill(request, rope)

    def _fill(self, request: PagedRequest, rope: RopeTable) -> CopyUpdate | None:
        assert request.positions is not None
        gather = for_one_query(request, rope)
        if gather.num_blocks > len(self._free) or not gather.length:
            return None
        kpos = request.kpos
        unseen = kpos[(kpos > request.qpos) & (kpos != GAP)]
        copy = KvCopy(
            positions=request.positions,
            sources=request.table[: _blocks(request.length)].clone(),
            slots=request.length,
            count=gather.length,
            hidden=int(unseen.min()) if len(unseen) else GAP,
            table=torch.zeros_like(request.table),
            blocks=[],
        )
        for _ in range(gather.num_blocks):
            self._grow(copy)
        self._copies[id(request.positions)] = copy
        return CopyUpdate(copy, fill=gather)

    def _add(self, copy: KvCopy, request: PagedRequest) -> CopyUpdate:
        fresh = self._grow(copy) if copy.full else None
        slot = copy.slots
        if len(copy.sources) < _blocks(request.length):
            copy.sources = request.table[: _blocks(request.length)].clone()
        update = CopyUpdate(
            copy,
            source=_flat(copy.sources, slot),
            target=_flat(copy.table, copy.count),
            rotate_by=_rotate_by(request, slot),
            fresh=fresh,
        )
        copy.slots, copy.count = request.length, copy.count + 1
        return update

    def _grow(self, copy: KvCopy) -> int:
        block = self._free.pop()
        self._touched = max(self._touched, block + 1)
        copy.table[len(copy.blocks)] = block
        copy.blocks.append(block)
        return block

    def _drop(self, key: int) -> None:
        self._free += self._copies.pop(key).blocks


def _continues(copy: KvCopy, request: PagedRequest) -> bool:
    """Whether the request has one slot more than its copy, visible, in the same blocks."""
    if request.length != copy.slots + 1 or request.positions is None:
        return False
    position, query = int(request.positions[copy.slots]), int(request.qpos[0])
    visible = position <= query < copy.hidden and position != GAP
    return visible and torch.equal(request.table[: len(copy.sources)], copy.sources)


def _rotate_by(request: PagedRequest, slot: int) -> int:
    assert request.positions is not None
    rotated = request.rotated
    if isinstance(rotated, Tensor):
        rotated = bool(rotated[slot])
    return -1 if rotated else int(request.positions[slot])


def _flat(table: Tensor, slot: int) -> int:
    return int(table[slot // BLOCK_SIZE]) * BLOCK_SIZE + slot % BLOCK_SIZE


def _blocks(slots: int) -> int:
    return -(-slots // BLOCK_SIZE)

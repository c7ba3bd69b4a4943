"""Random requests over chunks whose blocks they share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.visible_blocks import CanonicalBlocks
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape
from picbench.measure.kernels.scene import Scene, Slots, filled, planned


@dataclass(frozen=True, slots=True)
class ChunkReads:
    """A request's chunks, by number, and how many of its tokens follow them.

    The first `linked` tokens of each chunk are recomputed; chunks were compiled after `anchor`.
    """

    chunks: tuple[int, ...]
    text: int
    linked: int = 0
    anchor: int = 0


@dataclass(frozen=True, slots=True)
class SharedScene:
    """A scene, and the canonical blocks of each request."""

    scene: Scene
    canonical: tuple[CanonicalBlocks, ...]

    def put(self, table: SharedRequestTable, rows: Sequence[int]) -> None:
        """Write the requests to these rows of the table."""
        for row, slots, canonical in zip(rows, self.scene.requests, self.canonical, strict=True):
            table.put(row, slots.kpos, slots.rope_shift, canonical)


def draw_shared(
    lengths: Sequence[int],
    reads: Sequence[ChunkReads],
    shape: HeadShape,
    rope: RopeTable,
    *,
    device: torch.device | str,
    seed: int = 0,
    head_major: bool = False,
    poison: bool = False,
    unrotated: bool = False,
) -> SharedScene:
    """Requests over chunks of these lengths; blocks are scattered.

    Keys are random, so `unrotated` only says how they have to be read.
    """
    generator = torch.Generator(device).manual_seed(seed)
    requests = [_slots(lengths, read, unrotated=unrotated) for read in reads]
    shifts = [_slots(lengths, read, unrotated=False).rope_shift for read in reads]
    chunk_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    own = [-(-slots.computed // BLOCK_SIZE) for slots in requests]
    total = sum(chunk_blocks) + sum(own) + 1
    order = torch.randperm(total, generator=generator, device=device).int()
    *parts, _ = torch.split(order, [*chunk_blocks, *own, 1])
    chunks, private = parts[: len(lengths)], parts[len(lengths) :]
    table = torch.zeros(
        len(reads), max(slots.blocks for slots in requests), dtype=torch.int32, device=device
    )
    canonical = []
    for row, read, mine, shift in zip(table, reads, private, shifts, strict=True):
        found = [_kept(chunks[chunk], lengths[chunk], read.linked) for chunk in read.chunks]
        shared = torch.cat([*found, mine[:0]])
        row[: len(shared)] = shared
        row[len(shared) : len(shared) + len(mine)] = mine
        slots = len(shared) * BLOCK_SIZE
        canonical.append(CanonicalBlocks(shared.cpu().numpy(), shift[:slots].numpy()))
    scene = filled(requests, table, total, shape, rope, generator, head_major, poison)
    return SharedScene(scene, tuple(canonical))


def _slots(lengths: Sequence[int], read: ChunkReads, *, unrotated: bool) -> Slots:
    return planned(
        [lengths[chunk] for chunk in read.chunks],
        linked=read.linked,
        text=read.text,
        anchor=read.anchor,
        unrotated=unrotated,
    )


def _kept(blocks: Tensor, length: int, linked: int) -> Tensor:
    """A chunk's blocks without those that are linked as a whole."""
    return blocks[min(linked, length) // BLOCK_SIZE :]

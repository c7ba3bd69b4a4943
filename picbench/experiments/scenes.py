"""Random requests over a paged cache, as algorithms lay them out, and what kernels must answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from picbench.errors import InvalidRun
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.reference import attend_reference
from picbench.kernels.cuda.visible_blocks import CanonicalBlocks
from picbench.kernels.paging import BLOCK_SIZE, GAP, flat_slots
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

#: Relative error against float64 that a type may have.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True)
class Slots:
    """A request's slots in compute order: `kpos` and `rope_shift` [slots] int32 on the CPU.

    `computed` counts the last slots, which the request computes itself. The first blocks may be
    `shared`: those from the given one on of each chunk, by number. `chunk_shift` [slots] int32 is
    by how much their positions exceed those at which their chunks were compiled.
    """

    kpos: Tensor
    rope_shift: Tensor
    computed: int
    shared: Sequence[tuple[int, int]] = ()
    chunk_shift: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.int32))

    @property
    def blocks(self) -> int:
        """Blocks that the slots take."""
        return -(-len(self.kpos) // BLOCK_SIZE)

    @property
    def shared_blocks(self) -> int:
        """How many of the blocks, the first ones, are shared."""
        return len(self.chunk_shift) // BLOCK_SIZE if self.shared else 0

    @property
    def end(self) -> int:
        """Logical positions in use."""
        return int(self.kpos[self.kpos != GAP].max()) + 1


def planned(
    chunks: Sequence[int],
    *,
    linked: int,
    text: int,
    anchor: int = 0,
    unrotated: bool = False,
    numbers: Sequence[int] = (),
) -> Slots:
    """A request of chunks, then `text` tokens; the first `linked` tokens of each are recomputed.

    Chunks were compiled after `anchor` tokens. Blocks without a visible slot are left out. Those of
    chunks with the same one of `numbers` are shared.
    """
    every = torch.arange(sum(chunks) + text, dtype=torch.int32)
    *spans, rest = torch.split(every, [*chunks, text])
    firsts = [min(linked, length) // BLOCK_SIZE for length in chunks]
    kept, shifts = [], []
    for own, first in zip(spans, firsts, strict=True):
        gaps = min(linked, len(own)) - BLOCK_SIZE * first
        canonical = pad(own[linked:], (gaps, -len(own) % BLOCK_SIZE), value=GAP)
        kept.append(canonical)
        shifts.append(torch.full_like(canonical, int(own[0]) - anchor))
    computed = torch.cat([*(own[:linked] for own in spans), rest])
    kpos = torch.cat([*kept, computed])
    chunk_shift = torch.cat([*shifts, every[:0]])
    rope_shift = kpos.clone() if unrotated else pad(chunk_shift, (0, len(computed)))
    shared = list(zip(numbers, firsts, strict=True)) if numbers else []
    return Slots(kpos, rope_shift, len(computed), shared, chunk_shift)


def plain(length: int, new: int) -> Slots:
    """A request without chunks, whose last `new` tokens are computed now."""
    kpos = torch.arange(length, dtype=torch.int32)
    return Slots(kpos, torch.zeros_like(kpos), new)


@dataclass(frozen=True, slots=True)
class ChunkReads:
    """A request's chunks, by number, and how many of its tokens follow them.

    The first `linked` tokens of each chunk are recomputed; chunks were compiled after `anchor`.
    """

    chunks: tuple[int, ...]
    text: int
    linked: int = 0
    anchor: int = 0

    def slots(self, lengths: Sequence[int], *, unrotated: bool = False) -> Slots:
        """The request, if chunks have these lengths."""
        return planned(
            [lengths[chunk] for chunk in self.chunks],
            linked=self.linked,
            text=self.text,
            anchor=self.anchor,
            unrotated=unrotated,
            numbers=self.chunks,
        )


@dataclass(frozen=True, slots=True)
class Scene:
    """Requests over one layer's cache: `table` [requests, blocks] int32, all on the device."""

    shape: HeadShape
    rope: RopeTable
    requests: tuple[Slots, ...]
    table: Tensor
    kv_cache: Tensor

    @property
    def scale(self) -> float:
        """1 / sqrt(head size)."""
        return float(self.shape.head_size**-0.5)

    @property
    def lengths(self) -> Tensor:
        """Slots of each request [requests] int32."""
        counts = [len(request.kpos) for request in self.requests]
        return torch.tensor(counts, dtype=torch.int32, device=self.table.device)

    def put(self, table: SharedRequestTable, rows: Sequence[int]) -> None:
        """Write the requests to these rows of the table, with the blocks that they share."""
        for row, slots, ids in zip(rows, self.requests, self.table.cpu().numpy(), strict=True):
            canonical = CanonicalBlocks(ids[: slots.shared_blocks], slots.chunk_shift.numpy())
            table.put(row, slots.kpos, slots.rope_shift, canonical)

    def queries(self, count: int, seed: int = 1) -> Tensor:
        """Random queries [count, num_heads, head_size]."""
        generator = torch.Generator(self.table.device).manual_seed(seed)
        size = (count, self.shape.num_heads, self.shape.head_size)
        drawn = torch.randn(size, generator=generator, device=self.table.device)
        return drawn.to(self.shape.dtype)

    def expected(self, index: int, query: Tensor, qpos: Tensor) -> Tensor:
        """The reference's answer to queries of request `index`."""
        slots, device = self.requests[index], self.table.device
        kpos, shift, at = slots.kpos.to(device), slots.rope_shift.to(device), qpos.to(device)
        given = (query, self.kv_cache, self.table[index], kpos, shift, at)
        return attend_reference(*given, self.rope, self.scale)


def draw(
    requests: Sequence[Slots],
    shape: HeadShape,
    rope: RopeTable,
    *,
    device: torch.device | str,
    seed: int = 0,
    chunks: Sequence[int] = (),
    head_major: bool = False,
    poison: bool = False,
) -> Scene:
    """Fill a cache with random keys and values; blocks of requests are scattered over it.

    Those of `chunks`, which have so many tokens, are shared by the requests that name them. With
    `poison`, everything that no query may read is NaN. Keys are random, so whether they are rotated
    only says how they have to be read.
    """
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-length // BLOCK_SIZE) for length in chunks]
    counts += [request.blocks - request.shared_blocks for request in requests]
    total = sum(counts) + 1
    order = torch.randperm(total, generator=generator, device=device).int()
    parts = torch.split(order, [*counts, 1])
    rows = [
        torch.cat([*(parts[chunk][first:] for chunk, first in request.shared), own])
        for request, own in zip(requests, parts[len(chunks) : -1], strict=True)
    ]
    table = pad_sequence(rows, batch_first=True)
    inner = (shape.num_kv_heads, BLOCK_SIZE) if head_major else (BLOCK_SIZE, shape.num_kv_heads)
    size = (total, *inner, 2 * shape.head_size)
    memory = torch.empty(size, dtype=shape.dtype, device=device).normal_(generator=generator)
    kv_cache = memory if head_major else memory.transpose(1, 2)
    if poison:
        hidden = torch.ones(total, BLOCK_SIZE, dtype=torch.bool, device=device)
        for request, row in zip(requests, table, strict=True):
            real = torch.nonzero(request.kpos != GAP).flatten().to(device)
            hidden.view(-1)[flat_slots(row, real)] = False
        for half in key_value(kv_cache):
            half[hidden] = float("nan")
    return Scene(shape, rope, tuple(requests), table, kv_cache)


def rope_table(
    rotary_dim: int, positions: int, device: torch.device | str, *, is_neox: bool = True
) -> RopeTable:
    """A rotary table in float32 without scaling, of Llama 3's base."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    angles = torch.arange(positions, device=device).unsqueeze(1) * 500_000.0**-exponents
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    return RopeTable(table, rotary_dim, is_neox)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; NaN stays NaN."""
    return float((found.double() - expected).norm() / expected.norm())


def require_right(what: str, errors: Sequence[float], dtype: torch.dtype) -> float:
    """The largest of some relative errors. Raises InvalidRun where it is too large, or NaN."""
    # A maximum of Python's would pass over NaN.
    error = float(torch.tensor(errors).max())
    if not error <= TOLERANCE[dtype]:
        shown = ", ".join(f"{one:.2e}" for one in errors)
        raise InvalidRun(
            f"{what}: relative error {shown}",
            hint="nothing was timed; run the tests of picbench.kernels on this device",
        )
    return error


def check(
    what: str, scene: Scene, query: Tensor, out: Tensor, attend: Callable[[], object]
) -> float:
    """The largest error of what the first, a middle and the last request get, each in some queries.

    `attend` fills `out` with the answers to `query`, the last ones of each request, equally many.
    Raises InvalidRun where an error is too large.
    """
    out.fill_(float("nan"))
    attend()
    errors, count = [], len(scene.requests)
    new = len(query) // count
    some = torch.linspace(0, new - 1, min(new, 72)).long()
    for index in sorted({0, count // 2, count - 1}):
        at = (index * new + some).to(query.device)
        qpos = scene.requests[index].kpos[-new:][some]
        errors.append(relative_error(out[at], scene.expected(index, query[at], qpos)))
    return require_right(what, errors, scene.shape.dtype)

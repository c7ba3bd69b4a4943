"""Random requests over a paged cache, as algorithms lay them out."""

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from picbench.errors import InvalidRun
from picbench.experiments.page import Spread
from picbench.experiments.per_chunk_flash import SegmentBatch, decode_segments, segments_of
from picbench.kernels.cuda.decode.attention import DecodeBatch, decode
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.cuda.prefill.link import LinkBatch, LinkRequest, link
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder
from picbench.kernels.cuda.reference import attend_reference
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_SIZE, GAP, flat_slots
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape


@dataclass(frozen=True, slots=True)
class Slots:
    """A request's slots in compute order: `kpos` and `rope_shift` [slots] int32 on the CPU.

    `computed` counts the last slots, which the request computes itself.
    """

    kpos: Tensor
    rope_shift: Tensor
    computed: int

    @property
    def blocks(self) -> int:
        """Blocks that the slots take."""
        return -(-len(self.kpos) // BLOCK_SIZE)

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
) -> Slots:
    """A request of chunks, then `text` tokens; the first `linked` tokens of each are recomputed.

    Chunks were compiled after `anchor` tokens. Blocks without a visible slot are left out.
    """
    kpos, rope_shift, computed, start = [], [], [], 0
    for length in chunks:
        own = torch.arange(start, start + length, dtype=torch.int32)
        computed.append(own[:linked])
        canonical = torch.full((-(-length // BLOCK_SIZE) * BLOCK_SIZE,), GAP, dtype=torch.int32)
        canonical[min(linked, length) : length] = own[linked:]
        canonical = canonical[min(linked, length) // BLOCK_SIZE * BLOCK_SIZE :]
        kpos.append(canonical)
        rope_shift.append(torch.full_like(canonical, start - anchor))
        start += length
    computed.append(torch.arange(start, start + text, dtype=torch.int32))
    own = torch.cat(computed)
    positions = torch.cat([*kpos, own])
    shift = torch.cat([*rope_shift, torch.zeros_like(own)])
    return Slots(positions, positions.clone() if unrotated else shift, len(own))


def plain(length: int, new: int) -> Slots:
    """A request without chunks, whose last `new` tokens are computed now."""
    kpos = torch.arange(length, dtype=torch.int32)
    return Slots(kpos, torch.zeros_like(kpos), new)


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

    def queries(self, count: int, seed: int = 1) -> Tensor:
        """Random queries [count, num_heads, head_size]."""
        generator = torch.Generator(self.table.device).manual_seed(seed)
        size = (count, self.shape.num_heads, self.shape.head_size)
        drawn = torch.randn(size, generator=generator, device=self.table.device)
        return drawn.to(self.shape.dtype)

    def expected(self, index: int, query: Tensor, qpos: Tensor) -> Tensor:
        """The reference's answer to queries of request `index`."""
        request, device = self.requests[index], self.table.device
        return attend_reference(
            query,
            self.kv_cache,
            self.table[index],
            request.kpos.to(device),
            request.rope_shift.to(device),
            qpos.to(device),
            self.rope,
            self.scale,
        )


def draw(
    requests: Sequence[Slots],
    shape: HeadShape,
    rope: RopeTable,
    *,
    device: torch.device | str,
    seed: int = 0,
    head_major: bool = False,
    poison: bool = False,
) -> Scene:
    """Fills a cache with random keys and values; requests own their blocks, which are scattered.

    With `poison`, everything that no query may read is NaN.
    """
    generator = torch.Generator(device).manual_seed(seed)
    counts = [request.blocks for request in requests]
    total = sum(counts) + 1
    order = torch.randperm(total, generator=generator, device=device).int()
    table = torch.zeros(len(requests), max(counts), dtype=torch.int32, device=device)
    at = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = order[at : at + count]
        at += count
    return filled(requests, table, total, shape, rope, generator, head_major, poison)


def filled(
    requests: Sequence[Slots],
    table: Tensor,
    total: int,
    shape: HeadShape,
    rope: RopeTable,
    generator: torch.Generator,
    head_major: bool,
    poison: bool,
) -> Scene:
    """A scene over a random cache of `total` blocks, of which `table` names those of requests."""
    inner = (shape.num_kv_heads, BLOCK_SIZE) if head_major else (BLOCK_SIZE, shape.num_kv_heads)
    size = (total, *inner, 2 * shape.head_size)
    memory = torch.empty(size, dtype=shape.dtype, device=table.device)
    memory.normal_(generator=generator)
    kv_cache = memory if head_major else memory.transpose(1, 2)
    if poison:
        _poison(kv_cache, requests, table)
    return Scene(shape, rope, tuple(requests), table, kv_cache)


def _poison(kv_cache: Tensor, requests: Sequence[Slots], table: Tensor) -> None:
    hidden = torch.ones(kv_cache.shape[0] * BLOCK_SIZE, dtype=torch.bool, device=table.device)
    for request, row in zip(requests, table, strict=True):
        real = torch.nonzero(request.kpos != GAP).flatten().to(table.device)
        hidden[flat_slots(row, real)] = False
    slots = torch.nonzero(hidden).flatten()
    for half in key_value(kv_cache):
        half[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = float("nan")


def rope_table(
    rotary_dim: int,
    positions: int,
    device: torch.device | str,
    *,
    is_neox: bool = True,
) -> RopeTable:
    """A rotary table in float32 without scaling, of Llama 3's base."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    angles = torch.arange(positions, device=device).unsqueeze(1) * 500_000.0**-exponents
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    return RopeTable(table, rotary_dim, is_neox)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; NaN stays NaN."""
    return float((found.double() - expected).norm() / expected.norm())


#: Relative error against float64 that a type may have.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


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


def decode_errors(scene: Scene, query: Tensor, out: Tensor) -> list[float]:
    """Relative errors of what the first, a middle and the last request got from decode."""
    errors = []
    for index in sorted({0, len(query) // 2, len(query) - 1}):
        own = slice(index, index + 1)
        end = torch.tensor([scene.requests[index].end], dtype=torch.int32)
        errors.append(relative_error(out[own], scene.expected(index, query[own], end)))
    return errors


#: Names in kernels.json: keys cached with RoPE or without, FlashAttention-3 once for each chunk.
WITH_ROPE, WITHOUT_ROPE, PER_CHUNK = "turned", "unrotated", "parts"

#: What vLLM 0.32 uses under CUDA graphs (flash_attn_max_num_splits_for_cuda_graph).
STOCK_SPLITS = 32

_SEGMENT_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """`requests` requests of `context` keys in chunks of about `chunk`, one query each."""

    requests: int
    context: int
    chunk: int
    shape: HeadShape

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that must be read."""
        slot = 2 * self.shape.num_kv_heads * self.shape.head_size * self.shape.dtype.itemsize
        return self.requests * self.context * slot


def cases(shape: HeadShape) -> Iterator[DecodeCase]:
    """The grid of the target, and its surroundings."""
    for requests in (16, 64, 256):
        for context in (8192, 16384, 32768):
            yield DecodeCase(requests, context, 500, shape)
    for requests, context in ((1, 32768), (1, 131072), (4, 32768)):
        yield DecodeCase(requests, context, 500, shape)
    yield DecodeCase(64, 32768, 150, shape)
    yield DecodeCase(64, 32768, 2000, shape)


def scene_of(case: DecodeCase, seed: int) -> Scene:
    """Requests whose chunks' first blocks were recomputed, as mepic lays them out."""
    count = max(1, (case.context - 64) // case.chunk)
    lengths = [case.chunk] * count
    slots = planned(lengths, linked=16, text=case.context - sum(lengths))
    rope = rope_table(case.shape.head_size, case.context + 1, "cuda")
    return draw([slots] * case.requests, case.shape, rope, device="cuda", seed=seed)


def stock_arm(scene: Scene, query: Tensor, out: Tensor, splits: int) -> Callable[[], Tensor]:
    """FlashAttention-3 as vLLM's backend calls it in decode, over the same cache."""
    requests = len(query)
    ends = [slots.end for slots in scene.requests]
    runs = flash.Runs(
        torch.arange(requests + 1, dtype=torch.int32, device="cuda"),
        torch.tensor(ends, dtype=torch.int32, device="cuda"),
        scene.table,
        1,
        max(ends),
    ).scheduled(scene.shape, BLOCK_SIZE, splits)
    key, value = key_value(scene.kv_cache)

    def run() -> Tensor:
        runs.attend(query, key, value, scene.scale, out, splits)
        return out

    return run


def own_arm(
    scene: Scene,
    query: Tensor,
    out: Tensor,
    unrotated: bool = False,
) -> Callable[[], Tensor]:
    """picbench's split-KV kernel."""
    table = RequestTable(len(query), scene.table.shape[1], "cuda", unrotated=unrotated)
    for row, slots in enumerate(scene.requests):
        table.put(row, slots.kpos, slots.kpos if unrotated else slots.rope_shift)
    batch = DecodeBatch(table, len(query), scene.shape, scene.rope)
    rows = torch.arange(len(query), dtype=torch.int32, device="cuda")
    batch.fill(scene.table, rows, scene.lengths)
    return lambda: decode(query, scene.kv_cache, batch, scene.scale, out)


def segments_arm(scene: Scene, query: Tensor, out: Tensor) -> Callable[[], Tensor]:
    """FlashAttention-3 over a sequence for each chunk, merged."""
    segments: dict[int, Any] = {}
    for slots in scene.requests:
        if id(slots) not in segments:
            segments[id(slots)] = segments_of(
                slots.kpos.numpy(), slots.rope_shift.numpy(), _SEGMENT_BLOCKS
            )
    own = [segments[id(slots)] for slots in scene.requests]
    batch = SegmentBatch.build(own, scene.table, scene.shape, scene.rope)
    return lambda: decode_segments(query, scene.kv_cache, batch, scene.scale, out)


def arms(case: DecodeCase, seed: int) -> dict[str, Callable[[], object]]:
    """The compared implementations; raises InvalidRun if one is wrong."""
    scene = scene_of(case, seed)
    query = scene.queries(case.requests, seed)
    out = torch.empty_like(query)
    found: dict[str, Callable[[], object]] = {
        WITH_ROPE: own_arm(scene, query, out),
        WITHOUT_ROPE: own_arm(scene, query, out, unrotated=True),
    }
    unrotated = _without_rope(scene)
    _check(WITH_ROPE, scene, query, own_arm(scene, query, out))
    _check(WITHOUT_ROPE, unrotated, query, own_arm(scene, query, out, unrotated=True))
    if flash.covers(case.shape):
        found[PER_CHUNK] = segments_arm(scene, query, out)
        _check(PER_CHUNK, scene, query, segments_arm(scene, query, out))
        found["fa3"] = stock_arm(scene, query, out, STOCK_SPLITS)
        found["fa3_auto"] = stock_arm(scene, query, out, 0)
    return found


def _without_rope(scene: Scene) -> Scene:
    made: dict[int, Slots] = {}
    for slots in scene.requests:
        made.setdefault(id(slots), Slots(slots.kpos, slots.kpos, slots.computed))
    requests = tuple(made[id(slots)] for slots in scene.requests)
    return Scene(scene.shape, scene.rope, requests, scene.table, scene.kv_cache)


def _check(name: str, scene: Scene, query: Tensor, arm: Callable[[], Tensor]) -> None:
    require_right(f"decode {name}", decode_errors(scene, query, arm()), scene.shape.dtype)


_CHECKED = 48
_LINKED, _TEXT = 16, 80
# How often a step is prepared to be timed. The order of keys, which a request needs once, is not
# among what is timed.
_PREPARED = 25
#: The workspace that is measured with: 128 Ki tokens of 8 KV heads of 128 in two bytes.
WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class LinkCase:
    """One request of `context` keys, `new` of which are computed in this step.

    `form` is `runs` (blocks of 16 tokens at the head of each chunk, and a question) or `tail`
    (all at the end).
    """

    form: str
    new: int
    context: int
    shape: HeadShape


def link_cases(shape: HeadShape) -> Iterator[LinkCase]:
    """The grid of the target, and a warm prompt of 64 chunks, the first block of each computed."""
    yield LinkCase("runs", 1100, 32768, shape)
    for context in (16384, 32768, 65536, 131072):
        for new in (256, 1024, 2048, 8192):
            for form in ("runs", "tail"):
                yield LinkCase(form, new, context, shape)


def slots_of(case: LinkCase) -> Slots:
    """The request: chunks' first blocks and a question, or chunks and a tail."""
    if case.form == "tail":
        chunks = _even(case.context - case.new, max(1, (case.context - case.new) // 500))
        return planned(chunks, linked=0, text=case.new)
    count = min((case.new - _TEXT) // _LINKED, (case.context - _TEXT) // 64)
    text = case.new - count * _LINKED
    return planned(_even(case.context - text, count), linked=_LINKED, text=text)


def _even(total: int, count: int) -> list[int]:
    return [total * (i + 1) // count - total * i // count for i in range(count)]


@dataclass(frozen=True, slots=True)
class LinkArms:
    """The compared implementations, what serves ours, and milliseconds on the host to prepare them.

    Beside what is served (`link`) are both ways where one can be chosen: with keys read in place
    (`in place`), however many query tiles that takes, and with keys copied (`copied`).
    """

    attend: dict[str, Callable[[], object]]
    prepare_ms: dict[str, float]
    served_by: str


def link_arms(case: LinkCase, seed: int) -> LinkArms:
    """Draws a case's inputs; raises InvalidRun if an output is wrong."""
    slots = slots_of(case)
    rope = rope_table(case.shape.head_size, case.context + 1, "cuda")
    scene = draw([slots], case.shape, rope, device="cuda", seed=seed)
    query = scene.queries(slots.computed, seed)
    out = torch.empty_like(query)
    workspace = CudaWorkspace(WORKSPACE_BYTES, "cuda")
    order = LogicalOrder.of(slots.kpos, slots.rope_shift)
    qpos = slots.kpos[-slots.computed :]
    request = LinkRequest(0, 0, slots.computed, order, qpos)

    def build(**options: Any) -> LinkBatch:
        some = ([request], scene.table, rope, case.shape, workspace)
        return LinkBatch.build(*some, **options)

    served = build()
    ways: dict[str, dict[str, Any]] = {"link": {}}
    if build(most_tiles=case.new).served_by == "paged":
        ways |= {"in place": {"most_tiles": case.new}, "copied": {"copied": True}}
    found: dict[str, Callable[[], object]] = {}
    for name, options in ways.items():
        found[name] = partial(link, query, scene.kv_cache, build(**options), scene.scale, out)
        found[name]()
        _check_link(case, scene, query, qpos, out)
    if flash.covers(case.shape):
        found["fa3"] = _stock(scene, query, out)
    prepare = {name: _host_ms(partial(build, **options)) for name, options in ways.items()}
    return LinkArms(found, prepare, served.served_by)


def _host_ms(prepare: Callable[[], object]) -> float:
    """Median milliseconds for which the host prepares a step; the device was idle before."""
    times = []
    for _ in range(_PREPARED):
        torch.cuda.synchronize()
        began = perf_counter()
        prepare()
        times.append(1e3 * (perf_counter() - began))
    return statistics.median(times)


def _stock(scene: Scene, query: Tensor, out: Tensor) -> Callable[[], object]:
    end = scene.requests[0].end
    ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
    runs = flash.Runs(
        torch.tensor([0, len(query)], **ints),
        torch.tensor([end], **ints),
        scene.table,
        len(query),
        end,
    ).scheduled(scene.shape, BLOCK_SIZE)
    key, value = key_value(scene.kv_cache)
    return lambda: runs.attend(query, key, value, scene.scale, out)


def _check_link(case: LinkCase, scene: Scene, query: Tensor, qpos: Tensor, out: Tensor) -> None:
    some = torch.linspace(0, len(query) - 1, _CHECKED).long()
    expected = scene.expected(0, query[some.to("cuda")], qpos[some])
    errors = [relative_error(out[some.to("cuda")], expected)]
    require_right(f"link of {case}", errors, case.shape.dtype)


_WARMUP = 3
#: Milliseconds of launches that a sample has at least.
_SAMPLE_MS = 0.4


def interleave(
    arms: Mapping[str, Callable[[], object]], rounds: int, seed: int
) -> dict[str, list[float]]:
    """Milliseconds of each call of each arm, `rounds` times, in random order within a round.

    Each sample follows an untimed one of the same arm: clocks at the power limit depend on what ran
    before. Without it 256 decoding requests of 32k tokens took 3 % longer in the median than at
    best, and 8 % in the upper quartile (Triton's kernel, an H200).
    """
    replays = {name: _capture(arm) for name, arm in arms.items()}
    repeats = {name: _repeats(replay) for name, replay in replays.items()}
    samples: dict[str, list[float]] = {name: [] for name in arms}
    order, shuffler = list(arms), random.Random(seed)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            _time(replays[name], repeats[name])
            samples[name].append(_time(replays[name], repeats[name]))
    return samples


def paired(own: Sequence[float], base: Sequence[float]) -> Spread:
    """The ratio of two arms' times, paired within a round."""
    return Spread.of([a / b for a, b in zip(own, base, strict=True)])


def _capture(arm: Callable[[], object]) -> Callable[[], None]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUP):
            arm()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm()
    return graph.replay


def _repeats(replay: Callable[[], None]) -> int:
    replay()
    return max(1, round(_SAMPLE_MS / _time(replay, 1)))


def _time(replay: Callable[[], None], repeats: int) -> float:
    def repeat() -> None:
        for _ in range(repeats):
            replay()

    return elapsed(repeat) / repeats


def elapsed(work: Callable[[], object]) -> float:
    """Milliseconds between the device's reaching `work` and its being done with it."""
    # torch annotates neither events nor streams.
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))

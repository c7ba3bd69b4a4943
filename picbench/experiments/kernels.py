"""The CUDA kernels on this machine's GPU, checked and timed beside FlashAttention-3.

Cases that an earlier run with the same versions and commit has measured are kept, so that it can be
interrupted. How implementations are timed in turn and case after case is written, which
measurements of other kernels share, is here, too.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from picbench.engines.vllm.device import CUDA, find
from picbench.errors import ConfigError, EngineError
from picbench.experiments import scenes
from picbench.experiments.scenes import Scene, Slots, check, planned
from picbench.kernels.cuda.decode.attention import DecodeBatch
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.device import upload_all
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.merge import merge
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.cuda.prefill.link import LinkBatch, LinkRequest, link
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_SIZE, GAP
from picbench.kernels.shape import HeadShape
from picbench.run.measurements import DecodeShared, Kernels, Outcome
from picbench.store import provenance
from picbench.tables.page import Spread, page, save, update_summary
from picbench.tables.table import table

#: Llama-3.1-8B's and Mistral-7B's heads.
SHAPE = HeadShape(32, 8, 128, torch.bfloat16)

#: What vLLM 0.32 uses under CUDA graphs (flash_attn_max_num_splits_for_cuda_graph).
STOCK_SPLITS = 32

#: One layer's attention by some implementation.
Attend = Callable[[], object]

#: The figures of a case, as they are written.
Row = dict[str, Any]

# The workspace that is measured with: 128 Ki tokens of 8 KV heads of 128 in two bytes.
_WORKSPACE_BYTES = 512 << 20
# Implementations of decode by their names in kernels.json, and what they are called.
_COMPARED = {"turned": "with RoPE", "unrotated": "without RoPE", "parts": "per chunk"}
_LINKED, _TEXT = 16, 80


def interleave(
    samplers: Mapping[str, Callable[[], float]], rounds: int, seed: int, seconds: float = math.inf
) -> dict[str, list[float]]:
    """What each sampler says, `rounds` times, in random order within a round.

    After `seconds` no round is begun, but for the first five.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    order, shuffler = list(samplers), random.Random(seed)
    deadline = time.monotonic() + seconds
    for number in range(rounds):
        if number >= 5 and time.monotonic() > deadline:
            break
        shuffler.shuffle(order)
        for name in order:
            samples[name].append(samplers[name]())
    return samples


def replayed(arms: Mapping[str, Attend], rounds: int, seed: int) -> dict[str, list[float]]:
    """Milliseconds of each call of each arm, from CUDA graphs; see `interleave`.

    Each sample follows an untimed one of the same arm: clocks at the power limit depend on what ran
    before. Without it 256 decoding requests of 32k tokens took 3 % longer in the median than at
    best, and 8 % in the upper quartile (Triton's kernel, an H200).
    """
    return interleave({name: _replay_sampler(arm) for name, arm in arms.items()}, rounds, seed)


def _replay_sampler(arm: Attend) -> Callable[[], float]:
    # torch annotates neither events nor streams.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            arm()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm()
    graph.replay()

    def elapsed(repeats: int) -> float:
        """From the device's reaching the first replay to the end of the last, for each."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / repeats

    # A sample has at least 0.4 ms of launches.
    repeats = max(1, round(0.4 / elapsed(1)))

    def sample() -> float:
        elapsed(repeats)
        return elapsed(repeats)

    return sample


def spreads(samples: Mapping[str, Sequence[float]]) -> dict[str, Row]:
    """The spread of each arm's times."""
    return {name: asdict(Spread.of(times)) for name, times in samples.items()}


def paired(above: Sequence[float], below: Sequence[float]) -> Row:
    """The spread of the ratio of two arms' times, paired within a round."""
    return asdict(Spread.of_ratios(above, below))


def measure_cases(
    base: Path,
    document: Row,
    key: str,
    cases: Iterable[tuple[str, Callable[[], Row]]],
    report: Callable[[Row], str],
) -> Outcome:
    """Measure case after case; after each write ``base.json``, its rows in `key`, and the page.

    A row has the case's name unless it says more of it.
    """
    for name, measure in cases:
        click.echo(name, err=True)
        document[key].append({"case": name} | measure())
        torch.cuda.empty_cache()
        save(base, document, report(document))
    return Outcome(report(document))


def run_facts(
    settings: Kernels | DecodeShared, names: Sequence[str] = provenance.GPU, device: str = "cuda"
) -> Row:
    """Where kernels are measured, with what, and what their inputs are."""
    facts = provenance.facts(*names, device=device, commit=settings.commit)
    facts |= {"rounds": settings.rounds, "seed": settings.seed}
    return facts | {"weights": "none: random queries, keys and values"}


def stock_arm(scene: Scene, query: Tensor, out: Tensor, new: int, splits: int = 0) -> Attend:
    """FlashAttention-3 as vLLM's backend calls it, over the same cache.

    It serves plain requests, the last `new` tokens of each.
    """
    ends = [slots.end for slots in scene.requests]
    runs = flash.Runs(
        torch.arange(len(ends) + 1, dtype=torch.int32, device="cuda") * new,
        torch.tensor(ends, dtype=torch.int32, device="cuda"),
        scene.table,
        new,
        max(ends),
    ).scheduled(scene.shape, BLOCK_SIZE, splits)
    return partial(runs.attend, query, *key_value(scene.kv_cache), scene.scale, out, splits)


def own_batch(scene: Scene, *, unrotated: bool = False) -> DecodeBatch:
    """The batch of picbench's split-KV decode, filled."""
    requests, width = scene.table.shape
    table = RequestTable(requests, width, scene.table.device, unrotated=unrotated)
    for row, slots in enumerate(scene.requests):
        table.put(row, slots.kpos, slots.rope_shift)
    batch = DecodeBatch(table, requests, scene.shape, scene.rope)
    rows = torch.arange(requests, dtype=torch.int32, device=scene.table.device)
    batch.fill(scene.table, rows, scene.lengths)
    return batch


def per_chunk_arm(scene: Scene, query: Tensor, out: Tensor, most: int = 128) -> Attend:
    """FlashAttention-3 over a sequence for each segment of keys that share a RoPE shift.

    The query is copied once a segment and re-rotated by the opposite of the shift, and outputs are
    merged by their log-sum-exps. Segments are whole blocks, at most `most`; the last may end early.
    """
    shape, rope, device = scene.shape, scene.rope, query.device
    segments = [_segments(slots, most) for slots in scene.requests]
    first, slots, shift = np.array(list(chain(*segments)), np.int32).T
    counts = np.array([len(own) for own in segments], np.int32)
    owners = np.repeat(np.arange(len(counts)), counts)
    blocks = first[:, None] + np.arange(-(-int(slots.max()) // BLOCK_SIZE))
    blocks = blocks.clip(max=scene.table.shape[1] - 1)
    given = [owners, shift, np.cumsum(counts) - counts, counts, slots, np.arange(len(first) + 1)]
    owner, shifts, starts, parts, lengths, every, index = upload_all([*given, blocks], device)
    table = scene.table[owner.long()[:, None], index.long()].contiguous()
    runs = flash.Runs(every, lengths, table, 1, int(slots.max()))
    runs = runs.scheduled(shape, BLOCK_SIZE, splits=1)
    heads, size = shape.num_heads, shape.head_size
    turned, found = torch.empty(2, len(first), heads, size, dtype=shape.dtype, device=device)
    key, value = key_value(scene.kv_cache)

    def attend() -> None:
        queries = (query, owner, shifts, rope.cos_sin_cache, turned, query.stride(0), heads)
        _rotate_queries[(len(first), heads)](
            *queries, SIZE=size, ROTARY=rope.rotary_dim, num_warps=1
        )
        lse = runs.attend(turned, key, value, scene.scale, found, splits=1)
        strides = (heads * size, lse.stride(1), lse.stride(0), out.stride(0), out.stride(1), 0)
        merge[(len(query), heads)](
            found, lse, starts, parts, out, *strides, HEAD=size, TILE=8, num_warps=1
        )

    return attend


def _segments(slots: Slots, most: int) -> list[tuple[int, int, int]]:
    """First block, slots and shift of segments; EngineError where a hidden slot is not the last."""
    empty = slots.blocks * BLOCK_SIZE - len(slots.kpos)
    visible = pad(slots.kpos, (0, empty), value=GAP).view(-1, BLOCK_SIZE) != GAP
    shifts = pad(slots.rope_shift, (0, empty)).view(-1, BLOCK_SIZE)[:, 0].tolist()
    if (visible[:, 1:] > visible[:, :-1]).any():
        raise EngineError("hidden slots precede visible ones in a block")
    found: list[tuple[int, int, int]] = []
    for block, count in enumerate(visible.sum(1).tolist()):
        first, seen, shift = found[-1] if found else (0, -1, 0)
        before = block - first
        if shift == shifts[block] and seen == before * BLOCK_SIZE and before < most and count:
            found[-1] = (first, seen + count, shift)
        elif count:
            found.append((block, count, shifts[block]))
    return found


@triton.jit
def _rotate_queries(
    query: tl.tensor,
    owner: tl.tensor,
    rope_shift: tl.tensor,
    cos_sin: tl.tensor,
    rotated: tl.tensor,
    query_stride: tl.tensor,
    heads: tl.tensor,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
) -> None:
    segment = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = ROTARY // 2
    dim = tl.arange(0, SIZE)
    rotates = dim < ROTARY
    paired_dim = tl.where(dim < half, dim + half, tl.where(rotates, dim - half, dim))
    shift = tl.load(rope_shift + segment)
    at = query + tl.load(owner + segment).to(tl.int64) * query_stride + head * SIZE
    own = tl.load(at + dim).to(tl.float32)
    paired = tl.load(at + paired_dim).to(tl.float32) * tl.where(dim < half, 1.0, -1.0)
    row = cos_sin + tl.abs(shift).to(tl.int64) * ROTARY + dim % half
    cos = tl.load(row, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(row + half, mask=rotates, other=0.0).to(tl.float32)
    sin = tl.where(shift < 0, -sin, sin)
    result = own * cos + paired * sin
    tl.store(rotated + (segment * heads + head) * SIZE + dim, result.to(rotated.dtype.element_ty))


def measure_decode(requests: int, context: int, chunk: int, rounds: int, seed: int) -> Row:
    """Check and time `requests` of `context` keys in chunks of about `chunk`, one query each.

    First blocks of chunks were recomputed, as mepic lays them out. Raises InvalidRun if an
    implementation is wrong.
    """
    count = max(1, (context - 64) // chunk)
    slots = planned([chunk] * count, linked=_LINKED, text=context - count * chunk)
    rope = scenes.rope_table(SHAPE.head_size, context + 1, "cuda")
    scene = scenes.draw([slots] * requests, SHAPE, rope, device="cuda", seed=seed)
    bare = replace(scene, requests=(replace(slots, rope_shift=slots.kpos),) * requests)
    query = scene.queries(requests, seed)
    out = torch.empty_like(query)
    given = (query, scene.kv_cache, scene.scale)
    own, unrotated = own_batch(scene), own_batch(bare, unrotated=True)
    arms: dict[str, Attend] = {
        "turned": partial(own.attend, *given, out),
        "unrotated": partial(unrotated.attend, *given, out),
        "parts": per_chunk_arm(scene, query, out),
    }
    for name, arm in arms.items():
        check(f"decode {name}", bare if name == "unrotated" else scene, query, out, arm)
    arms["fa3"] = stock_arm(scene, query, out, 1, STOCK_SPLITS)
    samples = replayed(arms, rounds, seed)
    slot_bytes = 2 * SHAPE.num_kv_heads * SHAPE.head_size * SHAPE.dtype.itemsize
    return {
        "kind": "decode",
        "requests": requests,
        "context": context,
        "chunk": chunk,
        "bytes": requests * context * slot_bytes,
        "ms": spreads(samples),
        "speed_vs_fa3": {name: paired(samples["fa3"], times) for name, times in samples.items()},
    }


def measure_link(form: str, new: int, context: int, rounds: int, seed: int) -> Row:
    """Check and time one request of `context` keys, `new` of which are computed in this step.

    `form` is `runs` (blocks of 16 tokens at the head of each chunk, and a question) or `tail`
    (all at the end). Raises InvalidRun if the output is wrong.
    """
    if form == "tail":
        count, linked, text = max(1, (context - new) // 500), 0, new
    else:
        count = min((new - _TEXT) // _LINKED, (context - _TEXT) // 64)
        linked, text = _LINKED, new - count * _LINKED
    ends = [(context - text) * i // count for i in range(count + 1)]
    slots = planned([end - start for start, end in pairwise(ends)], linked=linked, text=text)
    rope = scenes.rope_table(SHAPE.head_size, context + 1, "cuda")
    scene = scenes.draw([slots], SHAPE, rope, device="cuda", seed=seed)
    query = scene.queries(slots.computed, seed)
    out = torch.empty_like(query)
    order = LogicalOrder.of(slots.kpos, slots.rope_shift)
    request = LinkRequest(0, 0, slots.computed, order, slots.kpos[-slots.computed :])
    workspace = CudaWorkspace(_WORKSPACE_BYTES, "cuda")
    batch = LinkBatch.build([request], scene.table, rope, SHAPE, workspace)
    own = partial(link, query, scene.kv_cache, batch, scene.scale, out)
    check(f"link of {form} {new} over {context}", scene, query, out, own)
    arms: dict[str, Attend] = {"link": own, "fa3": stock_arm(scene, query, out, len(query))}
    samples = replayed(arms, rounds, seed)
    return {
        "kind": "link",
        "form": form,
        "new": new,
        "context": context,
        "served_by": batch.served_by,
        "ms": spreads(samples),
        "time_vs_fa3": paired(samples["link"], samples["fa3"]),
    }


def cases(rounds: int, seed: int) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The grids of the targets and their surroundings, by name.

    The first of link is a warm prompt of 64 chunks, the first block of each computed.
    """
    some = [*product((16, 64, 256), (8192, 16384, 32768)), (1, 32768), (1, 131072), (4, 32768)]
    for one in [*((*pair, 500) for pair in some), (64, 32768, 150), (64, 32768, 2000)]:
        yield "decode {} x {} in {}".format(*one), partial(measure_decode, *one, rounds, seed)
    grid = product((16384, 32768, 65536, 131072), (256, 1024, 2048, 8192), ("runs", "tail"))
    for form, new, context in [("runs", 1100, 32768), *(one[::-1] for one in grid)]:
        measured = partial(measure_link, form, new, context, rounds, seed)
        yield f"link {form} {new} over {context}", measured


def measure(settings: Kernels) -> Outcome:
    """Measure on what vLLM serves here; on a GPU what was not measured before.

    Writes kernels.json, kernels.md, and the kernels' figures of summary.json. Raises ConfigError
    where another device is asked for and without FlashAttention-3, InvalidRun where an output is
    wrong.
    """
    if find(settings.device) is not CUDA:
        from picbench.experiments import cpu_kernels

        torch.set_num_threads(settings.threads or torch.get_num_threads())
        return cpu_kernels.bench(settings)
    if not flash.covers(SHAPE):
        raise ConfigError(
            "the reference, FlashAttention-3, does not run here",
            hint="install picbench[cuda] on a Hopper GPU",
        )
    facts = run_facts(settings) | {"workspace_bytes": _WORKSPACE_BYTES}
    base, work = settings.output / "kernels", settings.work
    path = base.with_suffix(".json")
    kept = json.loads(path.read_text()) if path.exists() else {}
    results = kept["results"] if kept.get("provenance") == facts else []
    known = {row["case"] for row in results}
    left = (
        (name, case)
        for name, case in cases(settings.rounds, settings.seed)
        if name not in known and (not work or name.split()[0] in work)
    )
    document = {"schema": 1, "provenance": facts, "results": results}
    outcome = measure_cases(base, document, "results", left, report)
    update_summary(settings.output, summarise(results))
    return outcome


def summarise(results: Sequence[Row]) -> dict[str, float]:
    """Medians over the target's cases: speed of decode, time of link, ours over the reference."""
    decoding = [
        row["speed_vs_fa3"]["turned"]["median"]
        for row in results
        if row["kind"] == "decode" and row["requests"] >= 16
    ]
    linking = [row["time_vs_fa3"]["median"] for row in results if row["kind"] == "link"]
    found = {"decode_vs_fa3": decoding, "link_vs_fa3": linking}
    return {name: median(values) for name, values in found.items() if values}


_ABOUT = """\
One layer's attention, random keys, values and queries, CUDA graphs replayed in random order within
a round. Times are medians; ratios are medians paired within a round, quartiles in brackets. Every
measured kernel was checked on the measured inputs before: relative error against float64 under
1e-2.

{gpu}, driver {driver}, CUDA {cuda}, torch {torch}, Triton {triton}, vLLM {vllm} (FlashAttention-3),
32 heads, 8 KV heads, head size 128, bfloat16, blocks of 16, seed {seed}, {rounds} rounds, commit
{commit}.

## Decode

Speed against FlashAttention-3 over as many keys of plain requests, with vLLM's settings under CUDA
graphs: more is better. `with RoPE`: keys are cached as their chunk was compiled, and the query is
re-rotated (served). `without RoPE`: keys are rotated when they are read. `per chunk`:
FlashAttention-3 over a sequence for each chunk, outputs merged."""

_ABOUT_LINK = """\
## Link and prefill

Time of all that attention needs, copies of keys too, against FlashAttention-3 over a plain request
with as many new tokens at its end: less is better. `runs`: blocks of 16 new tokens at the head of
each chunk and a question; they see about half of the keys that a tail of as many tokens sees.
`tail`: all new tokens at the end. Served by paged prefill in place, or over gathered keys by
FlashAttention-3 (FA3) or our tiles. Workspace: {workspace} MiB."""


def report(document: Row) -> str:
    """The page, in Markdown: what was measured where, and a table a kernel."""

    def ratio(found: Mapping[str, float]) -> str:
        return f"{found['median']:.2f} ({found['q25']:.2f}-{found['q75']:.2f})"

    run, decoding, linking = document["provenance"], [], []
    for row in document["results"]:
        if row["kind"] == "decode":
            case = (str(row[name]) for name in ("requests", "context", "chunk"))
            stock = row["ms"]["fa3"]["median"]
            speeds = (ratio(row["speed_vs_fa3"][arm]) for arm in _COMPARED)
            decoding.append([*case, f"{stock:.3f}", f"{row['bytes'] / stock / 1e9:.2f}", *speeds])
        elif row["kind"] == "link":
            case = (str(row[name]) for name in ("form", "new", "context", "served_by"))
            times = (f"{row['ms'][arm]['median']:.3f}" for arm in ("fa3", "link"))
            linking.append([*case, *times, ratio(row["time_vs_fa3"])])
    head = ("requests", "context", "chunk", "FA3 ms", "FA3 TB/s", *_COMPARED.values())
    link_head = ("form", "new", "context", "served by", "FA3 ms", "ours ms", "ours / FA3")
    return page(
        "CUDA kernels against FlashAttention-3",
        _ABOUT.format(**run),
        table(head, decoding),
        _ABOUT_LINK.format(workspace=run["workspace_bytes"] >> 20),
        table(link_head, linking),
    )

"""CPU attention of plain requests: the measured cases, and the implementations that are compared.

One measurement is a layer's whole attention path: new keys and values are stored, then all queries
attend. Three implementations get the same numbers:

    stock      vLLM's CPU backend: blocks of 32, keys rotated before they are stored
    in_place   blocks of 16, keys rotated before they are stored (`rotated=True`)
    unrotated  blocks of 16, keys stored without RoPE and rotated when they are read

The layers of a case have caches of their own and are used in sequence, as a model does, so that
decode does not read one small cache out of the L3.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from picbench.experiments.kernel_cases import paired, relative_error, require_right
from picbench.experiments.page import Spread, save
from picbench.kernels.cpu.attention import AttentionBatch, attend, store
from picbench.kernels.cpu.reference import attend_reference
from picbench.kernels.cpu.scratch import Workspace
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable, rotate
from picbench.kernels.shape import HeadShape
from picbench.store import provenance
from picbench.tables import table as markdown

_STOCK_BLOCK = 32
_CACHE_BYTES = 64 << 20
_ROPE_BASE = 500_000.0

Layer = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`requests` requests with `context` keys each, the last `new` of which are computed now."""

    name: str
    shape: HeadShape
    requests: int
    new: int
    context: int

    @property
    def layers(self) -> int:
        """Layers needed to fill the caches of a processor, at most 16; prefill needs one."""
        shape = self.shape
        if self.new > 1:
            return 1
        layer = 2 * self.requests * self.context * shape.num_kv_heads * shape.head_size
        return min(16, max(1, math.ceil(_CACHE_BYTES / (layer * shape.dtype.itemsize))))


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Random keys, values and queries of one layer; every request sees the same ones."""

    query: Tensor
    key: Tensor
    rotated_key: Tensor
    value: Tensor
    table: Tensor
    rope: RopeTable


@dataclass(frozen=True, slots=True)
class Implementation:
    """One implementation: the step of a layer, and what is prepared once for all layers."""

    layer: Layer
    prepare: Callable[[], object]


def cases() -> Iterator[AttentionCase]:
    """The measured grid: two models' heads, both types, prefill, chunked prefill, decode."""
    for dtype in (torch.bfloat16, torch.float32):
        for heads in ((4, 2, 64), (32, 8, 128)):
            shape = HeadShape(*heads, dtype)
            for context in (2048, 8192):
                yield AttentionCase("prefill", shape, 1, context, context)
            yield AttentionCase("chunked", shape, 1, 512, 8192)
            for requests in (1, 8):
                for context in (2048, 8192):
                    yield AttentionCase("decode", shape, requests, 1, context)


def draw(case: AttentionCase, seed: int) -> LayerInputs:
    """LayerInputs of a case; blocks are scattered over the pool."""
    generator = torch.Generator().manual_seed(seed)
    shape, tokens = case.shape, case.requests * case.new
    size, dtype = shape.head_size, shape.dtype
    query = torch.randn(tokens, shape.num_heads, size, generator=generator).to(dtype)
    key = torch.randn(case.context, shape.num_kv_heads, size, generator=generator).to(dtype)
    value = torch.randn(case.context, shape.num_kv_heads, size, generator=generator).to(dtype)
    rope = _rope(case)
    blocks = -(-case.context // BLOCK_SIZE)
    table = torch.randperm(case.requests * blocks, generator=generator).int()
    rotated_key = rotate(key, rope.rows(torch.arange(case.context)), is_neox=rope.is_neox)
    return LayerInputs(query, key, rotated_key, value, table.view(case.requests, blocks), rope)


def _rope(case: AttentionCase) -> RopeTable:
    size = case.shape.head_size
    frequencies = _ROPE_BASE ** -(torch.arange(0, size, 2) / size)
    angles = torch.arange(case.context + BLOCK_SIZE).unsqueeze(1) * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return RopeTable(table.to(case.shape.dtype), size)


def stock_arm(case: AttentionCase, inputs: LayerInputs) -> Implementation:
    """vLLM's CPU attention backend, as v1/attention/backends/cpu_attn.py calls it."""
    from vllm import _custom_ops as ops
    from vllm import envs
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    shape = case.shape
    isa = _get_attn_isa(shape.dtype, _STOCK_BLOCK, shape.head_size)
    table = _wide_table(inputs.table)
    lengths = torch.full((case.requests,), case.context, dtype=torch.int32)
    starts = torch.arange(case.requests + 1, dtype=torch.int32) * case.new
    caches = caches_of(case, int(table.max()) + 1, _STOCK_BLOCK)
    out = torch.empty_like(inputs.query)

    def prepare() -> Tensor:
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=case.requests,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_size,
            seq_lens=lengths,
            dtype=shape.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )

    schedule = prepare()

    def write(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(key, value, *_stock_halves(cache), slots, isa)

    def read(cache: Tensor) -> Tensor:
        key, value = _stock_halves(cache)
        ops.cpu_attention_with_kv_cache(
            query=inputs.query,
            key_cache=key,
            value_cache=value,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=shape.head_size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0,
            scheduler_metadata=schedule,
            s_aux=None,
        )
        return out

    slots = slots_of(table, case.context, _STOCK_BLOCK)
    layer = _layer(case, caches, slots, inputs.rotated_key, inputs.value, write, read)
    return Implementation(layer, prepare)


def own_arm(case: AttentionCase, inputs: LayerInputs, rotated: bool) -> Implementation:
    """picbench's attention of plain requests, keys cached with RoPE (`rotated`) or without."""
    shape, scale = case.shape, case.shape.head_size**-0.5
    caches = caches_of(case, inputs.table.numel(), BLOCK_SIZE)
    out = torch.empty_like(inputs.query)
    workspace = Workspace()

    def prepare() -> AttentionBatch:
        return AttentionBatch.build(
            **description(case, inputs.table),
            affine=[True] * case.requests,
            rotated=[rotated] * case.requests,
            rope=inputs.rope,
            shape=shape,
            workspace=workspace,
        )

    batch = prepare()

    def write(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        store(key, value, cache, slots)

    def read(cache: Tensor) -> Tensor:
        return attend(inputs.query, cache, batch, scale, out)

    slots = slots_of(inputs.table, case.context, BLOCK_SIZE)
    key = inputs.rotated_key if rotated else inputs.key
    return Implementation(_layer(case, caches, slots, key, inputs.value, write, read), prepare)


def _layer(
    case: AttentionCase,
    caches: Sequence[Tensor],
    slots: Tensor,
    key: Tensor,
    value: Tensor,
    write: Callable[[Tensor, Tensor, Tensor, Tensor], None],
    read: Callable[[Tensor], Tensor],
) -> Layer:
    old = case.context - case.new
    for cache in caches:
        for request in range(case.requests):
            write(cache, key[:old], value[:old], slots[request, :old])
    new_key = key[old:].repeat(case.requests, 1, 1)
    new_value = value[old:].repeat(case.requests, 1, 1)
    new_slots = slots[:, old:].flatten().contiguous()

    def layer(index: int) -> Tensor:
        write(caches[index], new_key, new_value, new_slots)
        return read(caches[index])

    return layer


def description(case: AttentionCase, table: Tensor) -> dict[str, Any]:
    """What `AttentionBatch.build` and the reference are told of a case's requests."""
    positions = torch.arange(case.context, dtype=torch.int32)
    return {
        "query_start": [i * case.new for i in range(case.requests + 1)],
        "seq_lens": [case.context] * case.requests,
        "block_table": table,
        "kpos": [positions] * case.requests,
        "qpos": positions[-case.new :].repeat(case.requests),
    }


def caches_of(case: AttentionCase, blocks: int, block_size: int) -> list[Tensor]:
    """An empty cache for each layer."""
    size = (blocks, case.shape.num_kv_heads, block_size, 2 * case.shape.head_size)
    return [torch.zeros(size, dtype=case.shape.dtype) for _ in range(case.layers)]


def _wide_table(table: Tensor) -> Tensor:
    ratio = _STOCK_BLOCK // BLOCK_SIZE
    wide = table[:, ::ratio]
    return wide.flatten().argsort().argsort().view(wide.shape).int()


def slots_of(table: Tensor, length: int, block_size: int) -> Tensor:
    """Flat slots [requests, length] of each request's tokens."""
    inside = torch.arange(block_size)
    return (table.long().unsqueeze(-1) * block_size + inside).flatten(1)[:, :length].contiguous()


def _stock_halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    blocks, heads, slots, _ = cache.shape
    key, value = cache.view(blocks, heads, 2 * slots, -1).chunk(2, dim=2)
    return key, value


def arms(case: AttentionCase, inputs: LayerInputs) -> dict[str, Implementation]:
    """The compared implementations by name."""
    return {
        "stock": stock_arm(case, inputs),
        "in_place": own_arm(case, inputs, rotated=True),
        "unrotated": own_arm(case, inputs, rotated=False),
    }


_SAMPLE_SECONDS = 0.004
_MIN_ROUNDS = 5
_PREPARED = 9
_FACTS = ("cpu", "threads", "machine", "capability", "python", "torch", "vllm", "commit", "load")


def verify(shape: HeadShape, seed: int) -> None:
    """Compares all arms with the reference on small cases; raises InvalidRun on a difference."""
    small = (("prefill", shape, 1, 70, 70), ("decode", shape, 3, 1, 75))
    for case in (AttentionCase(*values) for values in small):
        inputs = draw(case, seed)
        cache = caches_of(case, inputs.table.numel(), BLOCK_SIZE)[0]
        for slots in slots_of(inputs.table, case.context, BLOCK_SIZE):
            store(inputs.key, inputs.value, cache, slots)
        expected = attend_reference(
            inputs.query,
            cache,
            **description(case, inputs.table),
            rope=inputs.rope,
            scale=shape.head_size**-0.5,
        )
        for name, arm in arms(case, inputs).items():
            _require_close(f"{name} against the reference", case, arm.layer(0), expected)


def _require_close(what: str, case: AttentionCase, found: Tensor, expected: Tensor) -> None:
    errors = [relative_error(found, expected.double())]
    require_right(f"{what} in {case}", errors, case.shape.dtype)


def measure(case: AttentionCase, rounds: int, seconds: float, seed: int) -> dict[str, Any]:
    """Times all arms of a case; microseconds a layer, ratios to stock.

    Stops after `rounds`, or after `seconds` once there are five.
    """
    inputs = draw(case, seed)
    compared = arms(case, inputs)
    expected = compared["stock"].layer(0).clone()
    for name, arm in compared.items():
        _require_close(f"{name} against stock", case, arm.layer(0), expected)
    samples = _interleave(case, compared, rounds, seconds, seed)
    stock = samples["stock"]
    return {
        "case": _describe(case),
        "layer_us": {name: asdict(Spread.of(times)) for name, times in samples.items()},
        "paired_ratio": {name: asdict(paired(times, stock)) for name, times in samples.items()},
        "ratio_of_best": {name: min(times) / min(stock) for name, times in samples.items()},
        "prepare_us": {name: _time_prepare(arm) for name, arm in compared.items()},
    }


def _interleave(
    case: AttentionCase, compared: dict[str, Implementation], rounds: int, seconds: float, seed: int
) -> dict[str, list[float]]:
    passes = {name: _passes(arm, case.layers) for name, arm in compared.items()}
    samples: dict[str, list[float]] = {name: [] for name in compared}
    order, shuffler = list(compared), random.Random(seed)
    deadline = time.monotonic() + seconds
    for index in range(rounds):
        if index >= _MIN_ROUNDS and time.monotonic() > deadline:
            break
        shuffler.shuffle(order)
        for name in order:
            samples[name].append(_time(compared[name], case.layers, passes[name]))
    return samples


def _passes(arm: Implementation, layers: int) -> int:
    seconds = _time(arm, layers, 1) * layers / 1e6
    return max(1, math.ceil(_SAMPLE_SECONDS / seconds))


def _time(arm: Implementation, layers: int, passes: int) -> float:
    begin = time.perf_counter()
    for _ in range(passes):
        for index in range(layers):
            arm.layer(index)
    return (time.perf_counter() - begin) / (passes * layers) * 1e6


def _time_prepare(arm: Implementation) -> float:
    times = []
    for _ in range(_PREPARED):
        begin = time.perf_counter()
        arm.prepare()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e6


def _describe(case: AttentionCase) -> dict[str, Any]:
    shape = asdict(case.shape) | {"dtype": str(case.shape.dtype).removeprefix("torch.")}
    return {**asdict(case), "shape": shape, "layers": case.layers}


def bench(
    output: Path,
    rounds: int,
    seed: int,
    *,
    seconds: float = 20.0,
    work: Sequence[str] = (),
    commit: str | None = None,
) -> str:
    """Check and time all cases, or those of some `work`, at most `seconds` each.

    Writes ``attention.json`` and ``attention.md`` and returns the table. Raises InvalidRun where an
    output is wrong.
    """
    results = _run([c for c in cases() if not work or c.name in work], rounds, seconds, seed)
    facts = provenance.facts(*_FACTS, commit=commit)
    facts |= {"seed": seed, "rounds": rounds, "weights": "none: random queries, keys and values"}
    document = {"schema": 1, "provenance": facts, "results": results}
    save(output / "attention", document, report(document))
    return table(results)


def _run(
    grid: Sequence[AttentionCase], rounds: int, seconds: float, seed: int
) -> list[dict[str, Any]]:
    for shape in dict.fromkeys(case.shape for case in grid):
        verify(shape, seed)
    results = []
    for index, case in enumerate(grid):
        click.echo(f"{index + 1}/{len(grid)} {_describe(case)}", err=True)
        results.append(measure(case, rounds, seconds, seed))
    return results


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as a Markdown table: ratios of the fastest runs, and paired medians."""
    counts = ("requests", "new", "context")
    head = ("heads", "type", "work", *counts, "stock us", "in place", "without RoPE")
    return markdown.table(head, map(_cells, results))


def _cells(result: dict[str, Any]) -> list[str]:
    case, shape = result["case"], result["case"]["shape"]
    return [
        f"{shape['num_heads']}/{shape['num_kv_heads']}x{shape['head_size']}",
        shape["dtype"],
        case["name"],
        *(str(case[name]) for name in ("requests", "new", "context")),
        f"{result['layer_us']['stock']['best']:.0f}",
        *(_ratio(result, name) for name in ("in_place", "unrotated")),
    ]


def report(document: dict[str, Any]) -> str:
    """The Markdown page of a run: what was measured where, and the table."""
    run = document["provenance"]
    return (
        "# CPU attention against stock vLLM\n\n"
        "One layer's whole attention path (store, then attend) for plain requests. Ratios to stock "
        "are of the\nfastest runs; in brackets the median and quartiles of ratios paired within a "
        "round. `in place`: keys are\nrotated before they are stored. `without RoPE`: keys are "
        "rotated when they are read.\nThe engine serves plain requests in place; chunks "
        "are cached without RoPE, and so is everything with\n`keys_without_rope`.\n\n"
        f"{run['cpu']} ({run['capability']}), {run['threads']} threads, torch {run['torch']}, "
        f"vLLM {run['vllm']}, random inputs,\nseed {run['seed']}, "
        f"at most {run['rounds']} rounds, commit {run['commit'][:12]}.\n\n"
        f"{table(document['results'])}\n"
    )


def _ratio(result: dict[str, Any], arm: str) -> str:
    rounds = result["paired_ratio"][arm]
    spread = f"{rounds['median']:.2f}, {rounds['q25']:.2f}-{rounds['q75']:.2f}"
    return f"{result['ratio_of_best'][arm]:.2f} ({spread})"

"""CPU attention of plain requests against that of stock vLLM.

One measurement is a layer's whole attention path: new keys and values are stored, then all queries
attend. Three implementations get the same numbers:

    stock      vLLM's CPU backend: blocks of 32, keys rotated before they are stored
    in_place   blocks of 16, keys rotated before they are stored (`rotated=True`)
    unrotated  blocks of 16, keys stored without RoPE and rotated when they are read

The layers of a case have caches of their own and are used in sequence, as a model does, so that
decode does not read one small cache out of the L3.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from picbench.experiments.kernels import (
    NO_WEIGHTS,
    Row,
    host_ms,
    interleave,
    measure_cases,
    paired,
    spreads,
)
from picbench.experiments.page import page
from picbench.experiments.scenes import relative_error, require_right, rope_table
from picbench.kernels.cpu.attention import AttentionBatch, attend, store
from picbench.kernels.cpu.reference import attend_reference
from picbench.kernels.cpu.scratch import Workspace
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable, rotate
from picbench.kernels.shape import HeadShape
from picbench.store import provenance
from picbench.tables.table import table

_STOCK_BLOCK = 32
_CACHE_BYTES = 64 << 20
_SAMPLE_SECONDS = 0.004
_PREPARED = 9
_FACTS = ("cpu", "threads", "machine", "capability", "python", "torch", "vllm", "commit", "load")


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

    def describe(self) -> Row:
        """For files."""
        shape = asdict(self.shape) | {"dtype": str(self.shape.dtype).removeprefix("torch.")}
        return {**asdict(self), "shape": shape, "layers": self.layers}


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


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Random keys, values and queries of one layer of a case; every request sees the same ones."""

    case: AttentionCase
    query: Tensor
    key: Tensor
    rotated_key: Tensor
    value: Tensor
    table: Tensor
    rope: RopeTable

    @classmethod
    def draw(cls, case: AttentionCase, seed: int) -> "LayerInputs":
        """Blocks are scattered over the pool."""
        generator = torch.Generator().manual_seed(seed)
        shape, context = case.shape, case.context

        def random(tokens: int, heads: int) -> Tensor:
            size = (tokens, heads, shape.head_size)
            return torch.randn(size, generator=generator).to(shape.dtype)

        query = random(case.requests * case.new, shape.num_heads)
        key, value = random(context, shape.num_kv_heads), random(context, shape.num_kv_heads)
        blocks = -(-context // BLOCK_SIZE)
        table = torch.randperm(case.requests * blocks, generator=generator).int()
        rope = rope_table(shape.head_size, context + BLOCK_SIZE, "cpu")
        rope = replace(rope, cos_sin_cache=rope.cos_sin_cache.to(shape.dtype))
        rotated = rotate(key, rope.rows(torch.arange(context)), is_neox=rope.is_neox)
        return cls(case, query, key, rotated, value, table.view(case.requests, blocks), rope)

    def description(self) -> dict[str, Any]:
        """What `AttentionBatch.build` and the reference are told of the requests."""
        case = self.case
        positions = torch.arange(case.context, dtype=torch.int32)
        return {
            "query_start": [i * case.new for i in range(case.requests + 1)],
            "seq_lens": [case.context] * case.requests,
            "block_table": self.table,
            "kpos": [positions] * case.requests,
            "qpos": positions[-case.new :].repeat(case.requests),
            "rope": self.rope,
        }


#: Writes keys and values [tokens, kv_heads, size] to flat slots of a cache.
Write = Callable[[Tensor, Tensor, Tensor, Tensor], object]


@dataclass(frozen=True, slots=True)
class Implementation:
    """The step of a layer, by its number, and what is prepared once for all layers.

    It keeps what requests have before the step in caches of its own, written with `write`.
    """

    inputs: LayerInputs
    table: Tensor
    block_size: int
    rotated: bool
    write: Write
    read: Callable[[Tensor], Tensor]
    prepare: Callable[[], object]

    def layers(self) -> list[Callable[[], Tensor]]:
        """The layers, each over a cache that is filled."""
        inputs, case = self.inputs, self.inputs.case
        key, old = inputs.rotated_key if self.rotated else inputs.key, case.context - case.new
        slots = slots_of(self.table, case.context, self.block_size)
        blocks = int(self.table.max()) + 1
        caches = [empty_cache(case.shape, blocks, self.block_size) for _ in range(case.layers)]
        for cache in caches:
            for own in slots:
                self.write(key[:old], inputs.value[:old], cache, own[:old])
        new_key = key[old:].repeat(case.requests, 1, 1)
        new_value = inputs.value[old:].repeat(case.requests, 1, 1)
        new_slots = slots[:, old:].flatten().contiguous()

        def layer(cache: Tensor) -> Tensor:
            self.write(new_key, new_value, cache, new_slots)
            return self.read(cache)

        return [partial(layer, cache) for cache in caches]


def empty_cache(shape: HeadShape, blocks: int, block_size: int) -> Tensor:
    """A layer's cache [blocks, kv_heads, block_size, 2 * head_size] of zeros."""
    size = (blocks, shape.num_kv_heads, block_size, 2 * shape.head_size)
    return torch.zeros(size, dtype=shape.dtype)


def slots_of(table: Tensor, length: int, block_size: int) -> Tensor:
    """Flat slots [requests, length] of each request's tokens."""
    inside = torch.arange(block_size)
    return (table.long().unsqueeze(-1) * block_size + inside).flatten(1)[:, :length].contiguous()


def stock_arm(inputs: LayerInputs) -> Implementation:
    """vLLM's CPU attention backend, as v1/attention/backends/cpu_attn.py calls it."""
    from vllm import _custom_ops as ops
    from vllm import envs
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    case, shape = inputs.case, inputs.case.shape
    isa = _get_attn_isa(shape.dtype, _STOCK_BLOCK, shape.head_size)
    wide = inputs.table[:, :: _STOCK_BLOCK // BLOCK_SIZE]
    table = wide.flatten().argsort().argsort().view(wide.shape).int()
    lengths = torch.full((case.requests,), case.context, dtype=torch.int32)
    starts = torch.arange(case.requests + 1, dtype=torch.int32) * case.new
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

    def halves(cache: Tensor) -> tuple[Tensor, Tensor]:
        blocks, heads, slots, _ = cache.shape
        key, value = cache.view(blocks, heads, 2 * slots, -1).chunk(2, dim=2)
        return key, value

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(key, value, *halves(cache), slots, isa)

    def read(cache: Tensor) -> Tensor:
        key, value = halves(cache)
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

    return Implementation(inputs, table, _STOCK_BLOCK, True, write, read, prepare)


def own_arm(inputs: LayerInputs, rotated: bool) -> Implementation:
    """picbench's attention of plain requests, keys cached with RoPE (`rotated`) or without."""
    case, workspace, out = inputs.case, Workspace(), torch.empty_like(inputs.query)

    def prepare() -> AttentionBatch:
        return AttentionBatch.build(
            **inputs.description(),
            affine=[True] * case.requests,
            rotated=[rotated] * case.requests,
            shape=case.shape,
            workspace=workspace,
        )

    batch, scale = prepare(), case.shape.head_size**-0.5

    def read(cache: Tensor) -> Tensor:
        return attend(inputs.query, cache, batch, scale, out)

    return Implementation(inputs, inputs.table, BLOCK_SIZE, rotated, store, read, prepare)


def arms(inputs: LayerInputs) -> dict[str, Implementation]:
    """The compared implementations by name."""
    own = {name: own_arm(inputs, name == "in_place") for name in ("in_place", "unrotated")}
    return {"stock": stock_arm(inputs)} | own


def verify(shape: HeadShape, seed: int) -> None:
    """Compare all arms with the reference on small cases; raises InvalidRun on a difference."""
    small = (("prefill", shape, 1, 70, 70), ("decode", shape, 3, 1, 75))
    for case in (AttentionCase(*values) for values in small):
        inputs = LayerInputs.draw(case, seed)
        cache = empty_cache(shape, inputs.table.numel(), BLOCK_SIZE)
        for slots in slots_of(inputs.table, case.context, BLOCK_SIZE):
            store(inputs.key, inputs.value, cache, slots)
        scale = shape.head_size**-0.5
        expected = attend_reference(inputs.query, cache, **inputs.description(), scale=scale)
        for name, arm in arms(inputs).items():
            found = arm.layers()[0]()
            _require_close(f"{name} against the reference", case, found, expected)


def _require_close(what: str, case: AttentionCase, found: Tensor, expected: Tensor) -> None:
    errors = [relative_error(found, expected.double())]
    require_right(f"{what} in {case}", errors, case.shape.dtype)


def measure(case: AttentionCase, rounds: int, seconds: float, seed: int) -> Row:
    """Time all arms of a case; microseconds a layer, ratios to stock.

    Stops after `rounds`, or after `seconds` once there are five.
    """
    compared = arms(LayerInputs.draw(case, seed))
    layers = {name: arm.layers() for name, arm in compared.items()}
    expected = layers["stock"][0]().clone()
    for name, own in layers.items():
        _require_close(f"{name} against stock", case, own[0](), expected)
    samplers = {name: _sampler(own) for name, own in layers.items()}
    samples = interleave(samplers, rounds, seed, seconds)
    stock = samples["stock"]
    return {
        "case": case.describe(),
        "layer_us": spreads(samples),
        "paired_ratio": {name: paired(times, stock) for name, times in samples.items()},
        "ratio_of_best": {name: min(times) / min(stock) for name, times in samples.items()},
        "prepare_us": {
            name: 1e3 * min(host_ms(arm.prepare, _PREPARED)) for name, arm in compared.items()
        },
    }


def _sampler(layers: Sequence[Callable[[], object]]) -> Callable[[], float]:
    """Microseconds a layer, over as many passes as a sample takes."""

    def sample(passes: int) -> float:
        begin = time.perf_counter()
        for _ in range(passes):
            for layer in layers:
                layer()
        return (time.perf_counter() - begin) / (passes * len(layers)) * 1e6

    seconds = sample(1) * len(layers) / 1e6
    return partial(sample, max(1, math.ceil(_SAMPLE_SECONDS / seconds)))


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
    grid = [case for case in cases() if not work or case.name in work]
    for shape in dict.fromkeys(case.shape for case in grid):
        verify(shape, seed)
    facts = provenance.facts(*_FACTS, commit=commit)
    facts |= {"seed": seed, "rounds": rounds, "weights": NO_WEIGHTS}
    document: Row = {"schema": 1, "provenance": facts, "results": []}
    chosen = (
        (f"{n}/{len(grid)} {case.describe()}", partial(measure, case, rounds, seconds, seed))
        for n, case in enumerate(grid, 1)
    )
    measure_cases(output / "attention", document, "results", chosen, report)
    return results_table(document["results"])


def results_table(results: Sequence[Row]) -> str:
    """The results in Markdown: ratios of the fastest runs, and paired medians."""
    counts = ("requests", "new", "context")
    head = ("heads", "type", "work", *counts, "stock us", "in place", "without RoPE")
    rows = []
    for result in results:
        case, shape = result["case"], result["case"]["shape"]
        heads = f"{shape['num_heads']}/{shape['num_kv_heads']}x{shape['head_size']}"
        ratios = (_ratio(result, name) for name in ("in_place", "unrotated"))
        stock = f"{result['layer_us']['stock']['best']:.0f}"
        numbers = (str(case[name]) for name in counts)
        rows.append([heads, shape["dtype"], case["name"], *numbers, stock, *ratios])
    return table(head, rows)


def _ratio(result: Row, arm: str) -> str:
    rounds = result["paired_ratio"][arm]
    spread = f"{rounds['median']:.2f}, {rounds['q25']:.2f}-{rounds['q75']:.2f}"
    return f"{result['ratio_of_best'][arm]:.2f} ({spread})"


_ABOUT = """\
One layer's whole attention path (store, then attend) for plain requests. Ratios to stock are of the
fastest runs; in brackets the median and quartiles of ratios paired within a round. `in place`: keys
are rotated before they are stored. `without RoPE`: keys are rotated when they are read. The engine
serves plain requests in place; chunks are cached without RoPE, and so is everything with
`keys_without_rope`.

{cpu} ({capability}), {threads} threads, torch {torch}, vLLM {vllm}, random inputs, seed {seed}, at
most {rounds} rounds, commit {commit:.12}."""


def report(document: Row) -> str:
    """The page, in Markdown: what was measured where, and the table."""
    about = _ABOUT.format(**document["provenance"])
    return page("CPU attention against stock vLLM", about, results_table(document["results"]))

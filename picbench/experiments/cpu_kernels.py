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

import torch
from torch import Tensor

from picbench.experiments.kernels import (
    Row,
    host_ms,
    interleave,
    measure_cases,
    paired,
    run_facts,
    spreads,
)
from picbench.experiments.scenes import (
    Scene,
    Slots,
    draw,
    relative_error,
    require_right,
    rope_table,
)
from picbench.kernels.cpu.attention import AttentionBatch, attend, store
from picbench.kernels.cpu.scratch import Workspace
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import rotate
from picbench.kernels.shape import HeadShape
from picbench.run.measurements import Kernels, Outcome
from picbench.tables.page import page
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

    def draw(self, seed: int) -> Scene:
        """Requests whose keys are cached without RoPE, in the layout of a CPU's caches."""
        shape = self.shape
        kpos = torch.arange(self.context, dtype=torch.int32)
        rope = rope_table(shape.head_size, self.context + BLOCK_SIZE, "cpu")
        rope = replace(rope, cos_sin_cache=rope.cos_sin_cache.to(shape.dtype))
        requests = [Slots(kpos, kpos, self.new)] * self.requests
        return draw(requests, shape, rope, device="cpu", seed=seed, head_major=True)

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


#: Writes keys and values [tokens, kv_heads, size] to flat slots of a cache.
Write = Callable[[Tensor, Tensor, Tensor, Tensor], object]


@dataclass(frozen=True, slots=True)
class Implementation:
    """How a layer is served, and what is prepared once for all layers.

    Keys of the scene are stored with `write`, `rotated` or not, in blocks of `block_size` that
    `table` names; `read` attends.
    """

    table: Tensor
    block_size: int
    rotated: bool
    write: Write
    read: Callable[[Tensor], Tensor]
    prepare: Callable[[], object]

    def layers(self, case: AttentionCase, scene: Scene) -> list[Callable[[], Tensor]]:
        """The step of each layer, which has a cache of its own with what is there before."""
        old, rope = case.context - case.new, scene.rope
        slots = slots_of(self.table, case.context, self.block_size)
        size = (case.shape.num_kv_heads, self.block_size, 2 * case.shape.head_size)
        blocks = int(self.table.max()) + 1
        caches = [torch.zeros(blocks, *size, dtype=case.shape.dtype) for _ in range(case.layers)]
        new: list[tuple[Tensor, ...]] = []
        for row, own in zip(scene.table.long(), slots, strict=True):
            key, value = (
                half[row].flatten(0, 1)[: case.context] for half in key_value(scene.kv_cache)
            )
            if self.rotated:
                key = rotate(key, rope.rows(torch.arange(case.context)), is_neox=rope.is_neox)
            for cache in caches:
                self.write(key[:old], value[:old], cache, own[:old])
            new.append((key[old:], value[old:], own[old:]))
        new_key, new_value, new_slots = (torch.cat(part) for part in zip(*new, strict=True))

        def layer(cache: Tensor) -> Tensor:
            self.write(new_key, new_value, cache, new_slots)
            return self.read(cache)

        return [partial(layer, cache) for cache in caches]


def slots_of(table: Tensor, length: int, block_size: int) -> Tensor:
    """Flat slots [requests, length] of each request's tokens."""
    inside = torch.arange(block_size)
    return (table.long().unsqueeze(-1) * block_size + inside).flatten(1)[:, :length].contiguous()


def stock_arm(case: AttentionCase, scene: Scene, query: Tensor) -> Implementation:
    """vLLM's CPU attention backend, as v1/attention/backends/cpu_attn.py calls it."""
    from vllm import _custom_ops as ops
    from vllm import envs
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    shape = case.shape
    isa = _get_attn_isa(shape.dtype, _STOCK_BLOCK, shape.head_size)
    wide = scene.table[:, :: _STOCK_BLOCK // BLOCK_SIZE]
    table = wide.flatten().argsort().argsort().view(wide.shape).int()
    lengths = torch.full((case.requests,), case.context, dtype=torch.int32)
    starts = torch.arange(case.requests + 1, dtype=torch.int32) * case.new
    out = torch.empty_like(query)

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
            query=query,
            key_cache=key,
            value_cache=value,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=scene.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0,
            scheduler_metadata=schedule,
            s_aux=None,
        )
        return out

    return Implementation(table, _STOCK_BLOCK, True, write, read, prepare)


def own_arm(case: AttentionCase, scene: Scene, query: Tensor, rotated: bool) -> Implementation:
    """picbench's attention of plain requests, keys cached with RoPE (`rotated`) or without."""
    workspace, out = Workspace(), torch.empty_like(query)

    def prepare() -> AttentionBatch:
        return AttentionBatch.build(
            query_start=[i * case.new for i in range(case.requests + 1)],
            seq_lens=scene.lengths.tolist(),
            block_table=scene.table,
            kpos=[slots.kpos for slots in scene.requests],
            qpos=torch.cat([slots.kpos[-case.new :] for slots in scene.requests]),
            affine=[True] * case.requests,
            rotated=[rotated] * case.requests,
            rope=scene.rope,
            shape=case.shape,
            workspace=workspace,
        )

    batch = prepare()

    def read(cache: Tensor) -> Tensor:
        return attend(query, cache, batch, scene.scale, out)

    return Implementation(scene.table, BLOCK_SIZE, rotated, store, read, prepare)


def arms(case: AttentionCase, scene: Scene, query: Tensor) -> dict[str, Implementation]:
    """The compared implementations by name."""
    return {
        "stock": stock_arm(case, scene, query),
        "in_place": own_arm(case, scene, query, rotated=True),
        "unrotated": own_arm(case, scene, query, rotated=False),
    }


def verify(shape: HeadShape, seed: int) -> None:
    """Compare all arms with the reference on small cases; raises InvalidRun on a difference."""
    small = (("prefill", shape, 1, 70, 70), ("decode", shape, 3, 1, 75))
    for case in (AttentionCase(*values) for values in small):
        scene = case.draw(seed)
        query = scene.queries(case.requests * case.new, seed)
        expected = [
            scene.expected(index, own, scene.requests[index].kpos[-case.new :])
            for index, own in enumerate(torch.split(query, case.new))
        ]
        for name, arm in arms(case, scene, query).items():
            found = arm.layers(case, scene)[0]()
            _require_close(f"{name} against the reference", case, found, torch.cat(expected))


def _require_close(what: str, case: AttentionCase, found: Tensor, expected: Tensor) -> None:
    errors = [relative_error(found, expected.double())]
    require_right(f"{what} in {case}", errors, case.shape.dtype)


def measure(case: AttentionCase, settings: Kernels) -> Row:
    """Time all arms of a case; microseconds a layer, ratios to stock.

    Stops after `rounds`, or after `seconds` once there are five.
    """
    seed = settings.seed
    scene = case.draw(seed)
    compared = arms(case, scene, scene.queries(case.requests * case.new, seed))
    layers = {name: arm.layers(case, scene) for name, arm in compared.items()}
    expected = layers["stock"][0]().clone()
    for name, own in layers.items():
        _require_close(f"{name} against stock", case, own[0](), expected)
    samplers = {name: _sampler(own) for name, own in layers.items()}
    samples = interleave(samplers, settings.rounds, seed, settings.seconds)
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


def bench(settings: Kernels) -> Outcome:
    """Check and time all cases, or those of some `work`, at most `seconds` each.

    Writes ``attention.json`` and ``attention.md`` and returns the table. Raises InvalidRun where an
    output is wrong.
    """
    grid = [case for case in cases() if not settings.work or case.name in settings.work]
    for shape in dict.fromkeys(case.shape for case in grid):
        verify(shape, settings.seed)
    facts = run_facts(settings, _FACTS, "cpu")
    document: Row = {"schema": 1, "provenance": facts, "results": []}
    chosen = (
        (f"{number}/{len(grid)} {case.describe()}", partial(measure, case, settings))
        for number, case in enumerate(grid, 1)
    )
    measure_cases(settings.output / "attention", document, "results", chosen, report)
    return Outcome(results_table(document["results"]))


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

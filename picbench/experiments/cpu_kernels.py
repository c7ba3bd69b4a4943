"""CPU attention of plain requests against that of stock vLLM.

One measurement is a layer's whole attention path: new keys and values are stored, then all queries
attend. Stock and picbench in place store rotated keys, picbench `unrotated` rotates them when they
are read. The layers of a case have caches of their own and are used in sequence, as a model does,
so that decode does not read one small cache out of the L3.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from picbench.experiments import kernels, scenes
from picbench.experiments.scenes import Scene, Slots
from picbench.kernels.cpu.attention import AttentionBatch, attend, store
from picbench.kernels.cpu.scratch import Workspace
from picbench.kernels.cpu.vllm_ops import Launch
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import rotate
from picbench.kernels.shape import HeadShape
from picbench.run.measurements import Kernels, Outcome
from picbench.tables.page import page
from picbench.tables.table import table

_STOCK_BLOCK = 32
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
        layer = 2 * self.requests * self.context * shape.num_kv_heads * shape.head_size
        filled = math.ceil((64 << 20) / (layer * shape.dtype.itemsize))
        return 1 if self.new > 1 else min(16, filled)


#: What each layer of an implementation does in a step.
Layers = Sequence[Callable[[], object]]


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


def layers_of(
    case: AttentionCase,
    scene: Scene,
    table: Tensor,
    block_size: int,
    rotated: bool,
    write: Callable[[Tensor, Tensor, Tensor, Tensor], object],
    read: Callable[[Tensor], object],
) -> Layers:
    """The step of each layer, which has a cache of its own with what is there before.

    Keys and values [tokens, kv_heads, size] are stored with `write` in flat slots of a cache, keys
    `rotated` or not, in blocks of `block_size` that `table` names; `read` attends.
    """
    old, rope = case.context - case.new, scene.rope
    slots = table.long().unsqueeze(-1) * block_size + torch.arange(block_size)
    size = (int(table.max()) + 1, case.shape.num_kv_heads, block_size, 2 * case.shape.head_size)
    caches = [torch.zeros(size, dtype=case.shape.dtype) for _ in range(case.layers)]
    key, value = (half[scene.table.long()].flatten(1, 2) for half in key_value(scene.kv_cache))
    if rotated:
        key = rotate(key, rope.rows(torch.arange(key.shape[1])), is_neox=rope.is_neox)
    stored = [part[:, : case.context] for part in (key, value, slots.flatten(1))]
    before = [part[:, :old].flatten(0, 1).contiguous() for part in stored]
    new = [part[:, old:].flatten(0, 1).contiguous() for part in stored]
    for cache in caches:
        write(before[0], before[1], cache, before[2])

    def layer(cache: Tensor) -> None:
        write(new[0], new[1], cache, new[2])
        read(cache)

    return [partial(layer, cache) for cache in caches]


def stock_layers(case: AttentionCase, scene: Scene, query: Tensor, out: Tensor) -> Layers:
    """vLLM's CPU attention backend, as v1/attention/backends/cpu_attn.py calls it."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    shape = case.shape
    isa = _get_attn_isa(shape.dtype, _STOCK_BLOCK, shape.head_size)
    wide = scene.table[:, :: _STOCK_BLOCK // BLOCK_SIZE]
    table = wide.flatten().argsort().argsort().view(wide.shape).int()
    lengths = torch.full((case.requests,), case.context, dtype=torch.int32)
    starts = torch.arange(case.requests + 1, dtype=torch.int32) * case.new
    launch = Launch.plan(0, starts, lengths, table, shape, isa)

    def halves(cache: Tensor) -> tuple[Tensor, Tensor]:
        blocks, heads, slots, _ = cache.shape
        key, value = cache.view(blocks, heads, 2 * slots, -1).chunk(2, dim=2)
        return key, value

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(key, value, *halves(cache), slots, isa)

    def read(cache: Tensor) -> None:
        launch.read(query, *halves(cache), scene.scale, out)

    return layers_of(case, scene, table, _STOCK_BLOCK, True, write, read)


def own_layers(
    case: AttentionCase, scene: Scene, query: Tensor, out: Tensor, rotated: bool
) -> Layers:
    """picbench's attention of plain requests, keys cached with RoPE (`rotated`) or without."""
    batch = AttentionBatch.build(
        query_start=[i * case.new for i in range(case.requests + 1)],
        seq_lens=scene.lengths.tolist(),
        block_table=scene.table,
        kpos=[slots.kpos for slots in scene.requests],
        qpos=torch.cat([slots.kpos[-case.new :] for slots in scene.requests]),
        affine=[True] * case.requests,
        rotated=[rotated] * case.requests,
        rope=scene.rope,
        shape=case.shape,
        workspace=Workspace(),
    )

    def read(cache: Tensor) -> None:
        attend(query, cache, batch, scene.scale, out)

    return layers_of(case, scene, scene.table, BLOCK_SIZE, rotated, store, read)


def measure(case: AttentionCase, settings: Kernels) -> kernels.Row:
    """Check and time all implementations; microseconds a layer, ratios to stock.

    Stops after `rounds`, or after `seconds` once there are five. Raises InvalidRun where an output
    is wrong.
    """
    shape, kpos = case.shape, torch.arange(case.context, dtype=torch.int32)
    rope = scenes.rope_table(shape.head_size, case.context + BLOCK_SIZE, "cpu")
    rope = replace(rope, cos_sin_cache=rope.cos_sin_cache.to(shape.dtype))
    requests = [Slots(kpos, kpos, case.new)] * case.requests
    scene = scenes.draw(requests, shape, rope, device="cpu", seed=settings.seed, head_major=True)
    query = scene.queries(case.requests * case.new, settings.seed)
    out = torch.empty_like(query)
    layers = {
        "stock": stock_layers(case, scene, query, out),
        "in_place": own_layers(case, scene, query, out, rotated=True),
        "unrotated": own_layers(case, scene, query, out, rotated=False),
    }
    for name, own in layers.items():
        scenes.check(f"{name} in {case}", scene, query, out, own[0])
    samplers = {name: _sampler(own) for name, own in layers.items()}
    samples = kernels.interleave(samplers, settings.rounds, settings.seed, settings.seconds)
    stock = samples["stock"]
    heads = asdict(shape) | {"dtype": str(shape.dtype).removeprefix("torch.")}
    return {
        "case": {**asdict(case), "shape": heads, "layers": case.layers},
        "layer_us": kernels.spreads(samples),
        "paired_ratio": {name: kernels.paired(times, stock) for name, times in samples.items()},
        "ratio_of_best": {name: min(times) / min(stock) for name, times in samples.items()},
    }


def _sampler(layers: Layers) -> Callable[[], float]:
    """Microseconds a layer, over as many passes as take 4 ms."""

    def sample(passes: int) -> float:
        begin = time.perf_counter()
        for _ in range(passes):
            for layer in layers:
                layer()
        return (time.perf_counter() - begin) / (passes * len(layers)) * 1e6

    return partial(sample, math.ceil(4000 / (sample(1) * len(layers))))


def bench(settings: Kernels) -> Outcome:
    """Check and time all cases, or those of some `work`, at most `seconds` each.

    Writes ``attention.json`` and ``attention.md``. Raises InvalidRun where an output is wrong.
    """
    facts = kernels.run_facts(settings, _FACTS, "cpu")
    document: kernels.Row = {"schema": 1, "provenance": facts, "results": []}
    chosen = (
        (str(case), partial(measure, case, settings))
        for case in cases()
        if not settings.work or case.name in settings.work
    )
    base = settings.output / "attention"
    return kernels.measure_cases(base, document, "results", chosen, report)


_ABOUT = """\
One layer's whole attention path (store, then attend) for plain requests, checked before against
float64. Ratios to stock are of the fastest runs; in brackets the median and quartiles of ratios
paired within a round. `in place`: keys are rotated before they are stored. `without RoPE`: keys are
rotated when they are read. The engine serves plain requests in place; chunks are cached without
RoPE, and so is everything with `keys_without_rope`.

{cpu} ({capability}), {threads} threads, torch {torch}, vLLM {vllm}, random inputs, seed {seed}, at
most {rounds} rounds, commit {commit:.12}."""


def report(document: kernels.Row) -> str:
    """The page, in Markdown: what was measured where; ratios of the fastest runs and in rounds."""
    counts = ("requests", "new", "context")
    head = ("heads", "type", "work", *counts, "stock us", "in place", "without RoPE")
    rows = []
    for result in document["results"]:
        case, shape = result["case"], result["case"]["shape"]
        heads = f"{shape['num_heads']}/{shape['num_kv_heads']}x{shape['head_size']}"
        ratios = [
            "{:.2f} ({median:.2f}, {q25:.2f}-{q75:.2f})".format(
                result["ratio_of_best"][arm], **result["paired_ratio"][arm]
            )
            for arm in ("in_place", "unrotated")
        ]
        stock = f"{result['layer_us']['stock']['best']:.0f}"
        numbers = (str(case[name]) for name in counts)
        rows.append([heads, shape["dtype"], case["name"], *numbers, stock, *ratios])
    about = _ABOUT.format(**document["provenance"])
    return page("CPU attention against stock vLLM", about, table(head, rows))

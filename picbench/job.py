"""A run that is decided and checked, and not begun."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from picbench.arm import Arm, parse_arms
from picbench.config import RunConfig
from picbench.engines.config import EngineConfig
from picbench.sizing import Sizes, measure_sizes
from picbench.store import check_free
from picbench.workload import Workload
from picbench.workloads.workload import Workload as Facts
from picbench.workloads.workload import summarise

#: Settings that change where or how a run is written, and none of its numbers. The names of
#: files are covered by the fingerprint of the requests that were made from them.
_NEUTRAL = {"output", "data", "prompts", "algo", "on_bad_row"}


#: Requests that an engine may run at once at least: the concurrency, and chunks being compiled.
MAX_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Job:
    """Arms, workload and sizes of a run, and the directory that it will write.

    `fingerprint` is the SHA-256, in hex, of what decides the numbers: settings, arms, sizes and
    requests.
    """

    config: RunConfig
    arms: tuple[Arm, ...]
    workload: Workload
    facts: Facts
    sizes: Sizes
    fingerprint: str
    output: Path

    def engine(self, arm: Arm) -> EngineConfig:
        """The settings of an arm's engine: the same for all but for the algorithm."""
        return EngineConfig(
            model=str(self.workload.model.path),
            algorithm=arm.algorithm,
            stock=arm.stock,
            dtype=self.config.dtype,
            kv_blocks=self.sizes.pool,
            context=self.sizes.context,
            max_requests=max(self.config.concurrency, MAX_REQUESTS),
            seed=self.config.seed,
        )


def prepare(config: RunConfig, load: Callable[[RunConfig], Workload]) -> Job:
    """Check all that can be checked before an engine starts; ConfigError for what is wrong."""
    arms = parse_arms(config.algo, same_engine=config.same_engine)
    if config.output:
        check_free(Path(config.output))
    workload = load(config)
    facts = summarise(workload.samples)
    sizes = measure_sizes(
        workload.samples,
        concurrency=config.concurrency,
        context=config.context,
        pool=config.kv_blocks,
    )
    fingerprint = _fingerprint(config, arms, facts, sizes)
    output = Path(config.output or _default_output(config, fingerprint))
    check_free(output)
    return Job(config, arms, workload, facts, sizes, fingerprint, output)


def _fingerprint(config: RunConfig, arms: tuple[Arm, ...], facts: Facts, sizes: Sizes) -> str:
    content = {
        "settings": config.model_dump(exclude=_NEUTRAL),
        "arms": [[arm.algorithm, arm.stock] for arm in arms],
        "sizes": asdict(sizes),
        "requests": facts.fingerprint,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _default_output(config: RunConfig, fingerprint: str) -> Path:
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    model = re.sub(r"[^A-Za-z0-9.]+", "-", Path(config.model.removeprefix("shape:")).name)
    return Path("runs") / f"{now}-{config.dataset}-{model}-{fingerprint[:8]}"

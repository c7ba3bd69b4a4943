"""What a run will take of memory and time, for its dry run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from picbench.errors import PicBenchError
from picbench.output import provenance
from picbench.output.run_directory import MANIFEST
from picbench.output.run_reader import Run, read_run
from picbench.run.job import Job
from picbench.sweep.sweep_plan import ArmRates, MeasuredWork, pool_bytes, work_of

#: The latest runs that are looked at.
_LATEST = 20

#: Settings with which an arm is faster or slower.
_DECISIVE = ("model", "dtype", "device", "tensor_parallel", "eager", "concurrency")


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """Tokens of all arms and repeats, bytes of all pools, and seconds of all arms together.

    `output_tokens` are those of replies as long as they may be. Seconds are None without one of
    `runs`, earlier ones of the same model and settings on the same hardware; bytes where the
    model's configuration does not tell them. Starts of engines are not in the seconds.
    """

    prompt_tokens: int
    output_tokens: int
    pool_bytes: int | None
    seconds: float | None
    runs: int


def estimate_run(job: Job, runs: Path) -> RunEstimate:
    """Estimate a job from its requests and from the runs below `runs`."""
    samples, times = job.workload.samples, job.config.repeats
    prompt = times * sum(sample.prompt_tokens for sample in samples)
    output = times * sum(sample.max_tokens for sample in samples)
    earlier = list(islice(_alike(job, runs), _LATEST))
    rates = ArmRates(earlier)
    return RunEstimate(
        prompt_tokens=prompt * len(job.arms),
        output_tokens=output * len(job.arms),
        pool_bytes=pool_bytes(job),
        seconds=sum(prompt * rates.of(arm.name) for arm in job.arms) if rates.known else None,
        runs=len(earlier),
    )


def _alike(job: Job, folder: Path) -> Iterator[Mapping[str, MeasuredWork]]:
    """What arms did in runs that are comparable in speed, the latest first."""
    here = provenance.collect()
    for manifest in sorted(folder.glob(f"*/{MANIFEST}"), reverse=True):
        try:
            run = read_run(manifest.parent)
            if _same(job, run, here):
                yield work_of(run)
        except (PicBenchError, KeyError):  # A run that cannot be read tells nothing.
            continue


def _same(job: Job, run: Run, here: Mapping[str, Any]) -> bool:
    config, known = job.config.model_dump(), run.manifest["config"]
    then = run.manifest["provenance"]
    return (
        run.manifest["status"] == "complete"
        and (then["cpu"]["model"], then["gpus"]) == (here["cpu"]["model"], here["gpus"])
        and all(known[name] == config[name] for name in _DECISIVE)
    )

"""The manifest and the summary of a job."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from picbench.arms.arm import Arm
from picbench.output.store.documents import (
    SCHEMA,
    ArmDocument,
    ArrivalDocument,
    Attempt,
    Manifest,
    ModelDocument,
    OriginDocument,
    Status,
    Summary,
    WorkloadDocument,
)
from picbench.output.summary import ArmSummary
from picbench.run.job import Job


def make_manifest(
    job: Job,
    engines: Mapping[str, Mapping[str, object]],
    provenance: Mapping[str, object],
    attempts: Sequence[Attempt],
    reason: str | None = None,
) -> Manifest:
    """What was asked for and on what it ran; the last of `attempts` says how far the run is."""
    config = job.config.published()
    return Manifest(
        schema=SCHEMA,
        status=attempts[-1].status,
        began=attempts[0].began,
        ended=attempts[-1].ended,
        reason=reason,
        attempts=attempts,
        fingerprint=job.fingerprint,
        config=config,
        sizes=job.sizes,
        model=_model(job),
        workload=_workload(job),
        cache=_cache(job),
        arms={
            arm.name: ArmDocument(
                algorithm=arm.algorithm,
                stock=arm.stock,
                settings=_settings(job, arm),
                engine=dict(engines[arm.name]),
            )
            for arm in job.arms
        },
        provenance=dict(provenance),
    )


def _settings(job: Job, arm: Arm) -> dict[str, Any]:
    if arm.endpoint is not None:
        return asdict(arm.endpoint)
    return asdict(job.engine(arm)) | {"tiers": job.config.published()["tiers"]}


def make_summary(
    job: Job, arms: Mapping[str, ArmSummary], provenance: Mapping[str, Any], status: Status
) -> Summary:
    """Aggregates by arm."""
    return Summary(
        schema=SCHEMA,
        status=status,
        fingerprint=job.fingerprint,
        model=_model(job),
        workload=_workload(job),
        arms=arms,
        provenance=dict(provenance),
    )


def _cache(job: Job) -> str:
    """The declared state of caches; without one, what engines do by themselves."""
    start = "warm" if job.workload.preload else "cold"
    return job.config.cache or f"{start} at start, kept between requests"


def _workload(job: Job) -> WorkloadDocument:
    workload = job.workload
    origin = workload.origin
    return WorkloadDocument(
        **asdict(job.facts),
        metric=workload.metric,
        synthetic=workload.synthetic,
        arrivals=_arrivals(workload.arrivals),
        preloaded_chunks=len(workload.preload),
        request_file=workload.requests,
        origin=None if origin is None else OriginDocument(**asdict(origin)),
        chat=workload.chat,
        skipped_rows=len(workload.skipped),
        first_skipped=next(iter(workload.skipped), None),
    )


def _arrivals(times: Sequence[float] | None) -> ArrivalDocument | None:
    """How requests arrive, None in a closed loop; each one's time is in its row."""
    return None if times is None else ArrivalDocument(len(times), max(times))


def _model(job: Job) -> ModelDocument:
    model = job.workload.model
    return ModelDocument(model.name, model.weights, model.meaningful, model.restates)

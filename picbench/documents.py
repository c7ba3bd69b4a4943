"""The JSON documents of a run directory."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from picbench.job import Job
from picbench.summary import ArmSummary
from picbench.workloads.bundled import BUNDLED

SCHEMA = 1


def manifest(
    job: Job,
    engines: Mapping[str, Mapping[str, object]],
    provenance: Mapping[str, object],
    **state: object,
) -> dict[str, Any]:
    """manifest.json: what was asked for and on what it ran; `state` is how far the run is.

    Engines start with no KV cached and keep their cache from request to request.
    """
    return {
        "schema": SCHEMA,
        **state,
        "fingerprint": job.fingerprint,
        "config": job.config.model_dump(mode="json"),
        "sizes": asdict(job.sizes),
        "model": _model(job),
        "workload": _workload(job),
        "cache": "cold at start, kept between requests",
        "arms": {
            arm.name: {
                "algorithm": arm.algorithm,
                "stock": arm.stock,
                "settings": asdict(job.engine(arm)),
                "engine": dict(engines[arm.name]),
            }
            for arm in job.arms
        },
        "provenance": dict(provenance),
    }


def summary(
    job: Job, arms: Mapping[str, ArmSummary], provenance: Mapping[str, object], status: str
) -> dict[str, Any]:
    """summary.json: aggregates by arm."""
    return {
        "schema": SCHEMA,
        "status": status,
        "fingerprint": job.fingerprint,
        "model": _model(job),
        "workload": _workload(job),
        "arms": {name: asdict(arm) for name, arm in arms.items()},
        "provenance": dict(provenance),
    }


def _workload(job: Job) -> dict[str, object]:
    return asdict(job.facts) | {"synthetic": job.config.data == BUNDLED}


def _model(job: Job) -> dict[str, object]:
    model = job.workload.model
    return {"name": model.name, "weights": model.weights, "meaningful": model.meaningful}

"""manifest.json and summary.json as JSON values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from picbench.output.summary import ArmSummary
from picbench.run.job import Job

SCHEMA = 1


def make_manifest(
    job: Job,
    engines: Mapping[str, Mapping[str, object]],
    provenance: Mapping[str, object],
    **state: object,
) -> dict[str, Any]:
    """manifest.json: what was asked for and on what it ran; `state` is how far the run is.

    Engines start with no KV cached, or that of preloaded chunks, and keep their cache from
    request to request.
    """
    config = job.config.published()
    return {
        "schema": SCHEMA,
        **state,
        "fingerprint": job.fingerprint,
        "config": config,
        "sizes": asdict(job.sizes),
        "model": _model(job),
        "workload": _workload(job),
        "cache": f"{'warm' if job.workload.preload else 'cold'} at start, kept between requests",
        "arms": {
            arm.name: {
                "algorithm": arm.algorithm,
                "stock": arm.stock,
                "settings": asdict(job.engine(arm)) | {"tiers": config["tiers"]},
                "engine": dict(engines[arm.name]),
            }
            for arm in job.arms
        },
        "provenance": dict(provenance),
    }


def make_summary(
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
    workload = job.workload
    return asdict(job.facts) | {
        "synthetic": workload.synthetic,
        "arrivals": _arrivals(workload.arrivals),
        "preloaded_chunks": len(workload.preload),
        "request_file": workload.requests,
        "origin": None if workload.origin is None else asdict(workload.origin),
        "chat": workload.chat,
        "skipped_rows": len(workload.skipped),
        "first_skipped": next(iter(workload.skipped), None),
    }


def _arrivals(times: Sequence[float] | None) -> dict[str, object] | None:
    """How requests arrive, None in a closed loop; each one's time is in its row."""
    return None if times is None else {"requests": len(times), "last_s": max(times)}


def _model(job: Job) -> dict[str, object]:
    model = job.workload.model
    return {"name": model.name, "weights": model.weights, "meaningful": model.meaningful}

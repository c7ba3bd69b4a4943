"""What `picbench show` prints of a run directory."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from picbench.engines.algorithms import Registry, Reuse
from picbench.errors import ConfigError
from picbench.metrics import metrics_shown
from picbench.run.result import print_all
from picbench.settings import RunConfig
from picbench.store.reader import Run, read_run
from picbench.store.summary import ArmSummary
from picbench.tables.run import run_table, server_lines, stalled, verdict


def print_overview(run: Run, stream: TextIO) -> None:
    """The state of a run, its table, its settings, and where its numbers come from."""
    arms = arms_of(run)
    print_all(
        stream,
        _lines([("run", str(run.path)), *_state(run)]),
        *([run_table(arms), *verdict(arms, _reusing(run))] if arms else ()),
        *stalled(arms),
        *server_lines(arms),
        _lines([*_results(arms), *_settings(run), *_provenance(run)]),
    )


def arms_of(run: Run) -> dict[str, ArmSummary]:
    """The summaries of a run; none where it was stopped before it measured anything."""
    try:
        return dict(run.summary)
    except ConfigError:
        return {}


def _lines(facts: list[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in facts:
        table.add_row(name, Text(value))
    return table


def _state(run: Run) -> Iterator[tuple[str, str]]:
    manifest = run.manifest
    workload = manifest["workload"]
    yield "status", " - ".join(filter(None, (manifest["status"], manifest["reason"])))
    for attempt in manifest["attempts"]:
        done = f", after {attempt['done']} requests" if attempt["done"] else ""
        again = f", {attempt['replayed']} served again" if attempt["replayed"] else ""
        end = attempt["ended"] or "no end (killed, or running)"
        yield "attempt", f"{attempt['began']} to {end}: {attempt['status']}{done}{again}"
    yield "requests", f"{workload['samples']} to each of {len(manifest['arms'])} arms"
    yield "data set", workload["dataset"] + (" (synthetic rows)" if workload["synthetic"] else "")
    yield "model", f"{manifest['model']['name']} ({manifest['model']['weights']} weights)"
    yield "cache", manifest["cache"]
    yield "fingerprint", manifest["fingerprint"]
    yield "schema", str(run.manifest["schema"])


def _results(arms: Mapping[str, ArmSummary]) -> Iterator[tuple[str, str]]:
    for name, arm in arms.items():
        if arm.outcomes:
            yield (
                f"outcomes of {name}",
                ", ".join(f"{n} {what}" for what, n in arm.outcomes.items()),
            )


def _settings(run: Run) -> Iterator[tuple[str, str]]:
    """Settings that are not the default, and the sizes that were chosen."""
    for name, value in run.manifest["config"].items():
        known = RunConfig.model_fields.get(name)
        chosen = tuple(value) if isinstance(value, list) else value
        if known is None or known.is_required() or chosen != known.get_default():
            yield name, ",".join(value) if isinstance(value, list) else str(value)
    sizes = run.manifest["sizes"]
    yield "context", f"{sizes['context']:,} tokens"
    yield "KV blocks", f"{sizes['pool']:,} in the pool of each arm"


def _provenance(run: Run) -> Iterator[tuple[str, str]]:
    found = run.manifest["provenance"]
    git = found.get("git") or {}
    if git:
        yield "commit", git["commit"] + (", changed" if git["dirty"] else "")
    yield "packages", ", ".join(f"{name} {known}" for name, known in found["packages"].items())
    yield "python", f"{found['python']} on {found['platform']}"
    yield "CPU", f"{found['cpu']['model']}, {found['cpu']['cores']} cores"
    for gpu in found["gpus"]:
        yield "GPU", f"{gpu['name']}, driver {gpu['driver']}, {gpu['memory']}"
    yield from found["environment"].items()
    yield "command", " ".join(found["command"])


def _reusing(run: Run) -> list[str]:
    """Arms that reuse chunks, as far as their algorithms are installed here."""
    registry = Registry()
    arms = run.manifest["arms"].items()
    return [name for name, arm in arms if _reuses(arm["algorithm"], registry)]


def _reuses(spec: str, registry: Registry) -> bool:
    try:
        return registry.parse(spec).reuse is Reuse.CHUNKS
    except ConfigError:
        return False


def status_line(path: Path, exit_code: int) -> str:
    """One line of JSON about the run directory `path`, whose command ends with `exit_code`.

    Times are in milliseconds; null is what was not measured.
    """
    run = read_run(path)
    return json.dumps(
        {
            "run": str(path),
            "status": run.manifest["status"],
            "exit_code": exit_code,
            "fingerprint": run.manifest["fingerprint"],
            "arms": {name: headline(arm) for name, arm in arms_of(run).items()},
        }
    )


def headline(arm: ArmSummary) -> dict[str, Any]:
    """The main numbers of an arm."""
    metrics = metrics_shown([arm], "status")
    return {"provenance": arm.provenance} | {metric.name: metric.known(arm) for metric in metrics}

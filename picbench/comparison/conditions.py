"""What two runs have to have in common before their numbers can be compared."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from picbench.errors import IncomparableRuns
from picbench.output.run_reader import Run

#: Settings that do not change what is asked of an engine. The requests that were made from named
#: files are covered by the workload's fingerprint.
_NEUTRAL = {
    "algo",
    "arm",
    "data",
    "offline",
    "on_bad_row",
    "output",
    "prompts",
    "requests",
    "self_check",
    "slo",
}

#: Of the workload, what the fingerprint of its requests does not cover.
_WORKLOAD = ("fingerprint", "samples", "arrivals", "preloaded_chunks")
_SIZES = ("pool", "context")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A field, by its path in manifest.json, in which two runs differ."""

    field: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.field} is {_short(self.before)} and {_short(self.after)}"


@dataclass(frozen=True, slots=True)
class Conditions:
    """Fields of a run by their paths in manifest.json.

    Two runs are comparable if their `workload` is the same: requests, settings, pool, cache. Where
    the `hardware` differs as well, times say nothing about the code. `versions` may differ: they
    are what is compared, often.
    """

    workload: Mapping[str, object]
    hardware: Mapping[str, object]
    versions: Mapping[str, object]


def conditions_of(manifest: Mapping[str, Any]) -> Conditions:
    """The conditions that a manifest states; what it does not state is left out."""
    config, workload = manifest.get("config", {}), manifest.get("workload", {})
    sizes, provenance = manifest.get("sizes", {}), manifest.get("provenance", {})
    cpu = provenance.get("cpu", {})
    return Conditions(
        workload={
            **{f"config.{name}": v for name, v in config.items() if name not in _NEUTRAL},
            **{f"workload.{name}": workload[name] for name in _WORKLOAD if name in workload},
            **{f"sizes.{name}": sizes[name] for name in _SIZES if name in sizes},
            **({"cache": manifest["cache"]} if "cache" in manifest else {}),
        },
        hardware={
            "provenance.cpu.model": cpu.get("model"),
            "provenance.cpu.cores": cpu.get("cores"),
            "provenance.gpus": [gpu.get("name") for gpu in provenance.get("gpus", [])],
        },
        versions={
            **{f"provenance.packages.{n}": v for n, v in provenance.get("packages", {}).items()},
            "provenance.git": provenance.get("git"),
        },
    )


def scored_conditions(run: Run) -> Conditions:
    """The conditions of a run, with what its scores are now: it may have been scored anew."""
    found = conditions_of(run.manifest)
    if not run.summary:
        return found
    metric = next(iter(run.summary.values())).score.metric
    return replace(found, workload={**found.workload, "summary.score.metric": metric})


def mismatches(before: Mapping[str, object], after: Mapping[str, object]) -> list[Mismatch]:
    """Fields that differ. One that is unknown to either side is newer than it, and is passed."""
    return [
        Mismatch(field, value, after[field])
        for field, value in before.items()
        if field in after and after[field] != value
    ]


def check_comparable(
    before: Conditions,
    after: Conditions,
    names: tuple[str, str],
    *,
    allow: bool = False,
    hint: str = "repeat one of them, or give `allow_mismatch` to compare them all the same",
) -> list[Mismatch]:
    """The fields that differ; IncomparableRuns names them, with a `hint`, if none may differ."""
    found = mismatches(before.workload, after.workload)
    if found and not allow:
        raise IncomparableRuns(
            f"{names[0]} and {names[1]} did not measure the same: {'; '.join(map(str, found))}",
            hint=hint,
        )
    return found


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."

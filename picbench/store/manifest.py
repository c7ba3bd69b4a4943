"""manifest.json and summary.json as dataclasses, from which their JSON Schemas are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from picbench.store.records import Sizes
from picbench.store.summary import ArmSummary
from picbench.workloads.facts import WorkloadFacts
from picbench.workloads.sources.hub import Origin

#: The version of all files of a run directory. It changes when a field changes its meaning or is
#: no longer written, and when one is added that readers rely on.
SCHEMA = 2

#: How far a run is. `running` stays if a run was killed. `complete`, `partial` (requests failed)
#: and `invalid` (its numbers mean nothing) are final; after `interrupted` and `failed` the same
#: command resumes.
Status = Literal["running", "complete", "partial", "interrupted", "failed", "invalid"]

#: The ends after which a run is not resumed.
FINAL = ("complete", "partial", "invalid")


@dataclass(frozen=True, slots=True)
class ModelDocument:
    """The model: its name, its kind of weights, and whether scores with these mean something.

    `restates` marks the testbed model, whose replies restate facts before the answer.
    """

    name: str
    weights: str
    meaningful: bool
    restates: bool = False


@dataclass(frozen=True, slots=True)
class ArrivalDocument:
    """An open loop: so many requests, the last of them after `last_s` seconds."""

    requests: int
    last_s: float


@dataclass(frozen=True, slots=True)
class WorkloadDocument(WorkloadFacts):
    """The facts about the requests, and how they are sent.

    `metric` is how replies are scored. `arrivals` is None in a closed loop, `request_file` the
    fingerprint of a replayed file.
    """

    metric: str | None
    synthetic: bool
    arrivals: ArrivalDocument | None
    preloaded_chunks: int
    request_file: str | None
    origin: Origin | None
    chat: bool
    skipped_rows: int
    first_skipped: str | None


@dataclass(frozen=True, slots=True)
class ArmDocument:
    """An arm: its algorithm, the settings of its engine, and what the engine says it is."""

    algorithm: str
    stock: bool
    settings: Mapping[str, Any]
    engine: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process that worked on a run; times are UTC in ISO 8601.

    It began after `done` requests of all arms together. To have its caches as they were then, it
    served `replayed` of these again without measuring them; `changed_outputs` of them got another
    reply than the first time. `status` is "running" if it was killed.
    """

    began: str
    ended: str | None = None
    status: Status = "running"
    done: int = 0
    replayed: int = 0
    changed_outputs: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """manifest.json: what was asked for and on what it ran.

    `reason` says why a run is invalid or failed. `config` has the settings of `picbench run`,
    `provenance` versions, hardware and code.
    """

    schema: int
    status: Status
    began: str
    ended: str | None
    reason: str | None
    attempts: Sequence[Attempt]
    fingerprint: str
    config: Mapping[str, Any]
    sizes: Sizes
    model: ModelDocument
    workload: WorkloadDocument
    cache: str
    arms: Mapping[str, ArmDocument]
    provenance: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """summary.json: aggregates by arm."""

    schema: int
    status: Status
    fingerprint: str
    model: ModelDocument
    workload: WorkloadDocument
    arms: Mapping[str, ArmSummary]
    provenance: Mapping[str, Any]

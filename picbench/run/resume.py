"""Caches as they were: what a stopped run has measured is served again, unmeasured."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from picbench.errors import ConfigError, IncomparableRuns, InvalidRun
from picbench.files import is_held
from picbench.run.arm import ArmServer
from picbench.run.schedule import Rewrite, to_requests
from picbench.store import provenance
from picbench.store.manifest import FINAL, Attempt
from picbench.store.reader import Run, read_run
from picbench.store.records import ArmBatch, SampleRow
from picbench.store.writer import MANIFEST, StoredBatch, check_free, cut, read_batches
from picbench.workloads.sample import Sample

#: Rows of a batch, in the order of its samples.
ToRows = Callable[[ArmBatch], Sequence[SampleRow]]


@dataclass(frozen=True, slots=True)
class Refill:
    """Requests that were served again, and how many of these got another reply this time."""

    requests: int = 0
    changed_outputs: int = 0


def refill(
    servers: Mapping[str, ArmServer],
    stored: Sequence[StoredBatch],
    planned: Sequence[tuple[int, str, Sequence[Sample]]],
    *,
    concurrency: int,
    arms: Collection[str],
    rewrite: Rewrite,
    to_rows: ToRows,
) -> Refill:
    """Serve the stored batches of `arms` again, in the same order and groups.

    `planned` is the schedule, which the stored batches are the beginning of. What engines reuse
    depends on all that they served before, so that nothing less makes the requests that follow hit
    as in a run that was not stopped. Raises InvalidRun where a request now reuses other tokens than
    when it was measured: its engine is not in the state in which the run was stopped.
    """
    requests = changed = 0
    for batch, (number, arm, given) in _paired(stored, planned):
        group = rewrite(arm, given)  # Also where nothing is sent: what comes later depends on it.
        if arm not in arms or batch.line.lost is not None:
            continue
        result = servers[arm].run(to_requests(group), concurrency)
        rows = to_rows(ArmBatch(number, arm, group, result))
        for before, now in zip(batch.rows, rows, strict=True):
            _check_counters(before, now)
            changed += _output(before) != _output(now)
        requests += len(rows)
    return Refill(requests, changed)


def _paired(
    stored: Sequence[StoredBatch], planned: Sequence[tuple[int, str, Sequence[Sample]]]
) -> Iterator[tuple[StoredBatch, tuple[int, str, Sequence[Sample]]]]:
    for batch, plan in zip(stored, planned, strict=False):
        number, arm, group = plan
        names = [row.sample for row in batch.rows]
        if (batch.line.round, batch.line.arm, names) != (number, arm, [s.id for s in group]):
            raise InvalidRun(
                f"round {batch.line.round} of arm {batch.line.arm} is stored where round {number} "
                f"of arm {arm} belongs",
                hint="name a new `output` to measure again",
            )
        yield batch, plan


def _check_counters(before: SampleRow, now: SampleRow) -> None:
    if _counters(before) != _counters(now):
        raise InvalidRun(
            f"arm {now.arm}, sample {now.sample}: served again, it reused {now.tokens.reused} "
            f"tokens and not {before.tokens.reused} as when it was measured, or other blocks",
            hint="name a new `output` to measure again; tiers that outlive the engine must be "
            "empty",
        )


def _counters(row: SampleRow) -> tuple[object, ...]:
    return (row.error is None, row.tokens, row.hits)


def _output(row: SampleRow) -> tuple[object, ...]:
    return (row.output_sha256, row.finish_reason)


#: What must be the same for a run to go on, beside the processor.
_CHECKED = ("python", "packages", "gpus", "git", "environment")

_ATTEMPTS = TypeAdapter(list[Attempt])


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What is there of a run that goes on: its manifest, earlier attempts, committed batches."""

    manifest: Mapping[str, Any]
    attempts: list[Attempt]
    batches: list[StoredBatch]

    @property
    def requests(self) -> int:
        """Requests of all arms that were measured."""
        return sum(batch.line.rows for batch in self.batches)

    @property
    def lost(self) -> dict[str, str]:
        """Why the engines of arms are gone, by arm."""
        return {b.line.arm: b.line.lost for b in self.batches if b.line.lost is not None}

    @property
    def engines(self) -> dict[str, Mapping[str, object]]:
        """What the arms' engines said of themselves when the run began."""
        return {name: arm["engine"] for name, arm in self.manifest["arms"].items()}


def check_output(path: Path) -> None:
    """ConfigError unless `path` is free or the directory of a run."""
    if not (path / MANIFEST).is_file():
        check_free(path)


def check_same(path: Path, fingerprint: str, settings: Mapping[str, Any]) -> None:
    """ConfigError where `path` is the directory of another run; names settings that differ."""
    if not (path / MANIFEST).is_file():
        return
    manifest = read_run(path).manifest
    if manifest["fingerprint"] == fingerprint:
        return
    theirs = manifest["config"]
    differ = [n for n in settings if n != "output" and theirs.get(n) != settings[n]]
    what = f"other settings: {', '.join(differ)}" if differ else "other requests"
    raise ConfigError(
        f"`output` {path}: has a run with {what}",
        hint="name a new folder, or give the command that began the run",
    )


def find_unfinished(folder: Path, fingerprint: str) -> Path | None:
    """The latest run below `folder` that can go on here, and that no process works on."""
    for manifest in sorted(folder.glob(f"*-{fingerprint[:8]}*/{MANIFEST}"), reverse=True):
        try:
            run = read_run(manifest.parent)
        except Exception:  # Whatever is wrong with it, it is not the one.
            continue
        if run.manifest["fingerprint"] == fingerprint and can_go_on(run) and not is_held(run.path):
            return run.path
    return None


def can_go_on(run: Run) -> bool:
    """Whether `take_up` takes a run: one that has not ended, begun here as things are now."""
    return run.manifest["status"] not in FINAL and not changed(run, provenance.collect())


def take_up(run: Run) -> StoredRun:
    """What is there of an unfinished run; what was left over of a batch is removed.

    Raises IncomparableRuns if it began in another environment.
    """
    if differ := changed(run, provenance.collect()):
        raise IncomparableRuns(
            f"{run.path}: began with other {', '.join(differ)}", hint=_MEASURE_AGAIN
        )
    batches = read_batches(run.path)
    cut(run.path, batches)
    return StoredRun(run.manifest, _ATTEMPTS.validate_python(run.manifest["attempts"]), batches)


def changed(run: Run, now: Mapping[str, Any]) -> list[str]:
    """What of the environment is not as it was when the run began."""
    then = run.manifest["provenance"]
    differ = [name for name in _CHECKED if then.get(name) != now[name]]
    if then["cpu"]["model"] != now["cpu"]["model"]:
        differ.append("cpu")
    return differ


_MEASURE_AGAIN = "name a new `output` to measure again"

"""What is there of a run that was stopped, and whether it can be resumed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from picbench.errors import ConfigError, IncomparableRuns
from picbench.store import provenance
from picbench.store.manifest import FINAL, Attempt
from picbench.store.reader import Run, read_run
from picbench.store.writer import MANIFEST, StoredBatch, check_free, cut, is_held, read_batches

#: What must be the same for a run to be resumed, beside the processor.
_CHECKED = ("python", "packages", "gpus", "git", "environment")

_ATTEMPTS = TypeAdapter(list[Attempt])


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What is there of a run that is resumed: its manifest, earlier attempts, committed batches."""

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
        """Descriptions of the arms' engines, from when the run began."""
        return {name: arm["engine"] for name, arm in self.manifest["arms"].items()}


def check_output(path: Path) -> None:
    """Raise ConfigError unless `path` is free or the directory of a run."""
    if not (path / MANIFEST).is_file():
        check_free(path)


def check_same(path: Path, fingerprint: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the settings that differ, if `path` has another run."""
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
    """The latest run below `folder` that can be resumed here, and that no process works on."""
    for manifest in sorted(folder.glob(f"*-{fingerprint[:8]}*/{MANIFEST}"), reverse=True):
        try:
            run = read_run(manifest.parent)
        except Exception:  # Whatever is wrong with it, it is not the one.
            continue
        if run.manifest["fingerprint"] == fingerprint and can_resume(run) and not is_held(run.path):
            return run.path
    return None


def can_resume(run: Run) -> bool:
    """Whether `load_progress` takes a run: one that has not ended, begun here as things are now."""
    return run.manifest["status"] not in FINAL and not changed(run, provenance.collect())


def load_progress(run: Run) -> StoredRun:
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

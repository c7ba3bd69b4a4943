"""Runs from the first engine to the last file: one, or several on the same engines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from picbench.arms.fleet import Fleet, open_fleet
from picbench.arms.server import Server, launch
from picbench.engines.config import EngineConfig
from picbench.errors import ConfigError, EngineError, InvalidRun
from picbench.inputs.workload import Workload, load_workload
from picbench.output import provenance
from picbench.output.manifest import make_manifest, make_summary
from picbench.output.run_directory import RunDirectory, log_name
from picbench.output.sample_row import to_rows
from picbench.output.summary import ArmSummary, summarise
from picbench.run.config import RunConfig
from picbench.run.gpu_share import gpu_memory
from picbench.run.job import Job
from picbench.run.progress import Progress
from picbench.run.protocol import ArmBatch, interleave, preload, replay
from picbench.run.tally import Tally
from picbench.run.verify import verify

#: Starts the engine of an arm: its name, its settings, the file for its output.
Launch = Callable[[str, EngineConfig, Path], Server]


@dataclass(frozen=True, slots=True)
class Services:
    """Where workloads come from, how engines start, and on which GPUs; tests bring their own.

    `memory` gives the bytes of each of so many GPUs, None where engines use none.
    """

    load: Callable[[RunConfig], Workload] = load_workload
    launch: Launch = launch
    memory: Callable[[int], int | None] = gpu_memory


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a run: its directory, the arms' summaries and how many requests failed."""

    path: Path
    arms: Mapping[str, ArmSummary]
    failed: int


def execute(job: Job, launch: Launch, progress: Progress) -> Finished:
    """Start the engines, run all rounds, write the run directory.

    Where start-up fails nothing is left behind. From then on, whatever stops the run, all that
    was measured is kept, and the manifest says how the run ended.
    """
    directory = RunDirectory.create(job.output)
    try:
        with _start_engines(job, launch, progress, directory.log) as fleet:
            _say_notes(fleet, progress)
            return Session(job, directory, fleet, progress).run()
    except BaseException:
        if not directory.begun:
            directory.discard()
        raise


def sweep(
    jobs: Sequence[Job], launch: Launch, progress: Progress, logs: Path
) -> Iterator[Finished]:
    """Run jobs one after another, each from a cold cache and into a directory of its own.

    The engines start once, so the jobs must agree on their settings (ConfigError); their output
    goes to `logs`. A run with a failed request ends the sweep with EngineError: an engine that is
    gone would fail all that follow.
    """
    _check_alike(jobs)
    logs.mkdir(parents=True, exist_ok=True)
    first = jobs[0]
    with _start_engines(first, launch, progress, lambda arm: logs / log_name(arm)) as fleet:
        _say_notes(fleet, progress)
        for job in jobs:
            for server in fleet.servers.values():
                server.reset()
            progress.say(f"{job.output.name}")
            done = Session(job, RunDirectory.create(job.output), fleet, progress).run()
            _check_complete(done)
            yield done


class Session:
    """The measuring part of a run, and its files."""

    def __init__(self, job: Job, directory: RunDirectory, fleet: Fleet, progress: Progress) -> None:
        self._job = job
        self._directory = directory
        self._fleet = fleet
        self._progress = progress
        self._arms = {arm.name: arm for arm in job.arms}
        self._tallies = {arm.name: Tally() for arm in job.arms}
        self._provenance = provenance.collect()
        self._began = _now()

    def run(self) -> Finished:
        """Run all rounds; the files record how far they got in any case."""
        self._write_manifest("running")
        status = "interrupted"
        try:
            self._measure()
            status = "partial" if self._failed else "complete"
        except InvalidRun:
            status = "invalid"
            raise
        except Exception:
            status = "failed"
            raise
        finally:
            arms = self._write_results(status)
            if status not in ("complete", "partial"):
                self._progress.say(f"{status}; results so far are in {self._directory.path}")
        return Finished(self._directory.path, arms, self._failed)

    def _measure(self) -> None:
        self._preload()
        self._progress.begin()
        for batch in self._batches():
            self._keep(batch)

    def _preload(self) -> None:
        samples = self._job.workload.preload
        if samples:
            self._progress.say(f"preloading {len(samples)} chunks into each arm")
            preload(self._fleet.servers, samples, self._job.config.concurrency)

    def _batches(self) -> Iterator[ArmBatch]:
        workload, servers = self._job.workload, self._fleet.servers
        if workload.arrivals is None:
            return interleave(servers, workload.samples, self._job.config.concurrency)
        # Any number that differs from run to run will do.
        return replay(servers, workload.samples, workload.arrivals, int(self._job.fingerprint, 16))

    def _keep(self, batch: ArmBatch) -> None:
        rows = to_rows(batch, self._job.workload.score)
        self._directory.append(rows)
        self._tallies[batch.arm].add(rows, batch.result)
        self._progress.advance(batch.arm, len(rows))
        verify(batch, self._arms[batch.arm], warm=bool(self._job.workload.preload))

    def _write_results(self, status: str) -> dict[str, ArmSummary]:
        workload = self._job.workload
        arms = summarise(
            self._tallies,
            metric=workload.metric,
            meaningful=workload.model.meaningful,
            objectives=self._job.objectives,
        )
        self._directory.write_memory({n: t.snapshots for n, t in self._tallies.items()})
        self._directory.write_summary(make_summary(self._job, arms, self._provenance, status))
        self._write_manifest(status, ended=_now())
        return arms

    def _write_manifest(self, status: str, ended: str | None = None) -> None:
        self._directory.write_manifest(
            make_manifest(
                self._job,
                self._fleet.engines,
                self._provenance,
                status=status,
                began=self._began,
                ended=ended,
            )
        )

    @property
    def _failed(self) -> int:
        return sum(tally.failed for tally in self._tallies.values())


def _start_engines(
    job: Job, launch: Launch, progress: Progress, log: Callable[[str], Path]
) -> AbstractContextManager[Fleet]:
    for note in job.notes:
        progress.say(note)
    progress.say(f"starting {len(job.arms)} engines: {', '.join(arm.name for arm in job.arms)}")
    return open_fleet(
        job.arms,
        lambda arm: launch(arm.name, job.engine(arm), log(arm.name)),
        lambda name: progress.say(f"{name} is up"),
    )


def _say_notes(fleet: Fleet, progress: Progress) -> None:
    """Say what engines chose where nothing was given, each note once."""
    noted = [note for engine in fleet.engines.values() for note in _notes(engine)]
    for note in dict.fromkeys(noted):
        progress.say(note)


def _notes(engine: Mapping[str, object]) -> Sequence[str]:
    notes = engine.get("notes")
    return notes if isinstance(notes, list) else ()


def _check_alike(jobs: Sequence[Job]) -> None:
    settings = [[job.engine(arm) for arm in job.arms] for job in jobs]
    if any(other != settings[0] for other in settings):
        raise ConfigError(
            "runs on the same engines need the same arms, model, pool and context",
            hint="fix kv_blocks, context and max_running for all of them",
        )


def _check_complete(done: Finished) -> None:
    if done.failed:
        raise EngineError(
            f"{done.failed} requests failed in {done.path}",
            hint="see error in its samples.jsonl, and logs/; the same command goes on from here",
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

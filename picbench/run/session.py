"""A run: engines started, rounds served and verified, files written; and its resumption."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from picbench.engines.algorithms import Reuse
from picbench.engines.config import EngineConfig
from picbench.engines.ledger import MemoryUse
from picbench.errors import ConfigError, EngineError, IncomparableRuns, InvalidRun
from picbench.run.arm import Arm, ArmServer, Fleet, open_fleet
from picbench.run.cache_state import summarise_cache
from picbench.run.job import Job, changed, gpu_memory
from picbench.run.remote import RemoteServer
from picbench.run.schedule import Progress, Rounds
from picbench.run.server import Server
from picbench.run.workload import Workload, load_workload
from picbench.settings import RunConfig
from picbench.store import provenance
from picbench.store import writer as documents
from picbench.store.reader import Run, read_run
from picbench.store.records import ArmBatch, Failure, SampleRow, ServedReply, Tally, to_rows
from picbench.store.summary import BASELINE, ArmSummary, summarise, summarise_memory
from picbench.store.writer import (
    FINAL,
    MANIFEST,
    Attempt,
    RunDirectory,
    Status,
    StoredBatch,
    cut,
    hold,
    log_name,
    read_batches,
)
from picbench.workloads.facts import chunk_sets
from picbench.workloads.models import load_tokenizer


def verify(batch: ArmBatch, arm: Arm, *, warm: bool = False) -> None:
    """Raise InvalidRun where an engine ran other tokens, or reused what its arm may not or must.

    Arms are comparable only on identical token ids, and an arm that reuses nothing is the
    baseline only if its cache never hit. A `warm` batch, before which chunks were preloaded, has
    to hit in arms that reuse chunks. Remote servers count the prompt's tokens when they reply;
    what they reuse is not known.
    """
    pairs = zip(batch.samples, batch.result.outcomes, strict=True)
    results = [(sample, o) for sample, o in pairs if not isinstance(o, Failure | ServedReply)]
    filled = warm and arm.reuse is Reuse.CHUNKS
    if filled and results and not any(result.counts.reused for _, result in results):
        raise InvalidRun(
            f"arm {arm.name}: chunks were preloaded, and round {batch.round} reused none",
            hint="raise `kv_blocks`: the pool may be too small to keep them",
        )
    for sample, result in results:
        where = f"arm {arm.name}, sample {sample.id}"
        if result.prompt_tokens != sample.tokens:
            raise InvalidRun(
                f"{where}: the engine ran other token ids than the workload has",
                hint="report this with the run directory",
            )
        if arm.reuse is Reuse.NOTHING and result.counts.reused:
            raise InvalidRun(
                f"{where}: {result.counts.reused} tokens came from a cache that must be off",
                hint="look for a VLLM_* variable or configuration that turns caching on",
            )


def make_manifest(
    job: Job,
    engines: Mapping[str, Mapping[str, object]],
    provenance: Mapping[str, object],
    attempts: Sequence[Attempt],
    reason: str | None = None,
) -> documents.Manifest:
    """What was asked for and on what it ran; the last of `attempts` says how far the run is."""
    start = "warm" if job.workload.preload else "cold"
    config = job.config.published()
    arms = {}
    for arm in job.arms:
        settings = asdict(arm.endpoint or job.engine(arm))
        if arm.endpoint is None:
            settings["tiers"] = config["tiers"]
        engine = dict(engines[arm.name])
        arms[arm.name] = documents.ArmDocument(arm.algorithm, arm.stock, settings, engine)
    return documents.Manifest(
        **_common(job, provenance),
        status=attempts[-1].status,
        began=attempts[0].began,
        ended=attempts[-1].ended,
        reason=reason,
        attempts=attempts,
        config=config,
        sizes=job.sizes,
        cache=job.config.cache or f"{start} at start, kept between requests",
        arms=arms,
    )


def make_summary(
    job: Job, arms: Mapping[str, ArmSummary], provenance: Mapping[str, Any], status: Status
) -> documents.Summary:
    """Aggregates by arm."""
    return documents.Summary(**_common(job, provenance), status=status, arms=arms)


def _common(job: Job, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What manifest.json and summary.json both have."""
    workload, times, model = job.workload, job.workload.arrivals, job.workload.model
    return {
        "schema": documents.SCHEMA,
        "fingerprint": job.fingerprint,
        "model": documents.ModelDocument(
            model.name, model.weights, model.meaningful, model.restates
        ),
        "workload": documents.WorkloadDocument(
            **asdict(job.facts),
            metric=workload.metric,
            synthetic=workload.synthetic,
            arrivals=None if times is None else documents.ArrivalDocument(len(times), max(times)),
            preloaded_chunks=len(workload.preload),
            request_file=workload.requests,
            origin=workload.origin,
            chat=workload.chat,
            skipped_rows=len(workload.skipped),
            first_skipped=next(iter(workload.skipped), None),
        ),
        "provenance": dict(provenance),
    }


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What is there of a run that is resumed: engines as they were, attempts, committed batches."""

    engines: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    attempts: Sequence[Attempt] = ()
    batches: Sequence[StoredBatch] = ()

    @classmethod
    def load(cls, run: Run) -> "StoredRun":
        """Of an unfinished run; what was left over of a batch is removed.

        Raises IncomparableRuns if it began in another environment.
        """
        if differ := changed(run, provenance.collect()):
            raise IncomparableRuns(
                f"{run.path}: began with other {', '.join(differ)}",
                hint="name a new `output` to measure again",
            )
        engines = {name: arm["engine"] for name, arm in run.manifest["arms"].items()}
        attempts = TypeAdapter(list[Attempt]).validate_python(run.manifest["attempts"])
        batches = read_batches(run.path)
        cut(run.path, batches)
        return cls(engines, attempts, batches)

    @property
    def requests(self) -> int:
        """Requests of all arms that were measured."""
        return sum(batch.line.rows for batch in self.batches)


#: Starts the engine of an arm: its name, its settings, the file for its output.
Launch = Callable[[str, EngineConfig, Path], ArmServer]

#: Starts the engines of a run, given the file for the output of each.
Start = Callable[[Callable[[str], Path]], AbstractContextManager[Fleet]]


@dataclass(frozen=True, slots=True)
class Services:
    """Where workloads come from, how engines start, and on which GPUs; tests bring their own.

    `memory` gives the bytes of each of so many GPUs, None where engines use none. `files` makes
    tables and figures of a run directory, and yields a line for each that it cannot make; None is
    `picbench.figures.run.write_run_files`.
    """

    load: Callable[[RunConfig], Workload] = load_workload
    launch: Launch = Server
    memory: Callable[[int], int | None] = gpu_memory
    files: Callable[[Path], Iterator[str]] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a run: its directory, the arms' summaries and how many requests failed."""

    path: Path
    arms: Mapping[str, ArmSummary]
    failed: int


def execute(job: Job, launch: Launch, progress: Progress) -> Finished:
    """Start the engines, run all rounds, write the run directory.

    Where start-up fails nothing is left behind. From then on, whatever stops the run, all that
    was measured is kept, and the manifest says how the run ended. A run whose directory is there
    is resumed; one that has ended is only read. Raises InvalidRun for one that ended so.
    """
    return _run_or_resume(job, progress, partial(_start_engines, job, launch, progress))


def execute_all(
    jobs: Sequence[Job],
    launch: Launch,
    progress: Progress,
    logs: Path,
    allowed: Callable[[Job], bool],
) -> Iterator[Finished]:
    """Run jobs one after another, each from a cold cache and into a directory of its own.

    The engines start once, so the jobs must agree on their settings (ConfigError); their output
    goes to `logs`. A run that was stopped is resumed, as in `execute`. One with a failed request
    ends them all with EngineError: an engine that is gone would fail those that follow. The first
    one that is not `allowed` ends them too, without an error.
    """
    settings = [[arm.endpoint or job.engine(arm) for arm in job.arms] for job in jobs]
    if any(other != settings[0] for other in settings):
        raise ConfigError(
            "runs on the same engines need the same arms, model, pool and context",
            hint="fix kv_blocks, context and max_running for all of them",
        )
    logs.mkdir(parents=True, exist_ok=True)
    with _start_engines(jobs[0], launch, progress, lambda arm: logs / log_name(arm)) as fleet:
        for job in jobs:
            if not allowed(job):
                return
            for server in fleet.servers.values():
                server.reset()
            progress.say(job.output.name)
            done = _run_or_resume(job, progress, lambda _: nullcontext(fleet))
            if done.failed:
                raise EngineError(
                    f"{done.failed} requests failed in {done.path}",
                    hint="see error in its samples.jsonl, and logs/; the same command resumes "
                    "from here",
                )
            yield done


@contextmanager
def _start_engines(
    job: Job, launch: Launch, progress: Progress, log: Callable[[str], Path]
) -> Iterator[Fleet]:
    """The engines of all arms; says what was chosen where nothing was given, each note once."""
    for note in job.notes:
        progress.say(note)
    tokenizer = partial(load_tokenizer, job.workload.model)
    for arm in job.arms:
        if arm.endpoint is not None:
            with closing(RemoteServer(arm.name, arm.endpoint, tokenizer)) as server:
                server.ready()  # Before engines start, which takes minutes.
    ours = [arm.name for arm in job.arms if arm.endpoint is None]
    many = "s" if len(ours) > 1 else ""
    what = f"arm{many} in turn" if job.shared else f"engine{many}"
    progress.say(f"starting {len(ours)} {what}: {', '.join(ours)}")

    def start(arm: Arm) -> ArmServer:
        if arm.endpoint is not None:
            return RemoteServer(arm.name, arm.endpoint, tokenizer)
        return launch(arm.name, job.engine(arm), log(arm.name))

    starts = {arm.name: partial(start, arm) for arm in job.arms}
    with open_fleet(starts, lambda name: progress.say(f"{name} is up")) as fleet:
        noted = [engine.get("notes") for engine in fleet.engines.values()]
        for note in dict.fromkeys(chain.from_iterable(n for n in noted if isinstance(n, list))):
            progress.say(note)
        yield fleet


def _run_or_resume(job: Job, progress: Progress, start: Start) -> Finished:
    """Measure what is missing in the job's directory; without engines where nothing is."""
    resumed = (job.output / MANIFEST).exists()
    directory = RunDirectory(job.output) if resumed else RunDirectory.create(job.output)
    with hold(job.output):
        stored = StoredRun()
        if resumed:
            run = read_run(job.output)
            if run.manifest["status"] == "invalid":
                raise InvalidRun(
                    f"{run.path}: {run.manifest['reason']}", hint="name a new `output`"
                )
            if run.manifest["status"] in FINAL:
                shown = "has ended and is only shown; name a new directory to measure again"
                progress.say(f"{run.path}: {shown}")
                return Finished(run.path, run.summary, sum(a.failed for a in run.summary.values()))
            stored = StoredRun.load(run)
            progress.say(f"{run.path}: resuming after {stored.requests} of {job.requests} requests")
        whole = resumed and stored.requests == job.requests
        engines = nullcontext(Fleet({}, stored.engines)) if whole else start(directory.log)
        try:
            with engines as fleet:
                return _Session(job, directory, fleet, progress, stored).run()
        except BaseException:
            if not (directory.path / MANIFEST).exists():
                directory.discard()
            raise


class _Session:
    """The measuring part of a run, and its files; `stored` is what there is of it already."""

    def __init__(
        self,
        job: Job,
        directory: RunDirectory,
        fleet: Fleet,
        progress: Progress,
        stored: StoredRun,
    ) -> None:
        self._job, self._directory, self._fleet = job, directory, fleet
        self._progress, self._stored = progress, stored
        self._arms = {arm.name: arm for arm in job.arms}
        self._tallies = {arm.name: Tally() for arm in job.arms}
        self._sets = chunk_sets(job.workload.samples)
        self._provenance = provenance.collect()
        self._attempt = Attempt(_now(), done=stored.requests)
        self._rounds = Rounds(job, fleet, progress.say)
        self._memory: dict[str, Sequence[MemoryUse]] = {}

    def run(self) -> Finished:
        """Run all rounds; the files record how far they got in any case."""
        self._directory.write_workload(self._job.workload.samples, self._sets)
        self._write_manifest()
        status: Status = "interrupted"
        reason = None
        failed = 0
        try:
            self._measure()
            failed = sum(tally.failed for tally in self._tallies.values())
            status = "partial" if failed else "complete"
        except InvalidRun as error:
            status, reason = "invalid", str(error)
            raise
        except Exception as error:
            status, reason = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            arms = self._write_results(status, reason)
            if status not in ("complete", "partial"):
                self._progress.say(f"{status}; results so far are in {self._directory.path}")
        return Finished(self._directory.path, arms, failed)

    def _measure(self) -> None:
        stored, servers = self._stored, self._fleet.servers
        for known in stored.batches:
            self._tallies[known.line.arm].add(known.rows, known.result)
        if stored.requests == self._job.requests:
            self._progress.begin(stored.requests)
            return
        replayed, changed = self._rounds.begin(stored.batches, self._rows)
        self._attempt = replace(self._attempt, replayed=replayed, changed_outputs=changed)
        if changed:
            self._progress.say(
                f"{changed} of {replayed} replies are others this time: "
                "this engine is not deterministic"
            )
        self._progress.begin(stored.requests)
        lost = {b.line.arm: b.line.lost for b in stored.batches if b.line.lost is not None}
        for batch in self._rounds.serve(len(stored.batches), lost):
            self._keep(batch)
        for name in (name for name in servers if self._arms[name].endpoint is None):
            try:
                self._memory[name] = servers[name].call(attrgetter("memory_use"))
            except EngineError as error:
                self._progress.say(f"memory is not measured: {error.message}")

    def _rows(self, batch: ArmBatch) -> list[SampleRow]:
        """The rows of a batch that was just served; for each batch once."""
        rows = to_rows(batch, self._job.workload.grader, self._sets)
        expected = self._rounds.declared.expect(batch)
        repeat = batch.round // self._rounds.per_repeat
        return [
            replace(row, expected_reuse=tokens, repeat=repeat)
            for row, tokens in zip(rows, expected, strict=True)
        ]

    def _keep(self, batch: ArmBatch) -> None:
        rows = self._rows(batch)
        self._tallies[batch.arm].add(rows, batch.result)
        try:
            verify(batch, self._arms[batch.arm], warm=bool(self._job.workload.preload))
            self._rounds.declared.check(batch, rows)
        except InvalidRun:
            # For readers alone: a run that is killed right now must find this again.
            self._directory.append(rows)
            raise
        self._directory.keep(batch, rows)
        self._progress.advance(batch.arm, len(rows))

    def _write_results(self, status: Status, reason: str | None) -> dict[str, ArmSummary]:
        workload, tallies = self._job.workload, self._tallies
        arms = summarise(
            tallies,
            metric=workload.metric,
            meaningful=workload.model.meaningful,
            objectives=self._job.objectives,
            engines=self._fleet.engines,
        )
        full = tallies[BASELINE].rows if BASELINE in tallies else []
        for name, arm in arms.items():
            engine, reuse = self._fleet.engines[name], self._arms[name].reuse
            block = engine.get("block_bytes")
            block = block if isinstance(block, int) else None
            arms[name] = replace(
                arm,
                cache=summarise_cache(self._job.config.cache, reuse, tallies[name], full),
                memory=summarise_memory(arm.blocks, block, self._memory.get(name, ())),
            )
        self._directory.write_memory({n: t.snapshots for n, t in tallies.items()})
        summary = make_summary(self._job, arms, self._provenance, status)
        self._directory.write(documents.SUMMARY, asdict(summary))
        self._attempt = replace(self._attempt, status=status, ended=_now())
        self._write_manifest(reason)
        if status in FINAL:
            self._directory.compact()
        return arms

    def _write_manifest(self, reason: str | None = None) -> None:
        attempts = [*self._stored.attempts, self._attempt]
        made = make_manifest(self._job, self._fleet.engines, self._provenance, attempts, reason)
        self._directory.write(MANIFEST, asdict(made))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
